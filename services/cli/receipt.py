"""A receipt as a small table for people. Its fields: ``shared/telemetry/lifetime.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from services.cli.words import size, speed, terms_text
from shared.telemetry.lifetime import TTFT_PHASES

PHASES = {
    "queue_s": "waited for a place in the gateway",
    "route_s": "chose a pair of workers",
    "retry_s": "lost to failed attempts",
    "prefill_queue_s": "waited on the prefill worker",
    "prefill_s": "computed the prompt and token 1",
    "handover_s": "messages and streams",
}


def receipt_table(receipt: Mapping[str, Any], usage: Mapping[str, Any] | None = None) -> Table:
    """Return the table: the phases up to the first token, which add up, then the rest."""
    table = Table(title="receipt", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("phase")
    table.add_column("time", justify="right")
    table.add_column("", style="dim")
    for name in TTFT_PHASES:
        if receipt.get(name) or name not in ("queue_s", "route_s", "retry_s"):
            label = name.removesuffix("_s").replace("_", " ").replace("handover", "hand-over")
            table.add_row(label, _ms(receipt.get(name)), PHASES[name])
    table.add_row("= first token", _ms(receipt.get("ttft_s")), "from arrival", style="bold")
    if receipt.get("fetched_tokens"):
        what = f"{receipt['fetched_tokens']} tokens from another worker's cache, beside the queue"
        table.add_row("prefix fetched", _ms(receipt.get("fetch_s")), what)
    tiers = (("dram_tokens", "memory"), ("ssd_tokens", "disk"))
    loaded = [f"{receipt[name]} tokens from {tier}" for name, tier in tiers if receipt.get(name)]
    if loaded:
        what = f"{', '.join(loaded)} below the pool, beside the queue"
        table.add_row("prefix loaded", _ms(receipt.get("load_s")), what)
    if receipt.get("transfer_bytes"):
        exposed = _ms(receipt.get("transfer_exposed_s"))
        table.add_row("KV transfer", _ms(receipt.get("transfer_s")), _transfer(receipt))
        table.add_row("… exposed", exposed, "after token 1 was known, until all of it had come")
    if receipt.get("first_step_s") is not None:
        table.add_row("first decode step", _ms(receipt["first_step_s"]), "token 1 to token 2")
    if receipt.get("tpot_s") is not None:
        rate = f"{1 / receipt['tpot_s']:.0f} tokens/s" if receipt["tpot_s"] else ""
        table.add_row("per token", _ms(receipt["tpot_s"]), rate)
    table.add_row("= all", _ms(receipt.get("e2e_s")), _counts(receipt, usage or {}), style="bold")
    decision = receipt.get("decision")
    for role in ("prefill", "decode"):
        if worker := receipt.get(role):
            pool = receipt.get(f"{role}_pool")
            table.add_row(f"{role} worker", worker[:6], f"{pool} pool{_score(decision, role)}")
    if receipt.get("attempts", 1) > 1:
        errors = ", ".join(receipt.get("errors", ()))
        table.add_row("attempts", str(receipt["attempts"]), errors)
    return table


def _score(decision: Mapping[str, Any] | None, role: str) -> str:
    """Say by what the worker was taken, if by a sum."""
    if not decision or not (it := decision[role])["terms"]:
        return ""
    return f", {decision['policy']}'s score {it['score']:.3g}{terms_text(it['terms'])}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def _transfer(receipt: Mapping[str, Any]) -> str:
    how = ", ".join(str(receipt[name]) for name in ("lane", "mode") if receipt.get(name))
    rate = speed(receipt.get("gb_per_s", 0.0))
    return f"{size(receipt['transfer_bytes'])} prefill → decode, {rate} ({how})"


def _counts(receipt: Mapping[str, Any], usage: Mapping[str, Any]) -> str:
    parts: list[str] = []
    if "prompt_tokens" in usage:
        parts.append(
            f"{usage['prompt_tokens']} tokens in ({receipt.get('cached_tokens', 0)} cached)"
        )
    parts.append(f"{receipt.get('output_tokens', 0)} out")
    return ", ".join(parts)
