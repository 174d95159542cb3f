"""Heartbeats: what silence says about a peer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.liveness import IDLE, Liveness, LivenessRule, PeerState


@pytest.mark.parametrize(
    ("silence_s", "state"),
    [
        (0.0, PeerState.ALIVE),
        (0.59, PeerState.ALIVE),
        (0.6, PeerState.SUSPECT),
        (0.99, PeerState.SUSPECT),
        (1.0, PeerState.DEAD),
        (1e6, PeerState.DEAD),
    ],
)
def test_silence_makes_suspect_then_dead(silence_s: float, state: PeerState):
    """0.6 s of silence make a peer suspect, 1 s dead; the limits themselves count."""
    assert Liveness(10.0).state(10.0 + silence_s) is state


def test_a_suspect_that_speaks_is_alive_again():
    """Suspicion leaves no trace."""
    liveness = Liveness(0.0)
    assert liveness.state(0.8) is PeerState.SUSPECT
    liveness.heard(0.8)
    assert liveness.state(1.3) is PeerState.ALIVE
    assert liveness.silence_s(1.3) == 0.5


def test_news_that_is_older_than_the_last_changes_nothing():
    """Time never runs backwards."""
    liveness = Liveness(5.0)
    liveness.heard(1.0)
    assert liveness.state(5.5) is PeerState.ALIVE


def test_a_watchers_own_standstill_is_not_its_peers_silence():
    """However long it slept beyond its time: the verdict is the one it would have found then."""
    liveness = Liveness(0.0)
    liveness.slept(0.2, 100.0)
    assert liveness.silence_s(100.0) == pytest.approx(0.2)
    liveness.slept(100.4, 100.4)
    assert liveness.state(100.4) is PeerState.SUSPECT
    liveness.slept(0.0, 100.5)
    assert liveness.silence_s(100.5) == 0.0  # never heard in the future


@given(
    start=st.floats(0, 1e6),
    heard=st.lists(st.floats(0, 1e3), max_size=5),
    later=st.floats(0, 10),
)
def test_sleeping_until_the_next_check_misses_no_change(
    start: float, heard: list[float], later: float
):
    """Before ``next_check_at`` the verdict stays; it comes within an interval, and at it the
    verdict has changed, or it is time to ask (unless dead already)."""
    liveness = Liveness(start)
    for after in heard:
        liveness.heard(start + after)
    now = start + max(heard, default=0.0) + later
    state = liveness.state(now)
    check_at = liveness.next_check_at(now)
    if state is not PeerState.DEAD:
        assert check_at > now
        assert liveness.state((now + check_at) / 2) is state or (now + check_at) / 2 >= check_at
        heard_at = start + max(heard, default=0.0)
        asks = check_at in {it + liveness.rule.interval_s for it in (now, heard_at)}
        assert asks or liveness.state(check_at) is not state
        assert check_at <= now + liveness.rule.interval_s


def test_silence_that_was_allowed_is_not_held_against_a_peer():
    """Who begins to wait for it gives it as long as everybody; who ceases, forgets nothing."""
    liveness = Liveness(0.0, IDLE)
    assert liveness.state(3.9) is PeerState.ALIVE
    liveness.follow(LivenessRule(), 3.9)
    assert liveness.state(4.4) is PeerState.ALIVE
    assert liveness.state(4.5) is PeerState.SUSPECT
    liveness.follow(IDLE, 4.5)
    assert liveness.silence_s(4.5) == pytest.approx(0.6)
    assert liveness.state(3.9 + IDLE.dead_after_s) is PeerState.DEAD


def test_a_rule_must_be_in_order():
    """A rule that could never suspect, or suspects before it has asked, is refused."""
    with pytest.raises(ValueError, match="interval_s"):
        LivenessRule(interval_s=2.0)
