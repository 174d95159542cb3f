"""The last requests as receipts, and the mesh that they met, JSON-ready: what
``GET /cluster/requests`` answers, and what plans are held against. Nothing here decides."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from services.gateway.core.scaling import is_first, seen_workers
from services.gateway.workers.membership import Membership
from services.gateway.workers.timeline import Timeline


def recent_body(
    members: Membership,
    timelines: Iterable[Timeline],
    *,
    model: str,
    policy: str,
    started_at: float,
    now: float,
) -> dict[str, Any]:
    """Return the body: see ``RecentRequests`` of ``http/cluster_bodies.py``. started_at, now: loop
    time."""
    workers, expectations = members.table.workers, members.expectations
    speeds = [speed for worker in workers for speed in worker.status.speeds.values() if speed > 0]
    return {
        "now_s": round(now - started_at, 6),
        "model": model,
        "policy": policy,
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
                "token_bytes": worker.layout.token_bytes,
                "taken": worker.status.num_taken,
            }
            for worker, seen in zip(workers, seen_workers(workers, now), strict=True)
        ],
        "requests": [timeline.told(started_at) for timeline in timelines],
    }
