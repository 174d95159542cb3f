"""The mesh at this moment, JSON-ready: what ``GET /cluster`` answers and live views show; and its
last requests as receipts (``GET /cluster/requests``), which plans are held against.

Workers are told as they reported themselves last; requests and transfers are this gateway's own,
of the last minute. Nothing here decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.core.admission.admission import AdmissionStatistics
from services.gateway.core.admission.overload import OverloadMode
from services.gateway.core.index.prefixes import Prefixes
from services.gateway.core.routing.expectations import EndedAnswer, Expectations
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.pools import pool_at_home, pool_of
from services.gateway.core.routing.routing import RouteDecision
from services.gateway.core.scaling.scaling import is_first, seen_workers
from services.gateway.core.window import (
    SECONDS,
    Histogram,
    LastMinute,
    ReadPrompts,
    Summary,
    Transfers,
)
from services.gateway.core.worker import Role, Worker
from services.gateway.mesh import ServedModel
from services.gateway.workers.membership import Membership
from services.gateway.workers.timeline import AnswerWatcher, Timeline, Transfer
from shared.address import Address
from shared.config import GatewayConfig
from shared.ids import Incarnation
from shared.predict.transfer import KvLink
from shared.telemetry.lifetime import Receipt
from shared.telemetry.tracing import CANCELLED

HOT_PREFIXES = 5
"""Most that are told."""


class MeshWatcher(AnswerWatcher):
    """Feeds the window from every answer's timeline, and tells predictions what came of them."""

    def __init__(self, window: LastMinute, members: Membership) -> None:
        self._window = window
        self._members = members

    def first_token(
        self, now: float, *, ttft_s: float, prompt_tokens: int, cached_tokens: int
    ) -> None:
        self._window.first_token(now, ttft_s, prompt_tokens)

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        self._window.later_tokens(now, num_tokens, gap_s)

    def transferred(self, now: float, decision: RouteDecision, transfer: Transfer) -> None:
        link = KvLink(decision.prefill, decision.decode, transfer.lane)
        num_bytes, seconds = transfer.num_bytes, transfer.transfer_s
        self._members.expectations.transfers.observe(link, num_bytes, seconds)
        self._window.transferred(
            now, link, num_bytes=num_bytes, transfer_s=seconds, exposed_s=transfer.exposed_s
        )

    def ended(self, now: float, receipt: Receipt, error: str) -> None:
        self._window.ended(now, has_failed=error not in ("", CANCELLED))
        if receipt.ttft_s is not None:
            worker = int(receipt.prefill, 16)
            prompt = ReadPrompts(
                receipt.prompt_tokens,
                receipt.cached_tokens,
                receipt.fetched_tokens,
                receipt.dram_tokens,
                receipt.ssd_tokens,
            )
            self._window.read(now, worker, prompt)
        self._members.learn(
            EndedAnswer(
                # '' = it was never sent to anybody.
                prefill=Incarnation(int(receipt.prefill or "0", 16)),
                decode=Incarnation(int(receipt.decode or "0", 16)),
                is_whole=not error,
                num_attempts=receipt.attempts,
                prompt_tokens=receipt.prompt_tokens,
                output_tokens=receipt.output_tokens,
                ttft_s=receipt.ttft_s,
                predicted_ttft_s=receipt.predicted_ttft_s,
                handover_s=receipt.handover_s,
                cached_tokens=receipt.cached_tokens,
                predicted_cached_tokens=receipt.predicted_cached_tokens,
                fetched_from=Incarnation(int(receipt.fetched_from or "0", 16)) or None,
                fetched_bytes=receipt.fetched_bytes,
                fetch_s=receipt.fetch_s,
            )
        )


