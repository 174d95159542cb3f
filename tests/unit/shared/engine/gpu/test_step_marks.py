"""What a device has done, told from what was queued to it: marks of a step, mapped to our clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from shared.engine.gpu.streams import StepMarks


class SlowDevice:
    """A stream that is far behind: what is queued in microseconds takes it milliseconds."""

    def __init__(self) -> None:
        self.now = 100.0  # the host's clock
        self.behind_at = 0.0  # when the device will have done what is queued

    def queue(self, seconds: float) -> None:
        self.now += 1e-6
        self.behind_at = max(self.behind_at, self.now) + seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.behind_at)


class FakeMark:
    """A CUDA event with timing, as far as one is used here."""

    passed_at = float("nan")

    def record(self, stream: SlowDevice) -> None:
        self.passed_at = max(stream.now, stream.behind_at)

    def elapsed_time(self, end_event: FakeMark) -> float:
        return (end_event.passed_at - self.passed_at) * 1e3


def run_step(marks: StepMarks, device: SlowDevice, num_layers: int, layer_s: float) -> list[float]:
    """Queue a step as the decoder does; returns when each layer was queued."""
    queued_at: list[float] = []
    marks.begin(device)
    for layer in range(num_layers):
        device.queue(layer_s)
        marks.layer_written(layer, device)
        queued_at.append(device.now)
    device.queue(layer_s)  # what follows the last layer's KV
    device.synchronize()
    marks.end()
    return queued_at


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


@pytest.fixture
def marks_of(device: SlowDevice) -> Callable[[int], StepMarks]:
    return lambda num_layers: StepMarks(num_layers, FakeMark, clock=lambda: device.now)


def test_layers_are_done_when_the_device_says_not_when_they_were_queued(
    device: SlowDevice, marks_of: Callable[[int], StepMarks]
) -> None:
    """All four are queued within 4 us; they are written 10 ms apart, each within the step."""
    marks = marks_of(4)
    queued_at = run_step(marks, device, 4, 0.01)
    times = marks.times()
    assert times == pytest.approx([100.01, 100.02, 100.03, 100.04], abs=1e-5)
    assert all(done > queued + 0.009 for done, queued in zip(times, queued_at, strict=True))
    assert all(later > earlier for earlier, later in pairwise(times))
    assert times[-1] < device.now


def test_marks_tell_of_the_last_step_alone(
    device: SlowDevice, marks_of: Callable[[int], StepMarks]
) -> None:
    """Recorded again they belong to the new step, and one that left no marks has no times."""
    marks = marks_of(2)
    run_step(marks, device, 2, 0.01)
    device.now += 5
    began_at = device.now
    run_step(marks, device, 2, 0.02)
    assert marks.times() == pytest.approx([began_at + 0.02, began_at + 0.04], abs=1e-5)
    run_step(marks, device, 0, 0.02)
    assert marks.times() == ()


def test_no_layer_is_done_after_the_host_had_waited_for_the_step(
    device: SlowDevice, marks_of: Callable[[int], StepMarks]
) -> None:
    """Two clocks may differ by a little; time within a step goes by the host's."""
    marks = marks_of(2)
    run_step(marks, device, 2, 0.01)
    marks.layers[1].passed_at += 0.02
    assert marks.times() == pytest.approx([100.01, device.now], abs=1e-5)
