"""The sink's end of one transfer: receives posted in frame order, verified, placed, acknowledged.

A frame walks  announced -> posted (slot) -> arrived -> placing (slot) -> placed.  Ending badly is
the longer half of this module: a receive that was cancelled may still write, so slots and blocks
stay fenced until every one of its operations has settled. Receives whose frame the source has sent
are left to land (their bytes are thrown away), because cancelling them would leave its sends
hanging for ever; only receives whose frame will never come are cancelled. The source's own Abort
says which is which.

Pure: it knows no buffer, no block and no socket; ``now`` is an argument.
"""

from __future__ import annotations

from shared.errors import LocalProtocolError, MeshError, RemoteProtocolError, TransferFailed
from shared.transfer.effects import (
    CancelReceive,
    CloseLink,
    HandOver,
    PostReceive,
    QuarantineLease,
    ReceiverEffect,
    ReceiverTiming,
    ReleaseLease,
    ReportFailure,
    SendReply,
    VerifyAndPlace,
)
from shared.transfer.flow import Flow
from shared.transfer.machine import RECEIVER_TABLE, Machine, ReceiverEvent, ReceiverState
from shared.transfer.messages import (
    Abort,
    Ack,
    Commit,
    Credit,
    Grant,
    LinkId,
    SinkMessage,
    Span,
    StopSending,
)
from shared.transfer.plan import MAX_FRAMES, Frame, plan_frames

_LIVE = (ReceiverState.RESERVED, ReceiverState.RECEIVING, ReceiverState.COMMITTED)
_SETTLING = (ReceiverState.ABORTING, ReceiverState.QUARANTINED)


