"""Routing decisions of which only the two workers matter."""

from __future__ import annotations

from services.gateway.core.routing.routing import RouteDecision, Seen
from services.gateway.core.routing.sides import RouteRequest, Scores, Sides
from shared.ids import Incarnation

NOBODY = Sides([], [], [])


def a_decision(prefill: int, decode: int) -> RouteDecision:
    """The decision for this pair."""
    return RouteDecision(
        policy="test",
        prefill=Incarnation(prefill),
        decode=Incarnation(decode),
        places=(0, 0),
        sides=NOBODY,
        scores=Scores([0.0], [0.0]),
        prefill_pool="prompt",
        decode_pool="token",
        seen=Seen(RouteRequest(1, 1), 0.0, None, ()),
    )
