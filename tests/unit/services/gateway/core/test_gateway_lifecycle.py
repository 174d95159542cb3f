"""One request's state machine: order, fencing, retries, exactly one end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.gateway.core.lifecycle import (
    CancelLeg,
    End,
    Leg,
    Lifecycle,
    Reroute,
    State,
)
from shared.errors import (
    InvalidRequest,
    LocalProtocolError,
    MeshError,
    NoBlocks,
    Overloaded,
    RemoteProtocolError,
    ShuttingDown,
    TransferFailed,
    WorkerLost,
)
from shared.request import AnswerToken, FinishReason, SamplingParams

LOST = WorkerLost("gone")
BOTH = (Leg.PREFILL, Leg.DECODE)


def a_request(max_tokens: int = 4, **sampling: object) -> Lifecycle:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Lifecycle((1, 2, 3), params, max_attempts=3)


def dispatched(
    max_tokens: int = 4, *, is_whole: bool = False, **sampling: object
) -> tuple[Lifecycle, int]:
    """A request and its first attempt, which is under way."""
    life = a_request(max_tokens, **sampling)
    return life, life.dispatched(is_whole=is_whole)


def token(
    position: int, token_id: int = 7, finish: FinishReason = FinishReason.NONE
) -> AnswerToken:
    return AnswerToken(position, token_id, finish)


def test_tokens_of_both_legs_leave_in_order() -> None:
    """A decode token that overtakes prefill's first token waits for it."""
    life, attempt = dispatched()
    assert life.token_arrived(attempt, Leg.DECODE, token(1)) == []
    assert life.token_arrived(attempt, Leg.PREFILL, token(0)) == [token(0), token(1)]


def _first(life: Lifecycle, attempt: int) -> None:
    life.token_arrived(attempt, Leg.PREFILL, token(0))


def _granted(life: Lifecycle, attempt: int) -> None:
    _first(life, attempt)
    life.granted(attempt)


def _overtaken(life: Lifecycle, attempt: int) -> None:
    _granted(life, attempt)
    life.token_arrived(attempt, Leg.DECODE, token(4))


def _failed(life: Lifecycle, attempt: int) -> None:
    _granted(life, attempt)
    life.leg_failed(attempt, Leg.DECODE, LOST, lost=True)


@pytest.mark.parametrize(
    ("before", "index", "is_taken"),
    [
        pytest.param(_granted, 1, True, id="next"),
        pytest.param(_first, 1, False, id="before the grant is heard"),
        pytest.param(lambda *_: None, 0, False, id="that tell of the grant"),
        pytest.param(lambda *_: None, 1, False, id="before the first token"),
        pytest.param(_granted, 2, False, id="after a gap"),
        pytest.param(_granted, 0, False, id="again"),
        pytest.param(_overtaken, 1, False, id="where a later one waits"),
        pytest.param(_failed, 1, False, id="of an attempt that is over"),
    ],
)
def test_tokens_in_a_row_are_what_they_would_be_one_by_one(
    before: Callable[[Lifecycle, int], None], index: int, is_taken: bool
) -> None:
    """Taken at once where nothing else is to be decided, and else not at all: until decode's grant
    is known, or while another one is awaited, each has its own turn."""
    together, attempt = dispatched(max_tokens=9)
    apart, _ = dispatched(max_tokens=9)
    before(together, attempt)
    before(apart, attempt)
    num_before = together.num_output_tokens
    assert together.many_arrived(attempt, Leg.DECODE, index, (7, 7, 7)) is is_taken
    assert together.num_output_tokens == num_before + 3 * is_taken
    for life in (apart,) if is_taken else (apart, together):
        for at in range(index, index + 3):
            life.token_arrived(attempt, Leg.DECODE, token(at))
    assert (together.token_ids, together.state) == (apart.token_ids, apart.state)
    rest = [life.token_arrived(attempt, Leg.DECODE, token(5)) for life in (together, apart)]
    assert rest[0] == rest[1]


def test_the_first_token_waits_until_decode_has_room() -> None:
    """An answer that has begun could not be refused any more."""
    life, attempt = dispatched()
    assert life.token_arrived(attempt, Leg.PREFILL, token(0)) == []
    assert life.granted(attempt) == [token(0)]


def test_without_room_the_held_token_is_dropped_with_its_attempt() -> None:
    """The retry computes it again, from the prompt alone."""
    life, attempt = dispatched()
    life.token_arrived(attempt, Leg.PREFILL, token(0))
    effects = life.leg_failed(attempt, Leg.DECODE, NoBlocks("full"), lost=False)
    assert [type(effect) for effect in effects] == [CancelLeg, Reroute]
    assert life.num_output_tokens == 0


