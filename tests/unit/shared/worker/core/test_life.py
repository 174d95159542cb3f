"""The life of a request on a worker: every state with every event, for each task."""

from __future__ import annotations

import itertools

import pytest

from shared.errors import LocalProtocolError, TransferFailed
from shared.worker.core.life import (
    IGNORED,
    MOVES,
    AbortPush,
    CancelLease,
    Close,
    Life,
    LifeEvent,
    LifeOutcome,
    LifeState,
    ReportDone,
    ReportFailed,
    StopCompute,
    Task,
)

ERROR = TransferFailed("lost")

_E = LifeEvent
PATHS: dict[LifeState, tuple[Task, list[LifeEvent]]] = {
    LifeState.QUEUED: (Task.PROMPT, []),
    LifeState.COMPUTING: (Task.PROMPT, [_E.ADMITTED]),
    LifeState.RECEIVING: (Task.ANSWER, []),
    LifeState.RUNNING: (Task.WHOLE, [_E.ADMITTED, _E.BEGUN]),
    LifeState.PUSHING: (Task.PROMPT, [_E.ADMITTED, _E.SAMPLED]),
    LifeState.CLOSING: (Task.PROMPT, [_E.CANCELLED]),
    LifeState.CLOSED: (Task.PROMPT, [_E.CANCELLED, _E.SETTLED]),
}


def a_life(task: Task, *events: LifeEvent, has_push: bool | None = None) -> Life:
    """A request to which these things happened."""
    life = Life(task, has_push=task is Task.PROMPT if has_push is None else has_push)
    for event in events:
        life.handle(event, ERROR)
    return life


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LifeState, LifeEvent)))
def test_every_event_moves_by_the_table_is_ignored_or_is_a_bug(
    state: LifeState, event: LifeEvent
) -> None:
    """There is no fourth thing, and no state outside the table."""
    task, path = PATHS[state]
    life = a_life(task, *path)
    assert life.state is state
    if (state, event) in MOVES:
        life.handle(event, ERROR)
        to = MOVES[state, event].to
        may_close = to is LifeState.CLOSING and state is LifeState.RUNNING
        assert life.state is (LifeState.CLOSED if may_close else to)
    elif (state, event) in IGNORED:
        assert life.handle(event, ERROR) == []
        assert life.state is state
    else:
        with pytest.raises(LocalProtocolError):
            life.handle(event, ERROR)


def test_no_event_both_moves_and_is_ignored() -> None:
    """The two tables do not overlap."""
    assert not MOVES.keys() & IGNORED


def test_a_prompt_goes_well() -> None:
    """Computed, pushed, acknowledged; only then are its blocks given back."""
    life = a_life(Task.PROMPT, _E.ADMITTED)
    assert life.handle(_E.SAMPLED) == []
    assert life.handle(_E.PUSHED) == [ReportDone(), Close()]
    assert life.outcome is LifeOutcome.DONE
    assert life.handle(_E.SETTLED) == []


def test_an_answer_goes_well() -> None:
    """Its last token is its last word."""
    life = a_life(Task.ANSWER)
    assert life.handle(_E.BEGUN) == []
    assert life.handle(_E.ENDED) == [Close()]
    assert life.outcome is LifeOutcome.DONE


def test_an_answer_that_needs_no_kv_goes_without_a_word() -> None:
    """Its transfer ends cleanly: the prompt's worker had the only token that was wanted."""
    life = a_life(Task.ANSWER)
    assert life.handle(_E.SETTLED) == [Close()]
    assert life.outcome is LifeOutcome.CANCELLED
    assert life.handle(_E.CANCELLED) == []


def test_a_whole_request_goes_well() -> None:
    """Its prompt's first token, then one a step; nothing is transferred."""
    life = a_life(Task.WHOLE, _E.ADMITTED, _E.BEGUN)
    assert life.handle(_E.ENDED) == [Close()]
    assert a_life(Task.WHOLE, _E.ADMITTED).handle(_E.ENDED) == [Close()]