class Receiver:
    """One granted transfer. Methods are events and append to ``effects``; slots that come home
    go to ``free_slots``. ``Receivers`` owns both lists.

    A message that breaks the rules raises RemoteProtocolError; ``Receivers`` then ends this
    transfer and no other.
    """

    def __init__(
        self,
        grant: Grant,
        link: LinkId,
        flow: Flow,
        num_tokens: int,
        *,
        window: int,
        timing: ReceiverTiming,
        effects: list[ReceiverEffect],
        free_slots: list[int],
        is_prefix: bool = False,
    ) -> None:
        """is_prefix: it may end before all tokens: the source sends what its cache has."""
        self.key = grant.key
        self.grant = grant
        self.link = link
        self.flow = flow
        self._num_tokens = num_tokens
        self._is_prefix = is_prefix
        self._window = window
        self._timing = timing
        self._effects = effects
        self._free_slots = free_slots
        self._machine = Machine(RECEIVER_TABLE, ReceiverState.RESERVED)
        self._frames: list[Frame] = []
        self._last_span: Span | None = None
        self._next_start = 0
        self._num_written = 0  # frames whose KV the source has, as far as it has said
        self._written_at = 0.0
        self._next_post = 0
        self._uncredited: list[int] = []  # slots of the newest receives, not told yet
        self._posted: dict[int, int] = {}  # frame index -> slot that the transport may write
        self._placing: dict[int, int] = {}  # frame index -> slot that a copy reads
        self._placed: set[int] = set()  # beyond the prefix
        self._placed_prefix = 0
        self._commit: Commit | None = None
        self._peer_sent: int | None = None
        self._began_at = 0.0
        self._progress_at = 0.0
        self._say(grant)

    # --- what others may ask ---

    @property
    def state(self) -> ReceiverState:
        """Where this end stands."""
        return self._machine.state

    @property
    def is_over(self) -> bool:
        """Whether it can be forgotten."""
        return self._machine.is_over

    @property
    def is_ending(self) -> bool:
        """Whether it was given up, and something may still be written."""
        return self.state in _SETTLING

    @property
    def wants_slot(self) -> bool:
        """Whether the next announced frame waits for a slot, within this transfer's window."""
        return (
            self.state in _LIVE
            and self._next_post < len(self._frames)
            and self.num_slots < self._window
        )

    @property
    def wants_ahead(self) -> bool:
        """Whether the KV of the next frame may not be computed yet, as far as the source has
        said."""
        return self._next_post >= self._num_written

    @property
    def num_slots(self) -> int:
        """Slots that it has."""
        return len(self._posted) + len(self._placing)

    @property
    def posted_slots(self) -> list[int]:
        """Slots the transport may write now."""
        return list(self._posted.values())

    @property
    def placing_slots(self) -> list[int]:
        """Slots being verified and copied now."""
        return list(self._placing.values())

    @property
    def deadline_at(self) -> float | None:
        """When ``tick`` has something to say."""
        frames = map(self._frames.__getitem__, self._posted)
        if self.state in _SETTLING:
            return self.flow.waits_until(self._progress_at, self._timing.settle_s, frames)
        # A step takes as long as it takes: the source owes nothing that it may yet compute. That it
        # lives its pair tells, and a frame that is lost on the way it misses itself.
        first = next(iter(self._posted), self._num_written)
        if self.state not in _LIVE or first >= self._num_written:
            return None
        since = max(self._progress_at, self._written_at)
        return self.flow.waits_until(since, self._timing.stall_s, frames)

    # --- events of the peer ---

    def span_announced(self, span: Span, now: float) -> None:
        """Derive the span's frames. Repeating the last span word for word changes nothing."""
        self._machine.step(ReceiverEvent.SPAN_ANNOUNCED)
        if self.state not in _LIVE or span == self._last_span:
            return
        if self._commit is not None:
            raise RemoteProtocolError("a span came after the commit")
        if not self._next_start == span.start < span.stop <= self._num_tokens:
            raise RemoteProtocolError(
                f"span [{span.start}, {span.stop}) must join at {self._next_start} "
                f"and end by {self._num_tokens}"
            )
        frames = plan_frames(
            self.flow.rule,
            span.start,
            span.stop,
            skip=self.grant.skip_tokens,
            first_idx=len(self._frames),
        )
        if len(self._frames) + len(frames) > MAX_FRAMES:
            raise RemoteProtocolError("more frames than one transfer may have")
        self._written(now)  # what was announced before: a span comes when the last one is computed
        # From the first span on: the wait before it is for the prompt, not for the transfer.
        if self._last_span is None:
            self._began_at = now
        self._frames += frames
        self._last_span = span
        self._next_start = span.stop

    def committed(self, commit: Commit, now: float) -> None:
        """Nothing more will be announced. Both ends must count the same frames."""
        self._machine.step(ReceiverEvent.COMMITTED)
        if self.state is not ReceiverState.COMMITTED or commit == self._commit:
            return
        if self._commit is not None:
            raise RemoteProtocolError("two different commits of one transfer")
        is_short = self._next_start != self._num_tokens and not self._is_prefix
        if is_short or commit.num_frames != len(self._frames):
            raise RemoteProtocolError(
                f"commit of {commit.num_frames} frames after {self._next_start} tokens; here are "
                f"{len(self._frames)} frames and {self._num_tokens} tokens"
            )
        self._commit = commit
        self._written(now)
        if self._placed_prefix == len(self._frames):
            self._finish(now)
            self._acknowledge()

    def peer_aborted(self, abort: Abort, now: float) -> None:
        """The source gave up, or answers our abort: frames beyond ``abort.frames`` never come."""
        was_live = self.state in _LIVE
        self._machine.step(ReceiverEvent.PEER_ABORTED)
        if self._peer_sent is None:
            self._peer_sent = abort.frames
            for idx in self._posted:
                if idx >= abort.frames:
                    self._effects.append(CancelReceive(self.key, idx))
        if was_live:
            if abort.error is not None:
                self._effects.append(ReportFailure(self.key, abort.error))
            self._stop(now)
        self._drain()

    def peer_lost(self, error: MeshError, now: float) -> None:
        """The pair is gone; its endpoint is being closed, which settles every receive."""
        was_live = self.state in _LIVE
        self._machine.step(ReceiverEvent.PEER_LOST)
        if was_live:
            self._effects.append(ReportFailure(self.key, error))
            self._stop(now)
        self._drain()

    # --- events of the shell and the lease side ---

    def gave_up(self, error: MeshError, now: float, *, is_reported: bool) -> None:
        """End it from this side; the source is told. is_reported: the lease side does not know yet.

        Does nothing if it is ending already.
        """
        if self.state not in _LIVE:
            return
        self._machine.step(ReceiverEvent.GAVE_UP)
        self._say(StopSending(self.grant.transfer_id, error))
        if is_reported:
            self._effects.append(ReportFailure(self.key, error))
        self._stop(now)
        self._drain()

    def slot_given(self, slot: int, now: float) -> None:
        """A staging slot for the next frame; only while ``wants_slot``."""
        if not self.wants_slot:
            raise LocalProtocolError("a slot was given to a transfer that wants none")
        self._machine.step(ReceiverEvent.FRAME_POSTED)
        if not self._posted:
            self._progress_at = now  # nobody owed anything until now
        frame = self._frames[self._next_post]
        self._next_post += 1
        self._posted[frame.idx] = slot
        self.flow.num_in_flight += 1
        self._uncredited.append(slot)
        tag = self.grant.tag_base + frame.idx
        self._effects.append(PostReceive(self.key, self.link, frame, slot, tag))

    def say_credit(self) -> None:
        """Tell the source how many receives are posted, and where the new ones point."""
        self._say(Credit(self.grant.transfer_id, self._next_post, tuple(self._uncredited)))
        self._uncredited.clear()

    def receive_settled(self, frame_idx: int, error: MeshError | None, now: float) -> None:
        """The transport will not touch the slot again. error: the frame is not in it."""
        slot = self._posted.pop(frame_idx, None)
        if slot is None:
            raise LocalProtocolError(f"frame {frame_idx} settled without being posted")
        self.flow.moved(now)
        if self.state in _LIVE and error is None:
            self._machine.step(ReceiverEvent.FRAME_ARRIVED)
            # At most: the source may have computed meanwhile.
            self.flow.crossed(self._frames[frame_idx].num_bytes, now - self._progress_at)
            self._progress_at = now
            self._placing[frame_idx] = slot
            self._effects.append(
                VerifyAndPlace(
                    self.key,
                    self.grant.transfer_id,
                    self.grant.epoch,
                    self._frames[frame_idx],
                    slot,
                )
            )
            return
        self._slot_home(slot)
        if self.state in _LIVE and error is not None:
            self.gave_up(error, now, is_reported=True)
        else:
            lost = ReceiverEvent.FRAME_ARRIVED if error is None else ReceiverEvent.FRAME_LOST
            self._machine.step(lost)
        self._drain()

    def frame_placed(self, frame_idx: int, error: MeshError | None, now: float) -> None:
        """The copy is over: its slot is free. error: the frame was refused, and nothing of it may
        be used."""
        slot = self._placing.pop(frame_idx, None)
        if slot is None:
            raise LocalProtocolError(f"frame {frame_idx} was placed without having arrived")
        self._slot_home(slot)
        if self.state not in _LIVE:
            dropped = ReceiverEvent.FRAME_PLACED if error is None else ReceiverEvent.FRAME_DROPPED
            self._machine.step(dropped)
            self._drain()
            return
        if error is not None:
            self.gave_up(error, now, is_reported=True)
            return
        self._machine.step(ReceiverEvent.FRAME_PLACED)
        self._placed.add(frame_idx)
        if frame_idx != self._placed_prefix:
            return
        while self._placed_prefix in self._placed:
            self._placed.remove(self._placed_prefix)
            self._placed_prefix += 1
        self._finish(now)  # first: a client waits for the next token, nobody for the receipt
        self._acknowledge()

    def tick(self, now: float) -> None:
        """Look at the clock."""
        if self.deadline_at is None or now < self.deadline_at:
            return
        if self.state in _LIVE:
            late = TransferFailed("an announced frame did not arrive in time", code="stalled")
            self.gave_up(late, now, is_reported=True)
            return
        self._machine.step(ReceiverEvent.SETTLING_EXPIRED)
        self._progress_at = now
        self._effects.append(CloseLink(self.link, "a transfer that ended does not settle"))

    # --- inside ---

    def _written(self, now: float) -> None:
        self._num_written = len(self._frames)
        self._written_at = now

    def _slot_home(self, slot: int) -> None:
        self._free_slots.append(slot)
        self.flow.num_in_flight -= 1

    def _say(self, reply: SinkMessage) -> None:
        self._effects.append(SendReply(self.link, reply))

    @property
    def _is_complete(self) -> bool:
        return self._commit is not None and self._placed_prefix == len(self._frames)

    def _acknowledge(self) -> None:
        self._say(Ack(self.grant.transfer_id, self._placed_prefix, done=self._is_complete))

    def _finish(self, now: float) -> None:
        if self._is_complete and self._commit is not None:
            self._machine.step(ReceiverEvent.ALL_PLACED)
            num_bytes = sum(frame.num_bytes for frame in self._frames)
            self._effects.append(
                HandOver(
                    self.key,
                    self._commit.first_token,
                    num_bytes,
                    len(self._frames),
                    now - self._began_at if self._frames else 0.0,
                    self._next_start,
                )
            )

    def _stop(self, now: float) -> None:
        """Just left the live states: fence what may still be written."""
        self._progress_at = now
        if self._posted or self._placing:
            self._effects.append(QuarantineLease(self.key))

    def _drain(self) -> None:
        """Free everything if nothing is in use any more."""
        if self.state in _SETTLING and not self._posted and not self._placing:
            self._machine.step(ReceiverEvent.DRAINED)
            self._effects.append(ReleaseLease(self.key))
