"""Ports for the processes of tests."""

from __future__ import annotations

from tests.support.service_process import free_port


def test_ports_in_a_row_are_nobody_elses_and_never_run_out() -> None:
    """A test's process binds a port later than it gets it; a run of all tests takes thousands."""
    given = list[int]()
    for count in [1, 3] * 500:
        first = free_port(count)
        row = range(first, first + count)
        assert set(row).isdisjoint(given[-300:])
        given += row
