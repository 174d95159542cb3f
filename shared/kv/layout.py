"""The shape of KV: what two workers must agree on, and how many bytes things take.

Wire layout of a frame (tokens [a, b), layers [l, m)), chosen so that it does not depend on
anybody's block size, nor on how an engine keeps KV: ``[m - l, parts, b - a, num_kv_heads,
head_dim]``, contiguous, in the layout's dtype.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from shared.errors import IncompatiblePeer

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """KV of one model in one dtype. ``uint8`` belongs to the fake engine.

    parts: 2, a key and a value; or 1, a latent vector that stands for both, with one head (MLA,
    DeepSeek-V2, arXiv 2405.04434, section 2.1).
    """

    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    parts: int = 2

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token's KV in one layer."""
        return self.parts * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.num_layers * self.token_layer_bytes

    @property
    def digest(self) -> bytes:
        """16 bytes that differ for any two layouts that must not exchange KV."""
        text = f"{self.dtype}/{self.num_layers}/{self.parts}/{self.num_kv_heads}/{self.head_dim}"
        return hashlib.sha256(text.encode()).digest()[:16]

    def require_same(self, other: KvLayout, *, who: str) -> None:
        """Raise IncompatiblePeer, naming the first difference, unless the peer's layout equals
        ours."""
        for name in ("dtype", "num_layers", "parts", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise IncompatiblePeer(
                    f"{who} has KV {name} {theirs}, this worker has {ours}: "
                    "start both with the same --model and --dtype",
                    code="kv_layout",
                    param=name,
                )
