"""Counters and histograms in plain numbers, which become metrics when somebody scrapes.

For what is counted with every request: a histogram of prometheus_client takes a lock and a float
object per bucket and sum, 2.7 us an observation under a profile; one of these takes a tenth
(bench/gateway/README.md). All calls are on one thread. What a scrape shows is the same, without the
``_created`` times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Scraped(Collector):
    """Metrics that ``read`` makes when somebody scrapes."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return self._read()


class Tally:
    """One histogram: how many values fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value; ``times``: so many equal ones."""
        # Each value once, in the first bucket that holds it; Prometheus' sums of buckets are made
        # at a scrape.
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class Tallies(Collector):
    """A family of histograms, one for each value of a label; without a label there is one.

    ``labels`` gives the histogram of a value, and makes it at first.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        label: str = "",
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._buckets = buckets
        self._label = label
        self._tallies: dict[str, Tally] = {}
        if not label:
            self.labels("")
        registry.register(self)

    def labels(self, value: str) -> Tally:
        tally = self._tallies.get(value)
        if tally is None:
            tally = self._tallies[value] = Tally(self._buckets)
        return tally

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value in a family without a label."""
        self._tallies[""].observe(value, times)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            self._name, self._documentation, labels=[self._label] if self._label else []
        )
        bounds = [*map(_bound, self._buckets), "+Inf"]
        for value, tally in self._tallies.items():
            buckets = list(zip(bounds, accumulate(tally.counts), strict=True))
            family.add_metric([value] if self._label else [], buckets, tally.total)
        yield family


class Counts(Collector):
    """A family of counters, one for each combination of the labels' values; without labels there is
    one, from 0."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._counts: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        registry.register(self)

    def add(self, amount: float, *labels: str) -> None:
        """Add to the counter of these labels' values."""
        self._counts[labels] = self._counts.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


def _bound(bound: float) -> str:
    return str(float(bound))
