"""A request's life under every order of events: tokens leave once, in order, and there is one end.

Workers do whatever they like: run ahead, repeat themselves, fail, come back from an older attempt.
The machine plays a deterministic model (token at position p is 100 + p), so what left is checked
against what should have.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gateway.core.lifecycle import (
    CancelLeg,
    Effect,
    End,
    Leg,
    Lifecycle,
    Reroute,
    State,
)
from shared.errors import InvalidRequest, MeshError, NoBlocks, WorkerLost
from shared.request import AnswerToken, FinishReason, SamplingParams

MAX_TOKENS = 6
MAX_ATTEMPTS = 3
LEGS = st.sampled_from(list(Leg))
ERRORS = st.sampled_from([WorkerLost("gone"), NoBlocks("full"), InvalidRequest("no")])


class LifecycleMachine(RuleBasedStateMachine):
    """One request."""

    def __init__(self) -> None:
        super().__init__()
        params = SamplingParams(max_tokens=MAX_TOKENS)
        self.life = Lifecycle((1, 2), params, max_attempts=MAX_ATTEMPTS)
        self.emitted: list[AnswerToken] = []
        self.ends: list[End] = []
        self.must_dispatch = True
        self.attempts: list[int] = []
        self.bases: list[int] = []
        self.open_legs: set[Leg] = set()
        self.is_granted = False

    def take(self, effects: list[Effect]) -> None:
        """Carry out effects as the shell does."""
        for effect in effects:
            assert not self.ends, "nothing follows the end"
            match effect:
                case AnswerToken():
                    self.emitted.append(effect)
                case CancelLeg(leg):
                    assert leg in self.open_legs, "only what runs is cancelled, once"
                    self.open_legs.remove(leg)
                case Reroute(_, avoid):
                    assert avoid
                    assert not self.open_legs, "the old attempt is over before the next begins"
                    self.must_dispatch = True
                case End():
                    self.ends.append(effect)

    def draw_attempt(self, data: st.DataObject) -> int:
        """Mostly the current attempt, sometimes an older one that does not know that it is over."""
        return data.draw(st.sampled_from([self.attempts[-1]] * 3 + self.attempts))

    @precondition(lambda self: self.must_dispatch and not self.ends)
    @rule(is_whole=st.booleans())
    def dispatch(self, is_whole: bool) -> None:
        self.bases.append(self.life.num_output_tokens)
        self.open_legs = {Leg.PREFILL} | ({Leg.DECODE} if self.life.needs_decode else set())
        if is_whole:
            self.open_legs = {Leg.WHOLE}
        self.attempts.append(self.life.dispatched(is_whole=is_whole))
        self.must_dispatch = False
        self.is_granted = False

    @precondition(lambda self: bool(self.attempts))
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        attempt = self.draw_attempt(data)
        if attempt == self.attempts[-1]:
            self.is_granted = True
        self.take(self.life.granted(attempt))

    @precondition(lambda self: bool(self.attempts))
    @rule(data=st.data(), leg=LEGS, count=st.integers(1, 3))
    def tokens(self, data: st.DataObject, leg: Leg, count: int) -> None:
        """A leg reports tokens that it may have: prefill its one, decode those after it, a
        colocated worker all of them in order."""
        attempt = self.draw_attempt(data)
        base = self.bases[self.attempts.index(attempt)]
        if leg is Leg.PREFILL:
            positions = [base]
        elif leg is Leg.WHOLE:
            first = self.life.num_output_tokens if attempt == self.attempts[-1] else base
            positions = [p for p in range(first, first + count) if p < MAX_TOKENS]
        else:
            first = data.draw(st.integers(base + 1, max(base + 1, MAX_TOKENS - 1)))
            positions = [p for p in range(first, first + count) if p < MAX_TOKENS]
        if not positions:
            return
        if leg is not Leg.PREFILL and attempt == self.attempts[-1] and leg in self.open_legs:
            self.is_granted = True
        effects: list[Effect] = []
        for position in positions:
            effects += self.life.token_arrived(attempt, leg, _token(position))
        has_ended = any(isinstance(effect, End) for effect in effects)
        for own in (Leg.DECODE, Leg.WHOLE):
            if has_ended and CancelLeg(own) not in effects:
                self.open_legs.discard(own)  # its own last token: there is nothing to cancel
        self.take(effects)

    @precondition(lambda self: bool(self.attempts))
    @rule(data=st.data(), leg=LEGS, error=ERRORS, lost=st.booleans())
    def fail_leg(self, data: st.DataObject, leg: Leg, error: MeshError, lost: bool) -> None:
        attempt = self.draw_attempt(data)
        if attempt == self.attempts[-1]:
            self.open_legs.discard(leg)
        self.take(self.life.leg_failed(attempt, leg, error, lost=lost))

    @precondition(lambda self: bool(self.attempts))
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        attempt = self.draw_attempt(data)
        if attempt == self.attempts[-1]:
            self.is_granted = True
        self.life.joined(attempt)

    @precondition(lambda self: bool(self.attempts))
    @rule(data=st.data())
    def prefill_done(self, data: st.DataObject) -> None:
        attempt = self.draw_attempt(data)
        if attempt == self.attempts[-1]:
            self.open_legs.discard(Leg.PREFILL)
        self.life.prefill_done(attempt)

    @rule(gives_up=st.booleans(), chance=st.integers(0, 15))
    def leave(self, gives_up: bool, chance: int) -> None:
        """The client hangs up, or the shell gives up; at any time, any number of times."""
        if chance != 7:
            return
        self.take(self.life.fail(WorkerLost("no pair")) if gives_up else self.life.cancel())

    @invariant()
    def tokens_leave_once_and_in_order(self) -> None:
        assert [token.index for token in self.emitted] == list(range(len(self.emitted)))
        assert all(token.token_id == 100 + token.index for token in self.emitted)
        assert self.life.token_ids == (1, 2, *(token.token_id for token in self.emitted))

    @invariant()
    def nothing_leaves_before_decode_has_room(self) -> None:
        if self.attempts and not self.is_granted and self.life.needs_decode:
            assert len(self.emitted) == self.bases[-1]

    @invariant()
    def there_is_at_most_one_end_and_it_is_final(self) -> None:
        assert len(self.ends) <= 1
        is_over = self.life.state in (State.FINISHED, State.FAILED)
        assert is_over == bool(self.ends)
        if self.life.state is State.FINISHED:
            assert self.ends[0].error is None
            assert len(self.emitted) == MAX_TOKENS

    @invariant()
    def attempts_are_bounded(self) -> None:
        assert len(self.attempts) <= MAX_ATTEMPTS


def _token(position: int) -> AnswerToken:
    is_last = position == MAX_TOKENS - 1
    finish = FinishReason.LENGTH if is_last else FinishReason.NONE
    return AnswerToken(position, 100 + position, finish)


TestLifecycle = LifecycleMachine.TestCase
