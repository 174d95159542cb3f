"""How long KV takes over a link."""

from __future__ import annotations

import pytest

from shared.ids import Incarnation
from shared.predict.transfer import MAX_LINKS, KvLink, TransferTimes

A, B, C = Incarnation(1), Incarnation(2), Incarnation(3)


def seconds(num_bytes: int, *, gb_per_s: float = 1.0) -> float:
    """Of a link with 1 ms for nothing."""
    return 0.001 + num_bytes / gb_per_s / 1e9


def test_a_link_is_a_constant_and_a_speed() -> None:
    """Other sizes follow from those seen."""
    times = TransferTimes()
    for megabytes in (1, 2, 8, 16) * 3:
        times.observe(KvLink(A, B, "cma"), megabytes << 20, seconds(megabytes << 20))
    for num_bytes in (1 << 19, 64 << 20):
        predicted = times.predict(KvLink(A, B, "cma"), num_bytes)
        assert predicted == pytest.approx(seconds(num_bytes), rel=0.02)
        assert times.between(A, B, num_bytes) == predicted


def test_lanes_of_a_pair_are_apart_and_strangers_are_as_their_lane() -> None:
    """Tcp is slower than shared memory; a link that nobody used is like others of its lane, and
    nothing is said of a lane that nobody used."""
    times = TransferTimes()
    for megabytes in (1, 4, 16) * 4:
        size = megabytes << 20
        times.observe(KvLink(A, B, "cma"), size, seconds(size))
        times.observe(KvLink(A, B, "tcp"), size, seconds(size, gb_per_s=0.1))
    size = 32 << 20
    slow, quick = times.predict(KvLink(A, B, "tcp"), size), times.predict(KvLink(A, B, "cma"), size)
    assert slow is not None
    assert quick is not None
    assert slow > 5 * quick
    assert times.predict(KvLink(A, C, "cma"), size) == pytest.approx(quick)
    assert times.predict(KvLink(A, B, "rdma"), size) is None
    assert times.between(A, B, size) == slow  # tcp came last
    assert times.between(A, C, size) is None


def test_nothing_moved_teaches_nothing_and_links_are_bounded() -> None:
    """A transfer of no bytes is none; of too many links the oldest go."""
    times = TransferTimes()
    times.observe(KvLink(A, B, "cma"), 0, 1.0)
    times.observe(KvLink(A, B, "cma"), 1000, 0.0)
    assert times.predict(KvLink(A, B, "cma"), 1000) is None
    for number in range(MAX_LINKS + 10):
        times.observe(KvLink(A, Incarnation(number), "tcp"), 1000, 0.001)
    assert len(times) == MAX_LINKS
    assert times.between(A, Incarnation(0), 1000) is None
