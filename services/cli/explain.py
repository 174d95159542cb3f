"""``pdmesh explain``: why a request went where it went, and whether it would go there again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import orjson

from services.cli.client import LOCAL_GATEWAY, GatewayRefused, RunningGateway
from services.cli.flags import require
from services.cli.sources import PLAIN
from services.cli.words import print_json, terms_text
from services.gateway.core.routing.decision_record import replay as decide_again
from services.gateway.own_policy import load_policy
from services.planner.rows import read_text
from shared.errors import InvalidRequest
from shared.runtime.service import EXIT_FAILED, EXIT_OK

MOST_SHOWN = 8
"""Workers of a side; those with the lowest scores."""

LEAST_ASKED, ASKED_EACH = 16, 10
"""Connections, and connections for each process that was met, until the answer is that nobody
remembers a request. Of several gateway processes at one port each connection finds another: of 2 to
64 one is missed three times in ten thousand at most."""


def explain(
    request: Annotated[str, PLAIN],
    /,
    *,
    replay: Annotated[bool, PLAIN] = False,
    policy: Annotated[str, PLAIN] = "",
    json: Annotated[bool, PLAIN] = False,
    gateway: RunningGateway = LOCAL_GATEWAY,
) -> int:
    """Say why a request went where it went.

    The gateway keeps the decisions of its last requests: what it knew of every worker, its policy's
    scores, and what it expected the first token to take.

    Parameters
    ----------
    request
        The id of an answer, or of the header x-request-id; or a file that --json wrote.
    replay
        Decide again here, from the record alone, and say whether it comes out the same.
    policy
        With --replay: the policy of your own that decided, package.module:Class. A record's word
        alone imports nothing.
    json
        Print the record instead, to keep it.
    """
    require(replay or not policy, "--policy is of --replay alone")
    require(not (replay and json), "give --replay or --json: one prints, one keeps")
    path = Path(request)
    is_kept = os.path.isfile(request) or len(path.parts) > 1  # Path's raises for a long name
    kept_at = f"/cluster/requests/{quote(request, safe='')}"
    told = _read(path) if is_kept else asyncio.run(_ask(gateway, kept_at))
    try:
        lines = [*_lines(told)]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise InvalidRequest(
            f"{request} is not what `pdmesh explain REQUEST_ID --json` prints"
        ) from None
    if json:
        print_json(told)
        return EXIT_OK
    for line in lines:
        print(line)
    is_same = True
    load_policy(policy)
    if replay:
        for decision in told["decisions"]:
            differences = decide_again(decision)
            is_same = is_same and not differences
            verdict = "; ".join(differences) or "the same pair, from the same scores"
            print(f"attempt {decision['attempt']} decided again: {verdict}")
    return EXIT_OK if is_same else EXIT_FAILED


async def _ask(gateway: RunningGateway, path: str) -> Any:
    num_asked, met = 0, set[str | None]()
    while True:
        async with gateway.access.session() as session:
            try:
                return await gateway.call(session, path)
            except GatewayRefused as refused:
                if refused.code != "no_request":
                    raise
                # Over the same connection, and so of the same process.
                view = await gateway.call(session, "/cluster")
                met.add(view.get("gateway", {}).get("incarnation"))
                num_asked += 1
                if num_asked >= max(LEAST_ASKED, ASKED_EACH * len(met)):
                    raise


def _read(path: Path) -> Any:
    try:
        return orjson.loads(read_text(path))
    except orjson.JSONDecodeError:
        return None  # no record, as anything else that is none


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    receipt, decisions, error = told["receipt"], told["decisions"], told.get("error", "")
    state = "ended" if told["ended"] else "still running"
    yield f"request {told['request_id']}, {state}"
    if not decisions:
        waited = f"{1000 * receipt['queue_s']:.1f} ms in the queue"
        why = error or ", ".join(receipt["errors"])
        yield f"it was never sent to workers, {waited}" + (f": {why}" if why else "")
    for decision in decisions:
        yield ""
        yield from _decision(decision)
    if decisions:
        yield ""
        yield _outcome(decisions[-1]["prediction"], receipt)
        if error:
            yield f"it ended early: {error}"


def _decision(decision: Mapping[str, Any]) -> Iterator[str]:
    avoided = f", avoiding {', '.join(decision['avoid'])}" if decision["avoid"] else ""
    yield (
        f"attempt {decision['attempt']}: {decision['num_tokens']:,} tokens, at most "
        f"{decision['max_new_tokens']:,} to come; policy {decision['policy']}, random number "
        f"{decision['random']:.6f}{avoided}"
    )
    for side, load, unit in (
        ("prefill", "tokens", "pending_tokens"),
        ("decode", "blocks", "reserved_blocks"),
    ):
        workers = decision[f"{side}s"]
        yield f"  {side}: {len(workers)} could be taken; lower scores are better"
        for worker in _best(workers, decision[side]):
            mark = "▶" if worker["worker"] == decision[side] else " "
            unseen = worker[f"unseen_{load}"]
            own = f" ({unseen:,} of them ordered since its report)" if unseen else ""
            queue = f", queue {1000 * worker['queue_s']:.1f} ms" if side == "prefill" else ""
            score = f"{worker['score']:g}{terms_text(worker.get('terms'))}"
            yield (
                f"  {mark} {worker['address']:<21} score {score}: "
                f"{worker[unit]:,} {load}{own}{queue}, "
                f"report {1000 * worker['report_age_s']:.0f} ms old"
            )


def _best(workers: Sequence[Mapping[str, Any]], chosen: str) -> list[Mapping[str, Any]]:
    best = sorted(workers, key=lambda it: it["score"])
    shown = best[:MOST_SHOWN]
    return shown + [it for it in best[MOST_SHOWN:] if it["worker"] == chosen]


def _outcome(prediction: Mapping[str, Any] | None, receipt: Mapping[str, Any]) -> str:
    came = receipt.get("ttft_s")
    actual = "no first token yet" if came is None else f"it came after {1000 * came:.1f} ms"
    if prediction is None:
        return f"nothing was predicted, for the prefill worker knew no step times; {actual}"
    terms = (
        ("queue", "queue_s"),
        ("own orders", "own_s"),
        ("fetch", "fetch_s"),
        ("load", "load_s"),
        ("prefill", "prefill_s"),
        ("hand-over", "handover_s"),
    )
    total = " + ".join(f"{name} {1000 * prediction.get(key, 0.0):.1f}" for name, key in terms)
    expected_s = receipt.get("predicted_ttft_s", prediction["ttft_s"])
    waited_s = expected_s - prediction["ttft_s"]
    num_cached, num_fetched = receipt["cached_tokens"], receipt["fetched_tokens"]
    fetched = f", {num_fetched:,} of them fetched" if num_fetched else ""
    cached = f" ({num_cached:,} tokens were cached{fetched})" if num_cached else ""
    return (
        f"first token expected after {1000 * expected_s:.1f} ms = waited {1000 * waited_s:.1f} + "
        f"{total}; {actual}{cached}"
    )