def test_prefill_lost_before_a_grant_is_retried_at_once() -> None:
    """Decode, which has no room yet, has nothing of the answer."""
    life, attempt = dispatched()
    life.token_arrived(attempt, Leg.PREFILL, token(0))
    effects = life.leg_failed(attempt, Leg.PREFILL, LOST, lost=True)
    assert effects == [CancelLeg(Leg.DECODE), Reroute(LOST, (Leg.PREFILL,))]


def test_the_last_token_ends_the_request_and_cancels_what_is_open() -> None:
    """A finish reason is followed by the end; the prefill leg, still pushing, is told to stop."""
    life, attempt = dispatched()
    last = token(0, finish=FinishReason.STOP)
    effects = life.token_arrived(attempt, Leg.PREFILL, last)
    assert effects == [last, CancelLeg(Leg.PREFILL), CancelLeg(Leg.DECODE), End(None)]
    assert life.state is State.FINISHED


def test_nothing_follows_the_end() -> None:
    """Late tokens, failures and cancels of a finished request have no effect."""
    life, attempt = dispatched(max_tokens=1)
    life.token_arrived(attempt, Leg.PREFILL, token(0, finish=FinishReason.LENGTH))
    assert life.token_arrived(attempt, Leg.DECODE, token(1)) == []
    assert life.leg_failed(attempt, Leg.PREFILL, LOST, lost=True) == []
    assert life.cancel() == []
    assert life.fail(LOST) == []


def test_a_lost_decode_worker_means_another_attempt_with_the_tokens_so_far() -> None:
    """The next attempt computes prompt plus sent tokens, and old tokens are fenced off."""
    life, first = dispatched(max_tokens=8)
    life.granted(first)
    life.token_arrived(first, Leg.PREFILL, token(0, 10))
    life.prefill_done(first)
    life.joined(first)
    life.token_arrived(first, Leg.DECODE, token(1, 11))
    assert life.leg_failed(first, Leg.DECODE, LOST, lost=True) == [Reroute(LOST, (Leg.DECODE,))]
    assert life.token_ids == (1, 2, 3, 10, 11)
    second = life.dispatched()
    assert life.token_arrived(first, Leg.DECODE, token(2, 99)) == []
    life.granted(second)
    assert life.token_arrived(second, Leg.PREFILL, token(2, 12)) == [token(2, 12)]


def test_prefill_lost_before_its_token_cancels_decode_and_retries() -> None:
    """Without token 1 the attempt cannot go on."""
    life, attempt = dispatched()
    assert life.leg_failed(attempt, Leg.PREFILL, LOST, lost=True) == [
        CancelLeg(Leg.DECODE),
        Reroute(LOST, (Leg.PREFILL,)),
    ]


def test_prefill_lost_after_its_token_leaves_the_verdict_to_decode() -> None:
    """All KV may have arrived: decode joins, or fails the attempt itself."""
    life, attempt = dispatched()
    life.granted(attempt)
    life.token_arrived(attempt, Leg.PREFILL, token(0))
    assert life.leg_failed(attempt, Leg.PREFILL, LOST, lost=True) == []
    assert life.leg_failed(attempt, Leg.DECODE, LOST, lost=False) == [Reroute(LOST, BOTH)]


def test_prefill_lost_with_its_token_on_the_way_is_retried_though_decode_has_all_kv() -> None:
    """Decode may run ahead to the end: without token 0 its tokens cannot leave."""
    life, attempt = dispatched()
    life.joined(attempt)
    for early in (token(1), token(2)):
        assert life.token_arrived(attempt, Leg.DECODE, early) == []
    effects = life.leg_failed(attempt, Leg.PREFILL, LOST, lost=True)
    assert effects == [CancelLeg(Leg.DECODE), Reroute(LOST, (Leg.PREFILL,))]


@pytest.mark.parametrize(
    ("error", "avoid"),
    [
        (LOST, BOTH),
        (TransferFailed("a frame did not arrive"), BOTH),
        (NoBlocks("full"), (Leg.DECODE,)),
        (ShuttingDown("draining"), (Leg.DECODE,)),
    ],
)
def test_workers_that_lost_each_other_do_not_meet_again(
    error: MeshError, avoid: tuple[Leg, ...]
) -> None:
    """Who is to blame for a broken pair is unknown, so both are avoided; trouble of its own is the
    worker's alone."""
    life = a_request()
    effects = life.leg_failed(life.dispatched(), Leg.DECODE, error, lost=False)
    assert effects == [CancelLeg(Leg.PREFILL), Reroute(error, avoid)]


def test_attempts_are_bounded() -> None:
    """The third failure is the client's error."""
    life = a_request()
    for _ in range(2):
        effects = life.leg_failed(life.dispatched(), Leg.DECODE, LOST, lost=True)
        assert effects[-1] == Reroute(LOST, (Leg.DECODE,))
    assert life.leg_failed(life.dispatched(), Leg.DECODE, LOST, lost=True) == [
        CancelLeg(Leg.PREFILL),
        End(LOST),
    ]
    assert life.state is State.FAILED


