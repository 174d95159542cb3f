"""Heartbeats: what silence says about a peer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.liveness import Liveness, LivenessRule, PeerState


@pytest.mark.parametrize(
    ("silence_s", "state"),
    [
        (0.0, PeerState.ALIVE),
        (1.49, PeerState.ALIVE),
        (1.5, PeerState.SUSPECT),
        (2.99, PeerState.SUSPECT),
        (3.0, PeerState.DEAD),
        (1e6, PeerState.DEAD),
    ],
)
def test_silence_makes_suspect_then_dead(silence_s: float, state: PeerState):
    """1.5 s of silence make a peer suspect, 3 s dead; the limits themselves count."""
    assert Liveness(10.0).state(10.0 + silence_s) is state


def test_a_suspect_that_speaks_is_alive_again():
    """Suspicion leaves no trace."""
    liveness = Liveness(0.0)
    assert liveness.state(2.0) is PeerState.SUSPECT
    liveness.heard(2.0)
    assert liveness.state(3.4) is PeerState.ALIVE
    assert liveness.silence_s(3.0) == 1.0


def test_news_that_is_older_than_the_last_changes_nothing():
    """Time never runs backwards."""
    liveness = Liveness(5.0)
    liveness.heard(1.0)
    assert liveness.state(6.4) is PeerState.ALIVE


@given(
    start=st.floats(0, 1e6),
    heard=st.lists(st.floats(0, 1e3), max_size=5),
    later=st.floats(0, 10),
)
def test_sleeping_until_the_next_check_misses_no_change(
    start: float, heard: list[float], later: float
):
    """Before ``next_check_at`` the verdict stays, at it, it has changed (unless dead already)."""
    liveness = Liveness(start)
    for after in heard:
        liveness.heard(start + after)
    now = start + max(heard, default=0.0) + later
    state = liveness.state(now)
    check_at = liveness.next_check_at(now)
    if state is not PeerState.DEAD:
        assert check_at > now
        assert liveness.state((now + check_at) / 2) is state or (now + check_at) / 2 >= check_at
        assert liveness.state(check_at) is not state


def test_a_rule_must_be_in_order():
    """A rule that could never suspect, or suspects before the first heartbeat, is refused."""
    with pytest.raises(ValueError, match="interval_s"):
        LivenessRule(interval_s=2.0)
