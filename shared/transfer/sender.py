"""The source's end of one transfer: spans in, frames out, never more than there are receives for.

Spans and layers come from the step loop, the grant, credit and receipts from the sink. A frame goes
when it is granted, credited, its layers are written, every earlier frame is on its way, and there
is a staging slot (``senders.py`` gives it). Giving up stops new frames; what was sent must settle
before the transfer ends, because a send that was cancelled may still read its buffer.

Pure: it knows no buffer, no block table and no socket; ``now`` is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import LocalProtocolError, MeshError, RemoteProtocolError, TransferFailed
from shared.ids import TransferId
from shared.transfer.effects import (
    CloseLink,
    EndTransfer,
    GatherAndSend,
    SenderEffect,
    SenderTiming,
    SendMessage,
)
from shared.transfer.flow import Flow
from shared.transfer.machine import SENDER_TABLE, Machine, SenderEvent, SenderState
from shared.transfer.messages import (
    Abort,
    Ack,
    Commit,
    Credit,
    Grant,
    LinkId,
    Open,
    SourceMessage,
    Span,
    StopSending,
    TransferKey,
)
from shared.transfer.plan import MAX_FRAMES, Frame, PushMode, plan_frames


@dataclass(slots=True, eq=False)
class _SpanState:
    """A planned span. num_ready: layers whose frames may go."""

    start: int
    stop: int
    mode: PushMode
    num_ready: int = 0
    is_computed: bool = False


class Sender:
    """One transfer. Methods are events and append to ``effects``; ``Senders`` owns that list.

    Nothing a peer does raises here: a peer that breaks the rules ends this transfer only.
    """

    def __init__(
        self,
        key: TransferKey,
        link: LinkId,
        flow: Flow,
        num_tokens: int,
        timing: SenderTiming,
        effects: list[SenderEffect],
        *,
        is_prefix: bool = False,
    ) -> None:
        """is_prefix: what the cache has is sent, which may be less than was asked for."""
        self.key = key
        self.is_prefix = is_prefix
        self.link = link
        self.flow = flow
        self._num_tokens = num_tokens
        self._timing = timing
        self._effects = effects
        self._machine = Machine(SENDER_TABLE, SenderState.NEW)
        self._spans: list[_SpanState] = []
        self._frames: list[Frame] = []
        self._span_of_frame: list[_SpanState] = []
        self._grant: Grant | None = None
        self._peer_slots: list[int] = []  # the sink's, one a credited frame
        self._next_frame = 0
        self._acked = 0
        self._in_flight: dict[int, tuple[int, float]] = {}  # frame index -> slot, sent at
        self._commit_token: int | None = None
        self._error: MeshError | None = None
        self._is_needed = True
        self.is_ended = False
        """Whether the caller has been told the end; sends may still settle."""
        self._progress_at = 0.0

    # --- what others may ask ---

    @property
    def state(self) -> SenderState:
        """Where this end stands."""
        return self._machine.state

    @property
    def transfer_id(self) -> TransferId | None:
        """The sink's name for it; None before the grant."""
        return None if self._grant is None else self._grant.transfer_id

    @property
    def skip_tokens(self) -> int:
        """Tokens at the front that the sink has and nobody sends; 0 while it has not said so."""
        return 0 if self._grant is None else self._grant.skip_tokens

    @property
    def num_tokens_kept(self) -> int:
        """Tokens whose KV is computed and waits for room at the sink; 0 = it is on its way, or not
        all computed."""
        is_waiting = self.state is SenderState.OPENING and self._commit_token is not None
        return self._num_tokens if is_waiting else 0

    @property
    def is_over(self) -> bool:
        """Whether it can be forgotten: no event can come any more."""
        return self._machine.is_over

    @property
    def pending_bytes(self) -> int:
        """Of the frames known so far, those that are not acknowledged."""
        return sum(frame.num_bytes for frame in self._frames[self._acked :])

    @property
    def slots_in_use(self) -> list[int]:
        """Staging slots that hold a frame of this transfer."""
        return [slot for slot, _ in self._in_flight.values()]

    @property
    def can_send(self) -> bool:
        """Whether the next frame waits for nothing but a staging slot."""
        is_credited = self._next_frame < len(self._peer_slots)
        is_pushing = is_credited and self.state in (SenderState.PUSHING, SenderState.COMMITTING)
        return is_pushing and self._is_written

    @property
    def deadline_at(self) -> float | None:
        """When ``tick`` has something to say, or None while nobody owes anything."""
        match self.state:
            case SenderState.OPENING | SenderState.WITHDRAWING:
                return self._progress_at + self._timing.open_s
            case SenderState.PUSHING | SenderState.COMMITTING:
                if self._in_flight:
                    return self._sends_until(self._timing.stall_s)
                # What the sink may owe: receipts of frames that have crossed, the last one of a
                # commit. Credit comes when others' frames have left its slots: it counts for these.
                is_owed = self._acked < self._next_frame or (
                    self.state is SenderState.COMMITTING and self._next_frame == len(self._frames)
                )
                return self._progress_at + self._timing.stall_s if is_owed else None
            case SenderState.FINISHING | SenderState.ABORTING:
                return self._sends_until(self._timing.settle_s)
            case _:
                return None

    def _sends_until(self, patience_s: float) -> float:
        frames = map(self._frames.__getitem__, self._in_flight)
        return self.flow.waits_until(self._progress_at, patience_s, frames)

    @property
    def _is_written(self) -> bool:
        """Whether there is a next frame, and its layers are written."""
        idx = self._next_frame
        if idx >= len(self._frames):
            return False
        return self._span_of_frame[idx].num_ready >= self._frames[idx].last_layer

    # --- events of the step loop ---

    def open(self, now: float) -> None:
        """Ask the sink for room."""
        self._machine.step(SenderEvent.OPENED)
        self._progress_at = now
        self._say(Open(self.key))

    def span_planned(self, start: int, stop: int, mode: PushMode, *, is_cached: bool) -> None:
        """The next step computes tokens [start, stop), or they are cached.

        Raises LocalProtocolError: it does not join the last span, leaves the prompt, or comes
        before the last span is computed or after the commit.
        """
        self._machine.step(SenderEvent.SPAN_PLANNED)
        if self.state not in (SenderState.OPENING, SenderState.PUSHING):
            return
        joins_at = self._spans[-1].stop if self._spans else 0
        if self._commit_token is not None or not joins_at == start < stop <= self._num_tokens:
            raise LocalProtocolError(
                f"span [{start}, {stop}) must join at {joins_at} and end by {self._num_tokens}"
            )
        if self._spans and not self._spans[-1].is_computed:
            raise LocalProtocolError("a span was planned before the last one was computed")
        span = _SpanState(start, stop, mode)
        self._spans.append(span)
        if is_cached:
            self._computed(span)
        if self.state is SenderState.PUSHING:
            self._announce(span)

    def layers_ready(self, num_layers: int) -> None:
        """Layers [0, num_layers) of the newest span are written."""
        self._machine.step(SenderEvent.LAYERS_READY)
        if self._spans and self._spans[-1].mode is PushMode.LAYERWISE:
            span = self._spans[-1]
            span.num_ready = max(span.num_ready, num_layers)

    def span_computed(self) -> None:
        """The newest span's step is over: all its layers are written."""
        self._machine.step(SenderEvent.LAYERS_READY)
        if self._spans:
            self._computed(self._spans[-1])

    def commit(self, first_token: int, now: float) -> None:
        """Every span is planned and computed, and the next token is sampled.

        Raises LocalProtocolError: committed before, or the spans do not cover the prompt.
        """
        if self.state in (SenderState.OPENING, SenderState.PUSHING):
            covered = self._spans[-1].stop if self._spans else 0
            is_short = covered != self._num_tokens and not self.is_prefix
            if self._commit_token is not None or is_short:
                raise LocalProtocolError(
                    f"commit with {covered} of {self._num_tokens} tokens, or committed twice"
                )
            self._commit_token = first_token
            self.span_computed()
        self._machine.step(SenderEvent.COMMITTED)
        if self.state is SenderState.COMMITTING:
            self._say_commit(now)

    def gave_up(self, error: MeshError | None, now: float) -> None:
        """Stop: cancelled, failed, or not needed (None). Idempotent."""
        if self.is_over:
            return
        before = self.state
        self._machine.step(SenderEvent.GAVE_UP)
        if before is self.state:
            return
        self._stop(error, now)
        # An open that was not answered has no id to abort: the abort follows the grant, if that
        # comes.
        if self.state is SenderState.WITHDRAWING:
            self._end()  # nothing was ever sent, so nothing reads the blocks
        else:
            self._say_abort(error)
            self._drain()

    # --- events of the peer ---

    def granted(self, grant: Grant, now: float) -> None:
        """The sink has room: announce what is planned, and hand the grant back if we withdrew."""
        withdrawn = self.state is SenderState.WITHDRAWING
        self._machine.step(SenderEvent.GRANTED)
        if self._grant is not None:
            if grant != self._grant:
                raise RemoteProtocolError("the peer granted one transfer twice, differently")
            return
        self._grant = grant
        if withdrawn:
            self._say_abort(self._error)
            return
        if grant.skip_tokens > self._num_tokens:
            # The table has moved to PUSHING: the transfer is aborted from there, under its id.
            raise RemoteProtocolError("the peer says it has more tokens than there are")
        self._progress_at = now
        for span in self._spans:
            self._announce(span)
        if self._commit_token is not None:
            self._machine.step(SenderEvent.COMMITTED)
            self._say_commit(now)

    def refused(self, error: MeshError) -> None:
        """The sink has no room."""
        self._machine.step(SenderEvent.REFUSED)
        self._error = self._error or error
        self._end()

    def credit_raised(self, credit: Credit, now: float) -> None:
        """Receives are posted for frames [0, credit.frames). An older, smaller credit is late."""
        self._machine.step(SenderEvent.CREDIT_RAISED)
        if credit.frames > len(self._frames):
            raise RemoteProtocolError("the peer gave credit for frames that do not exist")
        num_new = credit.frames - len(self._peer_slots)
        if num_new > 0:
            if len(credit.slots) != num_new:
                raise RemoteProtocolError("the peer gave credit without a slot a frame")
            self._peer_slots += credit.slots
            self._made_progress(now)

    def acked(self, ack: Ack, now: float) -> None:
        """Frames [0, ack.frames) are verified and placed; ``done`` = the transfer is complete."""
        # Looked at before the state moves: a false "done" must not end the transfer well.
        if ack.frames > self._next_frame or (ack.done and ack.frames != len(self._frames)):
            raise RemoteProtocolError("the peer acknowledged frames that were not sent")
        self._machine.step(SenderEvent.DONE_ACKED if ack.done else SenderEvent.ACKED)
        if ack.frames > self._acked:
            self._acked = ack.frames
            self._made_progress(now)
        if self.state is SenderState.FINISHING and not self.is_ended:
            self._progress_at = now
            self._end()
            self._drain()

    def peer_aborted(self, stop: StopSending, now: float) -> None:
        """The sink gave up. Answer with what we have sent: it must know what may still arrive."""
        before = self.state
        self._machine.step(SenderEvent.PEER_ABORTED)
        if before is self.state:
            return
        self._stop(stop.error, now)
        # Without an error: it is the sink that knows what went wrong.
        self._say_abort(None)
        self._drain()

    def peer_lost(self, error: MeshError, now: float) -> None:
        """The pair is gone; its endpoint is being closed, which settles every send."""
        if self.is_over or self.state is SenderState.LOSING:
            return
        if self._machine.step(SenderEvent.PEER_LOST) is SenderState.LOSING:
            self._stop(error, now)
            self._drain()

    # --- events of the shell ---

    def slot_given(self, slot: int, now: float) -> None:
        """A staging slot for the next frame; only while ``can_send``."""
        grant = self._grant
        if grant is None or not self.can_send:
            raise LocalProtocolError("a slot was given to a transfer that cannot send")
        frame = self._frames[self._next_frame]
        self._next_frame += 1
        if not self._in_flight:
            self._progress_at = now  # nobody owed anything until now
        self._in_flight[frame.idx] = slot, now
        self.flow.num_in_flight += 1
        self._effects.append(
            GatherAndSend(
                self.key,
                self.link,
                grant.transfer_id,
                grant.epoch,
                grant.tag_base + frame.idx,
                frame,
                slot,
                self._peer_slots[frame.idx],
            )
        )

    def send_settled(self, frame_idx: int, error: MeshError | None, now: float) -> int:
        """A send will not touch its slot again; returns that slot. error: it did not go through."""
        self._machine.step(SenderEvent.SEND_SETTLED)
        sent = self._in_flight.pop(frame_idx, None)
        if sent is None:
            raise LocalProtocolError(f"frame {frame_idx} settled without being sent")
        slot, sent_at = sent
        self.flow.num_in_flight -= 1
        self.flow.moved(now)
        if error is None:
            self.flow.crossed(self._frames[frame_idx].num_bytes, now - sent_at)
            self._made_progress(now)
        elif self.state in (SenderState.PUSHING, SenderState.COMMITTING):
            self.gave_up(error, now)
        self._drain()
        return slot

    def tick(self, now: float) -> None:
        """Look at the clock."""
        if self.deadline_at is None or now < self.deadline_at:
            return
        match self.state:
            case SenderState.OPENING:
                self.gave_up(TransferFailed("the sink did not answer in time"), now)
            case SenderState.WITHDRAWING:
                self._progress_at = now
                self._effects.append(CloseLink(self.link, "the sink answers no open"))
            case SenderState.PUSHING | SenderState.COMMITTING:
                self.gave_up(TransferFailed("the transfer makes no progress", code="stalled"), now)
            case _:
                self._progress_at = now
                self._effects.append(CloseLink(self.link, "a transfer that ended does not settle"))

    # --- inside ---

    def _computed(self, span: _SpanState) -> None:
        span.is_computed = True
        span.num_ready = self.flow.rule.layout.num_layers

    def _announce(self, span: _SpanState) -> None:
        grant = self._grant
        assert grant is not None
        frames = plan_frames(
            self.flow.rule,
            span.start,
            span.stop,
            skip=grant.skip_tokens,
            first_idx=len(self._frames),
        )
        if len(self._frames) + len(frames) > MAX_FRAMES:
            raise LocalProtocolError("one transfer takes too many frames; raise group_bytes")
        self._frames += frames
        self._span_of_frame += [span] * len(frames)
        self._say(Span(grant.transfer_id, span.start, span.stop))

    def _say_commit(self, now: float) -> None:
        assert self._grant is not None
        assert self._commit_token is not None
        self._progress_at = now
        self._say(Commit(self._grant.transfer_id, self._commit_token, len(self._frames)))

    def _say_abort(self, error: MeshError | None) -> None:
        assert self._grant is not None
        self._say(Abort(self._grant.transfer_id, error, self._next_frame))

    def _say(self, message: SourceMessage) -> None:
        self._effects.append(SendMessage(self.link, message))

    def _made_progress(self, now: float) -> None:
        if self.state in (SenderState.PUSHING, SenderState.COMMITTING):
            self._progress_at = now

    def _stop(self, error: MeshError | None, now: float) -> None:
        if self._error is None and self._is_needed:
            self._error = error
            self._is_needed = error is not None
        self._progress_at = now

    def _drain(self) -> None:
        """Move on if nothing is in flight in a state that waits for that."""
        waits = (SenderState.FINISHING, SenderState.ABORTING, SenderState.LOSING)
        if self.state in waits and not self._in_flight:
            self._machine.step(SenderEvent.DRAINED)
            self._end()

    def _end(self) -> None:
        if not self.is_ended:
            self.is_ended = True
            self._effects.append(EndTransfer(self.key, self._error, self._is_needed))