def test_the_clients_own_fault_is_not_retried() -> None:
    """An invalid request ends at once."""
    life = a_request()
    error = InvalidRequest("no")
    effects = life.leg_failed(life.dispatched(), Leg.PREFILL, error, lost=False)
    assert effects == [CancelLeg(Leg.DECODE), End(error)]


def test_a_request_that_fails_amid_its_answer_is_not_tried_again() -> None:
    """A grammar that can say nothing more says no more elsewhere, and its client is told why."""
    life, attempt = dispatched(is_whole=True)
    life.token_arrived(attempt, Leg.WHOLE, token(0))
    error = InvalidRequest("it cannot be followed any more", code="grammar_failed")
    assert life.leg_failed(attempt, Leg.WHOLE, error, lost=False)[-1] == End(error=error)


def test_no_blocks_becomes_overloaded_for_the_client() -> None:
    """Clients are told when to come back, in the words of the error table."""
    life = Lifecycle((1,), SamplingParams(max_tokens=4), max_attempts=1)
    effects = life.leg_failed(life.dispatched(), Leg.DECODE, NoBlocks("full"), lost=False)
    end = effects[-1]
    assert isinstance(end, End)
    assert isinstance(end.error, Overloaded)
    assert end.error.retry_after_s > 0


def test_one_token_needs_no_decode_worker() -> None:
    """max_tokens=1, or one token left after a failover, is prefill's alone."""
    life = a_request(max_tokens=2)
    assert life.needs_decode
    attempt = life.dispatched()
    life.granted(attempt)
    life.token_arrived(attempt, Leg.PREFILL, token(0))
    life.leg_failed(attempt, Leg.DECODE, LOST, lost=True)
    assert not life.needs_decode


def test_prompt_logprobs_are_asked_for_once() -> None:
    """A retry that already has tokens does not compute the prompt's logprobs again."""
    life, attempt = dispatched(prompt_logprobs=0)
    assert life.sampling.prompt_logprobs == 0
    life.granted(attempt)
    life.token_arrived(attempt, Leg.PREFILL, token(0))
    life.leg_failed(attempt, Leg.DECODE, LOST, lost=True)
    assert life.sampling.prompt_logprobs is None


def test_dispatching_twice_is_our_own_bug() -> None:
    """The shell may dispatch only while the request waits."""
    life = a_request()
    life.dispatched()
    with pytest.raises(LocalProtocolError):
        life.dispatched()


def test_a_duplicated_token_is_dropped() -> None:
    """The same index twice reaches the client once."""
    life, attempt = dispatched()
    life.granted(attempt)
    life.token_arrived(attempt, Leg.PREFILL, token(0))
    assert life.token_arrived(attempt, Leg.DECODE, token(0)) == []


def test_a_colocated_worker_is_one_leg_with_nothing_to_wait_for() -> None:
    """Its tokens leave at once, and its last one leaves nothing to cancel."""
    life, attempt = dispatched(max_tokens=2, is_whole=True)
    assert life.token_arrived(attempt, Leg.WHOLE, token(0)) == [token(0)]
    last = token(1, finish=FinishReason.LENGTH)
    assert life.token_arrived(attempt, Leg.WHOLE, last) == [last, End(None)]


def test_a_colocated_worker_that_fails_is_the_only_one_to_avoid() -> None:
    """Whatever it says, nobody else was there; a pair may take over."""
    life, attempt = dispatched(is_whole=True)
    life.token_arrived(attempt, Leg.WHOLE, token(0))
    error = TransferFailed("no")
    assert life.leg_failed(attempt, Leg.WHOLE, error, lost=False) == [Reroute(error, (Leg.WHOLE,))]
    again = life.dispatched()
    life.granted(again)
    assert life.token_arrived(again, Leg.PREFILL, token(1)) == [token(1)]


@pytest.mark.parametrize("finish", [FinishReason.NONE, FinishReason.STOP])
@pytest.mark.parametrize("is_decode_gone", [False, True])
def test_prefill_brings_the_first_token_alone(finish: FinishReason, is_decode_gone: bool) -> None:
    """A worker that says otherwise breaks the protocol, whatever became of the other leg."""
    request = a_request()
    attempt = request.dispatched()
    request.token_arrived(attempt, Leg.PREFILL, token(0))
    request.granted(attempt)
    if is_decode_gone:
        request.leg_failed(attempt, Leg.DECODE, LOST, lost=True)
        attempt = request.dispatched()
        with pytest.raises(RemoteProtocolError):
            request.token_arrived(attempt, Leg.PREFILL, token(3, finish=finish))
        return
    with pytest.raises(RemoteProtocolError):
        request.token_arrived(attempt, Leg.PREFILL, token(1, finish=finish))
