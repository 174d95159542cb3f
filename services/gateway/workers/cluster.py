"""The mesh at this moment, JSON-ready: what ``GET /cluster`` answers and live views show.

Workers are told as they reported themselves last; requests and transfers are this gateway's own,
of the last minute. Nothing here decides.
"""

from __future__ import annotations

from typing import Any

from services.gateway.core.admission import AdmissionStatistics
from services.gateway.core.peer_table import PeerTable
from services.gateway.core.pools import pool_at_home, pool_of
from services.gateway.core.routing import RouteDecision
from services.gateway.core.window import SECONDS, Histogram, LastMinute, Pair, Summary, Transfers
from services.gateway.core.worker import Role, Worker
from services.gateway.mesh import ServedModel
from services.gateway.workers.timeline import Transfer
from shared.address import Address
from shared.ids import Incarnation
from shared.telemetry.lifetime import Receipt
from shared.telemetry.tracing import CANCELLED


class WindowWatcher:
    """Feeds the window from every answer's timeline (an ``AnswerWatcher``)."""

    def __init__(self, window: LastMinute) -> None:
        self._window = window

    def first_token(
        self, now: float, *, ttft_s: float, prompt_tokens: int, cached_tokens: int
    ) -> None:
        """See ``AnswerWatcher``."""
        self._window.first_token(now, ttft_s, prompt_tokens)

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        """See ``AnswerWatcher``."""
        self._window.later_tokens(now, num_tokens, gap_s)

    def transferred(self, now: float, decision: RouteDecision, transfer: Transfer) -> None:
        """See ``AnswerWatcher``."""
        self._window.transferred(
            now,
            Pair(decision.prefill, decision.decode, transfer.lane),
            num_bytes=transfer.num_bytes,
            transfer_s=transfer.transfer_s,
            exposed_s=transfer.exposed_s,
        )

    def ended(self, now: float, receipt: Receipt, error: str) -> None:
        """See ``AnswerWatcher``."""
        self._window.ended(now, has_failed=error not in ("", CANCELLED))


def cluster_body(
    *,
    incarnation: Incarnation,
    not_ready_reason: str,
    uptime_s: float,
    model: ServedModel | None,
    table: PeerTable,
    counts: AdmissionStatistics,
    summary: Summary,
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
        },
        "workers": [worker_body(worker) for role in Role for worker in table.all(role)],
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
    }


def worker_body(worker: Worker) -> dict[str, Any]:
    """Return one worker, JSON-ready. home: what it is when nothing is asked of it; pool: what it is
    now."""
    status = worker.status
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
        "paired": sorted(_hex(incarnation) for incarnation in status.paired),
    }


def _transfers_body(pair: Pair, transfers: Transfers) -> dict[str, Any]:
    return {
        "prefill": _hex(pair.prefill),
        "decode": _hex(pair.decode),
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
