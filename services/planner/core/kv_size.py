"""How many bytes a context's keys and values are, and how long they travel.

bytes a token = 2 * layers * kv_heads * head_dim * bytes of an element; MLA keeps one latent vector
and one rotary key a layer instead. GB and Gb are powers of ten, GiB of two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from shared.errors import InvalidRequest

_LINK: Final = re.compile(r"\s*(\d{1,99}(?:\.\d{1,99})?)\s*([kMGT]i?)?([Bb])(?:/s|ps)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What of a model decides the size of its KV.

    hidden: width of the model, num_heads: of queries (both only for what recomputation costs).
    latent: elements a layer and token of MLA, 0 = keys and values of every KV head. num_weights: of
    the whole model, 0 = not known.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    bytes_per_element: float = 2.0
    latent: int = 0
    num_weights: float = 0.0

    @property
    def layer_bytes(self) -> float:
        """Of one token in one layer."""
        elements = self.latent or 2 * self.num_kv_heads * self.head_dim
        return elements * self.bytes_per_element

    @property
    def token_bytes(self) -> float:
        """Of one token in all layers."""
        return self.num_layers * self.layer_bytes


def kv_of_bytes(name: str, token_bytes: float) -> KvShape:
    """Return the shape of a model of which the KV of a token is known, and nothing else."""
    return KvShape(
        name=name,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden=1,
        latent=1,
        bytes_per_element=token_bytes,
    )


def link_need(rate: float, kv_bytes: float, budget_s: float) -> tuple[float, float]:
    """Return what a link must give, bytes/s, of which the greater counts: for ``rate`` requests/s
    for ever, and for one of them within the part of the time to first token (or of prefill,
    layer-wise) that hides the transfer.

    "QPS * KV / TTFT" has the unit bytes/s^2.
    """
    return rate * kv_bytes, kv_bytes / budget_s


def read_link(flag: str, text: str) -> float:
    """Return bytes a second of '25GB/s', '200Gb/s', '10 GiB/s': B are bytes, b bits.

    Raises InvalidRequest.
    """
    match = _LINK.fullmatch(text)
    if match is None or not float(match[1]):
        raise InvalidRequest(
            f"{flag} must be a rate above zero such as 25GB/s (bytes) or 200Gb/s (bits), "
            f"not {text!r}"
        )
    prefix = match[2] or " "
    factor = (1024 if prefix.endswith("i") else 1000) ** " kMGT".index(prefix[0])
    return float(match[1]) * factor / (8 if match[3] == "b" else 1)


PUBLISHED: Final = {
    name: KvShape(
        name=name,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden or heads * head_dim,
        num_weights=billions * 1e9,
    )
    for name, billions, layers, heads, kv_heads, head_dim, hidden in (
        ("llama-7b", 6.74, 32, 32, 32, 128, 0),
        ("llama-13b", 13.02, 40, 40, 40, 128, 0),
        ("llama-30b", 32.53, 60, 52, 52, 128, 0),
        ("llama-65b", 65.29, 80, 64, 64, 128, 0),
        ("llama-2-70b", 68.98, 80, 64, 8, 128, 0),
        ("llama-3-8b", 8.03, 32, 32, 8, 128, 0),
        ("llama-3-70b", 70.55, 80, 64, 8, 128, 0),
        ("llama-3-405b", 405.9, 126, 128, 8, 128, 0),
        ("opt-13b", 12.85, 40, 40, 40, 128, 0),
        ("opt-66b", 65.72, 64, 72, 72, 128, 0),
        ("opt-175b", 174.6, 96, 96, 96, 128, 0),
        ("bloom-176b", 176.2, 70, 112, 112, 128, 0),
        ("mistral-7b", 7.24, 32, 32, 8, 128, 0),
        ("qwen3-0.6b", 0.596, 28, 16, 8, 128, 1024),
        ("palm-540b", 540.35, 118, 48, 1, 256, 18432),
    )
}
"""Shapes as their config.json files have them, 2 bytes an element, for models without a folder.
Billions of weights, then layers, heads of queries and of KV, elements of a head, and of the model's
width if that is not the heads' together."""
