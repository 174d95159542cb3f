"""The life of a prefill job: every state with every event."""

from __future__ import annotations

import itertools

import pytest

from services.prefill.core.jobs import (
    IGNORED,
    MOVES,
    AbortPush,
    Job,
    JobEvent,
    JobState,
    Outcome,
    ReleaseBlocks,
    ReportDone,
    ReportFailed,
    StopCompute,
)
from shared.errors import LocalProtocolError, TransferFailed

ERROR = TransferFailed("lost")

PATHS: dict[JobState, list[JobEvent]] = {
    JobState.QUEUED: [],
    JobState.COMPUTING: [JobEvent.ADMITTED],
    JobState.PUSHING: [JobEvent.ADMITTED, JobEvent.SAMPLED],
    JobState.CLOSING: [JobEvent.CANCELLED],
    JobState.CLOSED: [JobEvent.CANCELLED, JobEvent.PUSH_SETTLED],
}


def a_job(*events: JobEvent, has_push: bool = True) -> Job:
    """A job to which these things happened."""
    job = Job(has_push=has_push)
    for event in events:
        job.handle(event)
    return job


@pytest.mark.parametrize(("state", "event"), list(itertools.product(JobState, JobEvent)))
def test_every_event_moves_by_the_table_is_ignored_or_is_a_bug(
    state: JobState, event: JobEvent
) -> None:
    """There is no fourth thing, and no state outside the table."""
    job = a_job(*PATHS[state])
    assert job.state is state
    if (state, event) in MOVES:
        job.handle(event, ERROR)
        assert job.state is MOVES[state, event].to
    elif (state, event) in IGNORED:
        assert job.handle(event, ERROR) == []
        assert job.state is state
    else:
        with pytest.raises(LocalProtocolError):
            job.handle(event, ERROR)


def test_no_event_both_moves_and_is_ignored() -> None:
    """The two tables do not overlap."""
    assert not MOVES.keys() & IGNORED


def test_a_job_goes_well() -> None:
    """Computed, pushed, acknowledged; only then are its blocks released."""
    job = a_job(JobEvent.ADMITTED)
    assert job.handle(JobEvent.SAMPLED) == []
    assert job.handle(JobEvent.PUSH_DONE) == [ReportDone(), ReleaseBlocks()]
    assert job.outcome is Outcome.DONE
    assert job.handle(JobEvent.PUSH_SETTLED) == []


def test_one_token_needs_no_push() -> None:
    """The transfer that was begun is aborted without an error, and the blocks wait for it."""
    job = a_job(JobEvent.ADMITTED)
    assert job.handle(JobEvent.SAMPLED_LAST) == [AbortPush(None), ReportDone()]
    assert job.handle(JobEvent.PUSH_SETTLED) == [ReleaseBlocks()]
    assert job.outcome is Outcome.DONE


def test_a_job_without_a_push_closes_with_its_token() -> None:
    """There is nothing to wait for."""
    job = a_job(JobEvent.ADMITTED, has_push=False)
    assert job.handle(JobEvent.SAMPLED_LAST) == [ReportDone(), ReleaseBlocks()]
    assert job.state is JobState.CLOSED


def test_a_job_without_a_push_cannot_go_on_elsewhere() -> None:
    """More tokens would need KV on a decode worker."""
    with pytest.raises(LocalProtocolError):
        a_job(JobEvent.ADMITTED, has_push=False).handle(JobEvent.SAMPLED)


@pytest.mark.parametrize("path", [[], [JobEvent.ADMITTED]])
def test_a_failed_push_stops_the_computation(path: list[JobEvent]) -> None:
    """The gateway hears at once; the blocks wait for the sends."""
    job = a_job(*path)
    effects = job.handle(JobEvent.PUSH_FAILED, ERROR)
    assert effects == [StopCompute(), AbortPush(ERROR), ReportFailed(ERROR)]
    assert job.handle(JobEvent.PUSH_SETTLED) == [ReleaseBlocks()]
    assert job.outcome is Outcome.FAILED


def test_a_cancelled_job_reports_nothing() -> None:
    """Who cancelled does not wait for an answer."""
    job = a_job(JobEvent.ADMITTED, JobEvent.SAMPLED)
    assert job.handle(JobEvent.CANCELLED) == [AbortPush(None)]
    assert job.outcome is Outcome.CANCELLED


def test_the_first_decision_stands() -> None:
    """An acknowledgement that crosses a cancel does not turn it into a success."""
    job = a_job(JobEvent.ADMITTED, JobEvent.SAMPLED, JobEvent.CANCELLED)
    assert job.handle(JobEvent.PUSH_DONE) == []
    assert job.handle(JobEvent.FAILED, ERROR) == []
    assert job.outcome is Outcome.CANCELLED
    assert job.handle(JobEvent.PUSH_SETTLED) == [ReleaseBlocks()]


def test_blocks_are_released_exactly_once() -> None:
    """However a job ends, and whatever comes late."""
    for path in (
        [JobEvent.ADMITTED, JobEvent.SAMPLED, JobEvent.PUSH_DONE],
        [JobEvent.ADMITTED, JobEvent.SAMPLED_LAST, JobEvent.PUSH_SETTLED],
        [JobEvent.FAILED, JobEvent.CANCELLED, JobEvent.PUSH_SETTLED],
    ):
        job, effects = Job(has_push=True), []
        for event in [*path, JobEvent.PUSH_SETTLED, JobEvent.CANCELLED]:
            effects += job.handle(event, ERROR)
        assert effects.count(ReleaseBlocks()) == 1