def test_one_token_needs_no_push() -> None:
    """The transfer that was begun is aborted without an error, and the blocks wait for it."""
    life = a_life(Task.PROMPT, _E.ADMITTED)
    assert life.handle(_E.ENDED) == [ReportDone(), AbortPush(None)]
    assert life.handle(_E.SETTLED) == [Close()]
    assert life.outcome is LifeOutcome.DONE


def test_a_prompt_without_a_push_closes_with_its_token() -> None:
    """There is nothing to wait for."""
    life = a_life(Task.PROMPT, _E.ADMITTED, has_push=False)
    assert life.handle(_E.ENDED) == [ReportDone(), Close()]
    assert life.state is LifeState.CLOSED


def test_a_prompt_without_a_push_cannot_go_on_elsewhere() -> None:
    """More tokens would need KV on another worker."""
    with pytest.raises(LocalProtocolError):
        a_life(Task.PROMPT, _E.ADMITTED, has_push=False).handle(_E.SAMPLED)


@pytest.mark.parametrize("path", [[], [_E.ADMITTED]])
def test_a_failed_push_stops_the_computation(path: list[LifeEvent]) -> None:
    """The gateway hears at once; the blocks wait for the sends."""
    life = a_life(Task.PROMPT, *path)
    assert life.handle(_E.FAILED, ERROR) == [ReportFailed(ERROR), StopCompute(), AbortPush(ERROR)]
    assert life.handle(_E.SETTLED) == [Close()]
    assert life.outcome is LifeOutcome.FAILED


def test_a_failed_lease_waits_for_its_receive() -> None:
    """The gateway hears at once; what was received into is held until nothing writes it."""
    life = a_life(Task.ANSWER)
    assert life.handle(_E.FAILED, ERROR) == [ReportFailed(ERROR), CancelLease(ERROR)]
    assert life.state is LifeState.CLOSING
    assert life.handle(_E.BEGUN) == []  # its last frame crossed with the decision
    assert life.handle(_E.SETTLED) == [Close()]


@pytest.mark.parametrize("task", [Task.ANSWER, Task.WHOLE])
def test_a_running_answer_that_fails_or_is_cancelled_holds_nothing_then(task: Task) -> None:
    """The scheduler gives its blocks back when no step has them."""
    begun = [_E.BEGUN] if task is Task.ANSWER else [_E.ADMITTED, _E.BEGUN]
    assert a_life(task, *begun).handle(_E.FAILED, ERROR) == [
        ReportFailed(ERROR),
        StopCompute(),
        Close(),
    ]
    assert a_life(task, *begun).handle(_E.CANCELLED) == [StopCompute(), Close()]


def test_a_cancelled_request_reports_nothing() -> None:
    """Who cancelled does not wait for an answer."""
    life = a_life(Task.PROMPT, _E.ADMITTED, _E.SAMPLED)
    assert life.handle(_E.CANCELLED) == [AbortPush(None)]
    assert life.outcome is LifeOutcome.CANCELLED


def test_the_first_decision_stands() -> None:
    """An acknowledgement that crosses a cancel does not turn it into a success."""
    life = a_life(Task.PROMPT, _E.ADMITTED, _E.SAMPLED, _E.CANCELLED)
    assert life.handle(_E.PUSHED) == []
    assert life.handle(_E.FAILED, ERROR) == []
    assert life.outcome is LifeOutcome.CANCELLED
    assert life.handle(_E.SETTLED) == [Close()]


def test_a_request_is_closed_exactly_once() -> None:
    """However it ends, and whatever comes late."""
    for task, path in (
        (Task.PROMPT, [_E.ADMITTED, _E.SAMPLED, _E.PUSHED]),
        (Task.PROMPT, [_E.ADMITTED, _E.ENDED, _E.SETTLED]),
        (Task.PROMPT, [_E.FAILED, _E.CANCELLED, _E.SETTLED]),
        (Task.ANSWER, [_E.FAILED, _E.SETTLED]),
        (Task.ANSWER, [_E.BEGUN, _E.ENDED]),
        (Task.WHOLE, [_E.CANCELLED]),
    ):
        life, effects = a_life(task), []
        for event in [*path, _E.SETTLED, _E.CANCELLED]:
            effects += life.handle(event, ERROR)
        assert effects.count(Close()) == 1
