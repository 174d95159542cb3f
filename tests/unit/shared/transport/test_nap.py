"""The pump's patience with wake-ups that may never come."""

from __future__ import annotations

from shared.transport.nap import LONGEST_MS, SHORTEST_MS, Nap


def test_looks_get_rare_while_nothing_happens() -> None:
    """Waiting for a slow peer costs a few looks a second, not a thousand."""
    nap = Nap()
    limits = []
    for _ in range(12):
        limits.append(nap.limit_ms)
        nap.timed_out(found_work=False)
    assert limits[:4] == [1, 2, 4, 8]
    assert limits[-1] == LONGEST_MS


def test_a_signal_makes_the_next_look_near() -> None:
    """What has begun goes on."""
    nap = Nap()
    for _ in range(9):
        nap.timed_out(found_work=False)
    nap.signalled()
    assert nap.limit_ms == SHORTEST_MS


def test_a_missed_signal_keeps_looks_frequent() -> None:
    """Where one signal was lost the next will be, too, though other lanes' signals come."""
    nap = Nap()
    nap.timed_out(found_work=True)
    for _ in range(3):
        nap.signalled()
        nap.timed_out(found_work=False)
    assert nap.limit_ms == SHORTEST_MS


def test_signals_that_come_again_are_trusted_again() -> None:
    """One look that met a message by chance does not cost power for ever."""
    nap = Nap()
    nap.timed_out(found_work=True)
    for _ in range(4):
        nap.signalled()
    for _ in range(9):
        nap.timed_out(found_work=False)
    assert nap.limit_ms == LONGEST_MS
