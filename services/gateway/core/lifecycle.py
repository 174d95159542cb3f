"""The life of one request at the gateway: attempts, legs, fencing, and exactly one end.

An attempt has two legs, dispatched together: *prefill* (KV and the next token) and *decode* (the
rest); or one, *whole*, on a colocated worker. Events say what the legs reported; effects say what
the shell must do. Tokens leave in index order, once each, whichever leg and whichever attempt
brought them; what an older attempt still says is dropped by its attempt number.

The first token of an attempt is held until decode has room for the rest: an answer that has begun
can no longer be refused. Room is asked for while prefill computes, so this rarely costs time.

Pure: no clock, no streams, no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from shared.errors import (
    LocalProtocolError,
    MeshError,
    NoBlocks,
    Overloaded,
    PeerError,
    RemoteProtocolError,
    Retry,
)
from shared.request import AnswerToken, FinishReason, SamplingParams


class State(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class Event(StrEnum):
    """What moves a request; most of what its legs report does not."""

    DISPATCHED = "dispatched"  # another attempt is under way
    ATTEMPT_FAILED = "attempt failed"  # it may be tried again
    LAST_TOKEN = "last token"  # all tokens have left for the client
    GIVEN_UP = "given up"  # for an error that no retry mends, or by the client


MOVES: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.DISPATCHED): State.RUNNING,
    (State.WAITING, Event.GIVEN_UP): State.FAILED,
    (State.RUNNING, Event.ATTEMPT_FAILED): State.WAITING,
    (State.RUNNING, Event.LAST_TOKEN): State.FINISHED,
    (State.RUNNING, Event.GIVEN_UP): State.FAILED,
}
"""Every move there is."""

IGNORED: frozenset[tuple[State, Event]] = frozenset(
    (state, Event.GIVEN_UP) for state in (State.FINISHED, State.FAILED)
)
"""Too late: it is over."""


class Leg(StrEnum):
    """A worker's part of an attempt."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


_PREFILL = Leg.PREFILL  # a member by its enum's name is looked up in Python, 50 ns each time

# Effects: orders to the shell, in the order in which they must be carried out. A token is one by
# itself: hand it to the client.


class CancelLeg(NamedTuple):
    """Tell this leg of the current attempt to stop."""

    leg: Leg


class Reroute(NamedTuple):
    """Find another pair and dispatch again.

    avoid: the leg that failed; both if one reports that the other fails it: who is to blame cannot
    be known, but those two should not meet again.
    """

    error: MeshError
    avoid: tuple[Leg, ...]


class End(NamedTuple):
    """The request is over; nothing follows. error: None after a finish reason."""

    error: MeshError | None


Effect = AnswerToken | CancelLeg | Reroute | End


@dataclass(slots=True)
class _Attempt:
    number: int
    open_legs: list[Leg]
    first_index: int
    has_first_token: bool = False
    is_granted: bool = False
    has_joined: bool = False


