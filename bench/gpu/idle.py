"""Where is the device idle within decode steps, and from which length on does a prompt fill it?

    python -m bench.gpu.idle [--quick] [--device cuda]

Decode at 1, 32 and 128 rows under torch's profiler: the share of the time in which the device
worked, and between which kernels it waited longest. Then prompts of 128 to 4,096 tokens, a step
each. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.device import add_device, name_or_exit
from bench.gpu.run import OurEnd, ending, make_folder, seconds_of, shape_for
from bench.record import Record, arguments, ratios

BATCHES = (1, 32, 128)
CONTEXT = 512
LENGTHS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
FULL_SHARE = 0.9
"""A prompt fills the device from the length on whose tokens per second reach this share of the
best."""
SHOWN_GAPS = 8


class Span(NamedTuple):
    """A piece of the device's work; microseconds."""

    begin_us: float
    end_us: float
    name: str


class Gap(NamedTuple):
    """The device waited between two pieces. us: all such gaps together; num: how many."""

    after: str
    before: str
    us: float
    num: int


def busy_and_gaps(spans: Iterable[Span]) -> tuple[float, list[Gap]]:
    """Return which share of the time from first to last was worked, and the gaps by the names
    around them, the longest first. Spans may overlap, as those of several streams do.

    Raises ValueError: there is no span.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the profiler saw no work")
    latest = ordered[0]
    idle_us = 0.0
    gaps: dict[tuple[str, str], list[float]] = {}
    for span in ordered[1:]:
        if (gap := span.begin_us - latest.end_us) > 0:
            idle_us += gap
            gaps.setdefault((latest.name, span.name), []).append(gap)
        if span.end_us > latest.end_us:
            latest = span
    whole_us = latest.end_us - ordered[0].begin_us
    found = [Gap(*names, sum(each), len(each)) for names, each in gaps.items()]
    share = 1 - idle_us / whole_us if whole_us else 1.0
    return share, sorted(found, key=lambda gap: -gap.us)


def fills_from(rates: Sequence[tuple[int, float]]) -> int:
    """Return the shortest length whose rate reaches FULL_SHARE of the best."""
    best = max(rate for _, rate in rates)
    return min(length for length, rate in rates if rate >= FULL_SHARE * best)


def profiled(step: Any, device: str, num_steps: int) -> list[Span]:
    """Return what the device did in some steps; on a CPU, its operators that call no other."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    step()
    on_cpu = device == "cpu"
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity]) as seen:
        for _ in range(num_steps):
            step()
    return [
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in seen.events() or ()
        if (not event.cpu_children if on_cpu else event.device_type == DeviceType.CUDA)
    ]


def measure(asked: argparse.Namespace, record: Record, folder: Path) -> None:
    """Decode under the profiler, then the sweep without it."""
    options: dict[str, Any] = {"num_blocks": max(BATCHES) * CONTEXT // 16 + max(BATCHES)}
    if asked.device == "cpu":
        options["kernels"] = "torch"  # the profiler does not see our native ones
    with ending(OurEnd(folder, asked.device, max_rows=max(BATCHES), **options)) as ours:
        for batch in BATCHES:
            share, gaps = busy_and_gaps(
                profiled(ours.decode(batch, CONTEXT), asked.device, asked.steps)
            )
            per_step = [gap._replace(us=gap.us / asked.steps) for gap in gaps[:SHOWN_GAPS]]
            record.rows.append(
                {"what": f"decode batch {batch} at {CONTEXT}", "busy_share": share}
                | {"gaps_per_step": [gap._asdict() for gap in per_step]}
            )
            print(f"decode batch {batch} at {CONTEXT}: the device works {share:.3f} of the time")
            for gap in per_step:
                names = f"{gap.after[:50]} -> {gap.before[:50]}"
                print(f"  {gap.us:9.1f} us a step idle, {gap.num} times: {names}")
        took: dict[int, list[float]] = {}
        for _ in range(asked.repetitions):
            for length in LENGTHS:
                took.setdefault(length, []).append(seconds_of(ours.prefill(length), repetitions=2))
    rates = {length: [length / one for one in each] for length, each in took.items()}
    best = [max(each) for each in zip(*rates.values(), strict=True)]
    for length, each in rates.items():
        row = {"what": f"prefill {length}", "share_of_best_rate": ratios(each, best)}
        record.rows.append({**row, "tokens_per_s": statistics.median(each)})
        share = row["share_of_best_rate"]["median"]
        print(f"prefill {length:5} tokens {statistics.median(each):10.0f} tokens/s, {share:.2f}")
    full = fills_from([(length, statistics.median(each)) for length, each in rates.items()])
    record.rows.append({"what": "a prompt fills the device", "tokens": full})
    print(f"a prompt fills the device from {full} tokens on ({FULL_SHARE} of the best rate)")


def main() -> None:
    parser = arguments(__doc__, "4 layers, 2 repetitions")
    add_device(parser)
    asked = parser.parse_args()
    name = name_or_exit(asked.device)
    asked.steps, asked.repetitions = (5, 2) if asked.quick else (20, 3)
    record = Record.of(__file__, asked, device=name)
    record.stem += "-idle"
    record.is_written &= asked.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), shape_for(asked))
        measure(asked, record, Path(folder))
    record.finish()


if __name__ == "__main__":
    main()
