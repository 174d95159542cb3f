"""When a client has its tokens: single ones, and those of equal steps."""

from __future__ import annotations

from array import array

import pytest

from services.sim.token_times import StepEnds, TokenTimes


def test_times_are_those_of_a_list() -> None:
    """Single tokens and runs in order, each later by its way, all counted from the same moment."""
    ends = array("d", [1.0, 2.0, 3.0, 4.0])
    times = TokenTimes()
    times.append(0.5)
    times.extend(StepEnds(ends, 1, 3), 0.25)
    times.extend(StepEnds(ends, 3, 3), 0.25)
    times.append(5.0)
    times.extend(StepEnds(ends, 3, 4), 2.0)
    ends.append(9.0)  # the worker goes on
    times.count_from(0.5)
    told = [0.0, 1.75, 2.75, 4.5, 5.5]
    assert times == told
    assert [times[idx] for idx in range(-5, 5)] == told * 2
    assert times[1:3] == (1.75, 2.75)
    assert len(times) == 5
    with pytest.raises(IndexError):
        times[5]


def test_no_token_is_no_time() -> None:
    """It is false, and has no last one."""
    assert not TokenTimes()
    with pytest.raises(IndexError):
        TokenTimes()[-1]
