"""Plain numbers that scrape like prometheus_client's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shared.telemetry.tallies import Counts, Tallies

BUCKETS = (0.001, 0.5, 1, 20)
VALUES = (0.0, 0.001, 0.0010001, 0.7, 1.0, 19.0, 20.5, 1e9)


def scraped(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Every sample but the times of creation, which plain ones do not have."""
    return {
        (sample.name, *sorted(f"{k}={v}" for k, v in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_histogram_scrapes_like_prometheus_own() -> None:
    """Same buckets, same sums, with and without a label, from the first scrape on."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = Tallies("a_seconds", "A", buckets=BUCKETS, registry=ours)
    by_lane = Tallies("b_seconds", "B", buckets=BUCKETS, label="lane", registry=ours)
    other = Histogram("a_seconds", "A", buckets=BUCKETS, registry=theirs)
    other_by_lane = Histogram("b_seconds", "B", ["lane"], buckets=BUCKETS, registry=theirs)
    assert scraped(ours) == scraped(theirs)
    for value in VALUES:
        plain.observe(value)
        other.observe(value)
        by_lane.labels("tcp").observe(value, 2)
        for _ in range(2):
            other_by_lane.labels("tcp").observe(value)
    assert scraped(ours) == scraped(theirs)


def test_a_counter_scrapes_like_prometheus_own() -> None:
    """Without labels from 0, with labels once it has counted."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = Counts("a", "A", registry=ours)
    labelled = Counts("b", "B", ["route", "outcome"], registry=ours)
    other = Counter("a", "A", registry=theirs)
    other_labelled = Counter("b", "B", ["route", "outcome"], registry=theirs)
    assert scraped(ours) == scraped(theirs)
    plain.add(3)
    other.inc(3)
    labelled.add(1, "/v1", "ok")
    labelled.add(2, "/v1", "ok")
    other_labelled.labels("/v1", "ok").inc(3)
    assert scraped(ours) == scraped(theirs)
