"""``pdmesh plan kv``: how large a context's KV is, how long it travels, fetch or recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rich.table import Table

from services.cli.plan.view import require_ranges
from services.cli.quantities import LinkRate
from services.cli.sources import JsonFlag
from services.cli.words import plain_console, print_json, speed
from services.planner.core.fetch import exposed_s, fetch_pays_from, prefill_flops
from services.planner.core.kv_size import KvShape, link_need
from services.planner.core.roofline import DEVICES
from services.planner.model_kv import kv_shape
from shared.errors import InvalidRequest

_MOST_TOKENS: Final = 100_000_000


def kv(
    model: str,
    /,
    *,
    tokens: int = 8192,
    link: LinkRate = 25e9,
    device: str = "a800",
    devices: int = 8,
    efficiency: float = 1.0,
    kv_bytes: float | None = None,
    rate: float = 1.0,
    as_json: JsonFlag = False,
) -> None:
    """Size and travel time of a context's KV, and whether to fetch it or compute it anew.

    Parameters
    ----------
    model
        A folder with config.json, demo, a hub name, or a published model (llama-3-70b; an unknown
        name lists them).
    tokens
        Tokens of context.
    link
        Bandwidth between two workers: GB/s are bytes, Gb/s bits.
    device
        What computes: a100, a800, h100, h800, h200, h20, b200, l40s or l4, at its data sheet's
        dense 16-bit peak.
    devices
        How many of them compute one prompt together.
    efficiency
        Share of the peak that prefill really gets, above 0 and at most 1. 1 is the paper's bound:
        fetching pays earlier on a real device.
    kv_bytes
        Bytes of an element of KV; default: what config.json's dtype has.
    rate
        Requests a second that the link must carry.
    """
    require_ranges(
        ("--tokens", 1 <= tokens <= _MOST_TOKENS, f"1..{_MOST_TOKENS}"),
        ("--devices", 1 <= devices <= 1_000_000, "1..1000000"),
        ("--efficiency", 0 < efficiency <= 1, "above 0 and at most 1"),
        ("--kv-bytes", kv_bytes is None or 0 < kv_bytes <= 16, "above 0 and at most 16"),
        ("--rate", 0 < rate < 1e9, "above 0"),
    )
    if device.lower() not in DEVICES:
        raise InvalidRequest(f"--device must be one of {', '.join(DEVICES)}, not {device!r}")
    shape = kv_shape(model)
    if kv_bytes is not None:
        shape = replace(shape, bytes_per_element=kv_bytes)
    flops = DEVICES[device.lower()].flops * devices * efficiency
    facts = _facts(shape, tokens, link, flops, rate)
    verdict = "fetch" if link > facts["fetch_pays_from"] else "recompute"
    if as_json:
        print_json({"model": shape.name, **facts, "verdict": verdict})
        return
    where = f"{devices} x {device} at {efficiency:.0%} of the peak"
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value, meaning in (
        ("KV of a token", _bytes(facts["token_bytes"]), _shape_text(shape)),
        (f"KV of {tokens:,} tokens", _bytes(facts["bytes"]), ""),
        ("moved", _ms(facts["move_s"]), f"at {speed(link / 1e9)}"),
        ("computed", _ms(facts["prefill_s"]), f"on {where}"),
        ("fetching pays from", f"{facts['fetch_pays_from'] / 1e9:.2f} GB/s", verdict),
        ("exposed, layer-wise", _ms(facts["exposed_layerwise_s"]), "left after prefill"),
        (
            "link needs",
            f"{facts['link_needed'] / 1e9:.2f} GB/s",
            f"for {rate:g} requests/s, each hidden by its own prefill",
        ),
    ):
        table.add_row(name, value, meaning)
    console = plain_console()
    console.print(shape.name, style="bold")
    console.print(table)


def _facts(shape: KvShape, tokens: int, link: float, flops: float, rate: float) -> dict[str, float]:
    num_bytes = shape.token_bytes * tokens
    prefill_s = prefill_flops(shape, tokens) / flops
    return {
        "tokens": tokens,
        "token_bytes": shape.token_bytes,
        "bytes": num_bytes,
        "move_s": num_bytes / link,
        "prefill_s": prefill_s,
        "fetch_pays_from": fetch_pays_from(shape, tokens, flops),
        "exposed_layerwise_s": exposed_s(shape, tokens, prefill_s=prefill_s, link=link),
        "link_needed": max(link_need(rate, num_bytes, prefill_s)),
    }


def _shape_text(shape: KvShape) -> str:
    if shape.latent:
        return (
            f"{shape.num_layers} layers x {shape.latent} (MLA) x {shape.bytes_per_element:g} bytes"
        )
    return (
        f"2 x {shape.num_layers} layers x {shape.num_kv_heads} heads x {shape.head_dim} x "
        f"{shape.bytes_per_element:g} bytes"
    )


def _bytes(num: float) -> str:
    value = num
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:,.3f} {unit}"
    return f"{value:g} B"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