def cluster_body(
    *,
    incarnation: Incarnation,
    not_ready_reason: str,
    uptime_s: float,
    model: ServedModel | None,
    table: PeerTable,
    expectations: Expectations,
    prefixes: Prefixes | None,
    now: float,
    counts: AdmissionStatistics,
    summary: Summary,
    planner: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the whole view. Workers: every member, prefill first, in joining order. Percentiles
    are None where nothing came."""
    covered_s = max(summary.covered_s, 1.0)  # the first second is no base for a rate
    return {
        "ready": not not_ready_reason,
        "not_ready_reason": not_ready_reason,
        "uptime_s": round(uptime_s, 3),
        "model": model and {"id": model.name, "max_model_len": model.max_model_len},
        "gateway": {
            "incarnation": _hex(incarnation),
            "running": counts.num_running,
            "queued": counts.num_waiting,
            "refused": counts.num_refused,
            "refusals": dict(counts.refusals),
        },
        "workers": [
            worker_body(worker, expectations, prefixes, now, summary.prompts)
            for role in Role
            for worker in table.all(role)
        ],
        "window": {
            "seconds": SECONDS,
            "requests": summary.num_ended,
            "failed": summary.num_failed,
            "output_tokens": summary.num_output_tokens,
            "prompt_tokens": summary.num_prompt_tokens,
            "output_tokens_per_s": round(summary.num_output_tokens / covered_s, 3),
            "prompt_tokens_per_s": round(summary.num_prompt_tokens / covered_s, 3),
            "output_tokens_each_s": summary.output_tokens_each_s,
            "ttft_s": _percentiles(summary.ttft_s, 50, 90, 99),
            "itl_s": _percentiles(summary.itl_s, 50, 90, 99),
            "unlisted_transfers": summary.num_unlisted_transfers,
        },
        "transfers": [_transfers_body(*entry) for entry in summary.transfers.items()],
        "hot_prefixes": [
            {
                "hash": _hex(it.key),
                "tokens": it.num_tokens,
                "share": round(it.share, 4),
                "workers": num_workers,
            }
            for it, num_workers in (prefixes.hottest(HOT_PREFIXES) if prefixes else ())
        ],
        "planner": planner,
    }


def worker_body(
    worker: Worker,
    expectations: Expectations,
    prefixes: Prefixes | None,
    now: float,
    prompts: Mapping[int, ReadPrompts],
) -> dict[str, Any]:
    """Return one worker, JSON-ready. home: what it is when nothing is asked of it; pool: what it is
    now. prompts: of the last minute, by worker."""
    status = worker.status
    read = prompts.get(worker.incarnation, ReadPrompts())
    known = None if prefixes is None else prefixes.known(worker)
    error = expectations.error_p50(worker.incarnation, now)
    return {
        "incarnation": _hex(worker.incarnation),
        "role": worker.home.value,
        "home": pool_at_home(worker).value,
        "pool": pool_of(worker).value,
        "moves": len(worker.serves) > 1,
        "address": str(Address(worker.host, worker.port)),
        "state": worker.standing.value,
        "running": status.num_running,
        "waiting": status.num_waiting,
        "pending_tokens": status.pending_tokens,
        "blocks": {
            "total": worker.num_blocks,
            "free": status.free_blocks,
            "reserved": status.reserved_blocks,
            "quarantined": status.quarantined_blocks,
        },
        "step_s": round(status.step_s, 6),
        "prediction": {
            "known": status.prompt_steps.is_known or status.answer_steps.is_known,
            "believed": worker.is_believed,
            "queue_s": round(sum(worker.wait_s(now)), 6),
            "prompt_step_error": round(status.prompt_steps.error_p50, 4),
            "answer_step_error": round(status.answer_steps.error_p50, 4),
            "ttft_error": None if error is None else round(error, 4),
        },
        "prompts": {
            "tokens": read.num_tokens,
            "cached_tokens": read.num_cached,
            "fetched_tokens": read.num_fetched,
            "dram_tokens": read.num_dram,
            "ssd_tokens": read.num_ssd,
        },
        "prefixes": known and {"state": known[0].value, "count": known[1]},
        "paired": sorted(_hex(incarnation) for incarnation in status.paired),
    }


def recent_body(
    members: Membership,
    timelines: Iterable[Timeline],
    *,
    model: str,
    config: GatewayConfig,
    overload: OverloadMode,
    num_waiting: int,
    started_at: float,
    now: float,
) -> dict[str, Any]:
    """Return the body: see ``RecentRequests`` of ``http/cluster_bodies.py``. started_at, now: loop
    time."""
    workers, expectations = members.table.workers, members.expectations
    # What pushes on their way take of a link is left out of its speed: an idle one tells it.
    speeds = [max(it.status.speeds.values()) for it in workers if it.status.speeds]
    return {
        "now_s": round(now - started_at, 6),
        "model": model,
        "policy": config.policy,
        "max_running": config.max_running,
        "max_waiting": config.max_waiting,
        "max_wait_s": config.max_wait_s,
        "max_pending_tokens": config.max_pending_tokens,
        "overload": overload.value,
        "waiting": num_waiting,
        "decides": is_first(members.incarnation, workers),
        "handover_s": {
            "pair": expectations.handover_s(is_colocated=False),
            "colocated": expectations.handover_s(is_colocated=True),
        },
        "link_bytes_s": statistics.median(speeds) if speeds else 0.0,
        "workers": [
            {
                "incarnation": f"{seen.incarnation:016x}",
                "address": seen.address,
                "kind": seen.kind.value,
                "moves": seen.moves,
                "draining": seen.is_draining,
                "age_s": round(seen.age_s, 6),
                "held": seen.num_held,
                "queue_s": round(seen.queue_s, 6),
                "prompt_steps": seen.prompt_steps._asdict(),
                "answer_steps": seen.answer_steps._asdict(),
                "blocks": worker.num_blocks,
                "block_size": worker.block_size,
                "step_tokens": worker.status.step_tokens,
                "batch_tokens": worker.status.batch_tokens,
                "max_running": worker.status.max_running,
                "token_bytes": worker.layout.token_bytes,
                "taken": worker.status.num_taken,
            }
            for worker, seen in zip(workers, seen_workers(workers, now), strict=True)
        ],
        "requests": [timeline.told(started_at) for timeline in timelines],
    }


def _transfers_body(pair: KvLink, transfers: Transfers) -> dict[str, Any]:
    return {
        "prefill": _hex(pair.source),
        "decode": _hex(pair.destination),
        "lane": pair.lane,
        "count": transfers.count,
        "bytes": transfers.num_bytes,
        # Of rates the slow end is the bad one.
        "gb_per_s": _percentiles(transfers.gb_per_s, 50, 10),
        "exposed_s": _percentiles(transfers.exposed_s, 50, 99),
    }


def _percentiles(histogram: Histogram, *percents: int) -> dict[str, float] | None:
    if not histogram.count:
        return None
    return {f"p{percent}": round(histogram.percentile(percent), 6) for percent in percents}


def _hex(incarnation: int) -> str:
    return f"{incarnation:016x}"