class Lifecycle:
    """One request's state machine.

    prompt: the client's token ids. max_attempts: dispatches in all, the first included.
    """

    def __init__(
        self, prompt: tuple[int, ...], sampling: SamplingParams, *, max_attempts: int
    ) -> None:
        self.state = State.WAITING
        self.finish_reason = FinishReason.NONE
        self.num_attempts = 0
        """Dispatches so far."""
        self._prompt = prompt
        self._sampling = sampling
        self._max_attempts = max_attempts
        self._output: list[int] = []
        self._early: dict[int, AnswerToken] = {}
        self._attempt: _Attempt | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens handed to the client so far."""
        return len(self._output)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the next attempt must compute: the prompt and the tokens the client already has."""
        return self._prompt + tuple(self._output)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the client's prompt."""
        return len(self._prompt)

    @property
    def num_tokens_left(self) -> int:
        """The most tokens that the next attempt may bring."""
        return self._sampling.max_tokens - len(self._output)

    @property
    def needs_decode(self) -> bool:
        """Whether a decode worker takes part: not if the next token must be the last."""
        return self._sampling.max_tokens - len(self._output) > 1

    @property
    def sampling(self) -> SamplingParams:
        """Sampling of the next attempt; prompt logprobs are computed once only."""
        if self._output and self._sampling.prompt_logprobs is not None:
            return replace(self._sampling, prompt_logprobs=None)
        return self._sampling

    # --- events -------------------------------------------------------------------------------

    def dispatched(self, *, is_whole: bool = False) -> int:
        """The shell sent both legs of a new attempt, or its only one; return its number (0, 1,
        ...)."""
        self._move(Event.DISPATCHED)
        if is_whole:
            legs = [Leg.WHOLE]
        else:
            legs = [Leg.PREFILL, Leg.DECODE] if self.needs_decode else [Leg.PREFILL]
        self._attempt = _Attempt(self.num_attempts, legs, len(self._output))
        self.num_attempts += 1
        return self._attempt.number

    def token_arrived(self, attempt: int, leg: Leg, token: AnswerToken) -> list[Effect]:
        """A leg reported a token.

        Raises RemoteProtocolError: prefill's token is not the attempt's first.
        """
        current = self._attempt
        if current is None or current.number != attempt or leg not in current.open_legs:
            return []
        index, output = token.index, self._output
        if leg is _PREFILL:
            if index != current.first_index:
                raise RemoteProtocolError("prefill brings the first token alone", param="index")
            current.has_first_token = True
        else:
            current.is_granted = True
        if index < len(output) or index in self._early:
            return []
        is_alone = index == len(output) and not self._early and not token.finish_reason
        if is_alone and current.is_granted:
            # Nothing waits for it, as for nearly all: there is nothing else to decide.
            output.append(token.token_id)
            return [token]
        self._early[index] = token
        return self._release(current)

    def many_arrived(self, attempt: int, leg: Leg, index: int, token_ids: Sequence[int]) -> bool:
        """A leg reported tokens in a row, none of them the answer's last. True: they were next, and
        are the client's; False: nothing has happened, tell them one by one."""
        current = self._attempt
        if current is None or current.number != attempt or leg not in current.open_legs:
            return False
        if leg is _PREFILL or not current.is_granted:
            return False
        if self._early or index != len(self._output):
            return False
        self._output.extend(token_ids)
        return True

    def granted(self, attempt: int) -> list[Effect]:
        """Decode has room."""
        current = self._current(attempt)
        if current is None:
            return []
        current.is_granted = True
        return self._release(current)

    def _release(self, current: _Attempt) -> list[Effect]:
        """Hand out what is next in order, unless decode may still say that it has no room."""
        following = self._early.get(len(self._output))
        if following is None:
            return []
        is_last = following.finish_reason is not FinishReason.NONE
        # An answer that ends here needs no room on decode, so it does not wait for any.
        if not (current.is_granted or is_last) and self.needs_decode:
            return []
        ready: list[AnswerToken] = []
        while (token := self._early.pop(len(self._output), None)) is not None:
            self._output.append(token.token_id)
            ready.append(token)
            if token.finish_reason is not FinishReason.NONE:
                self.finish_reason = token.finish_reason
                break
        effects: list[Effect] = [*ready]
        if self.finish_reason is not FinishReason.NONE:
            # The leg that brought the end has ended by itself. If that was prefill with its one
            # token, decode still keeps room for the rest: ``_end`` cancels it.
            if Leg.WHOLE in current.open_legs:
                current.open_legs.remove(Leg.WHOLE)
            elif ready[-1].index > current.first_index:
                current.open_legs.remove(Leg.DECODE)
            effects += self._end(Event.LAST_TOKEN, None)
        return effects

    def joined(self, attempt: int) -> None:
        """Decode has all KV: from here on the prefill leg's fate does not matter."""
        current = self._current(attempt)
        if current is not None:
            current.is_granted = current.has_joined = True

    def prefill_done(self, attempt: int) -> None:
        """Prefill has nothing left to do."""
        current = self._current(attempt)
        if current is not None and Leg.PREFILL in current.open_legs:
            current.open_legs.remove(Leg.PREFILL)

    def leg_failed(self, attempt: int, leg: Leg, error: MeshError, *, lost: bool) -> list[Effect]:
        """A leg reported an error, or its worker is gone (``lost``).

        A prefill worker that dies after its token may have pushed everything. A decode leg that
        has granted knows, and will join or fail: nothing is decided here. If it dies before its
        token another attempt is needed even if decode has all KV: nobody else has the token.
        """
        current = self._current(attempt)
        if current is None or leg not in current.open_legs:
            return []
        current.open_legs.remove(leg)
        is_deciding = current.is_granted and Leg.DECODE in current.open_legs
        may_be_over = current.has_joined or (lost and is_deciding)
        if leg is Leg.PREFILL and current.has_first_token and may_be_over:
            return []
        if error.retry is Retry.NEVER or self.num_attempts >= self._max_attempts:
            return self._end(Event.GIVEN_UP, _for_client(error))
        effects: list[Effect] = [CancelLeg(other) for other in current.open_legs]
        self._attempt = None
        # The client has none of these, so the next attempt computes them again.
        self._early.clear()
        self._move(Event.ATTEMPT_FAILED)
        has_blamed_other = isinstance(error, PeerError) and not isinstance(error, NoBlocks)
        is_either = has_blamed_other and not lost and leg is not Leg.WHOLE
        avoid = (Leg.PREFILL, Leg.DECODE) if is_either else (leg,)
        return [*effects, Reroute(error, avoid)]

    def fail(self, error: MeshError | None) -> list[Effect]:
        """The shell gives up: deadline, no pair left, drain. No effect after the end."""
        if (self.state, Event.GIVEN_UP) in IGNORED:
            return []
        return self._end(Event.GIVEN_UP, _for_client(error))

    def cancel(self) -> list[Effect]:
        """The client is gone; valid in every state, no effect after the end."""
        return self.fail(None)

    # --- inside -------------------------------------------------------------------------------

    def _current(self, attempt: int) -> _Attempt | None:
        if self._attempt is None or self._attempt.number != attempt:
            return None
        return self._attempt

    def _move(self, event: Event) -> None:
        """Move by the table. Raises LocalProtocolError: it has no such move."""
        after = MOVES.get((self.state, event))
        if after is None:
            raise LocalProtocolError(
                f"{event.value} is not allowed on a {self.state.value} request"
            )
        self.state = after

    def _end(self, event: Event, error: MeshError | None) -> list[Effect]:
        self._move(event)
        effects: list[Effect] = []
        if self._attempt is not None:
            effects += [CancelLeg(leg) for leg in self._attempt.open_legs]
        self._attempt = None
        self._early.clear()
        return [*effects, End(error)]


def _for_client(error: MeshError | None) -> MeshError | None:
    """Translate what only workers say into what clients are told."""
    if isinstance(error, NoBlocks):
        return Overloaded(error.message, code="no_blocks", retry_after_s=1.0)
    return error
