"""What ``/cluster`` tells of the planner."""

from __future__ import annotations

from typing import Literal

import msgspec


class ClusterPlanner(msgspec.Struct, forbid_unknown_fields=True):
    """What the planner wants, by role (colocated workers are one of their own). decides: false =
    another gateway decides how many workers there are. busy: share of their time that those here
    would compute. attained: of the last minute's requests, those that kept its limits (null if
    nothing came). startup_s: of a worker, as measured last, 0 = never. orders: what it does, or
    would do; they stay until they are done. hold: why it changes nothing. limit: what keeps it from
    its limits."""

    mode: Literal["advise", "act"]
    decides: bool
    wanted: dict[str, int]
    present: dict[str, int]
    busy: dict[str, float]
    attained: float | None
    refuses_early: bool
    borrows: bool
    startup_s: float
    orders: list[str]
    hold: str
    limit: str
