"""All transfers into one sink process: opens meet reservations, slots go round, ids are made.

A transfer starts when the source has opened it *and* the lease side has reserved room for it;
either may come first. An open waits a few seconds for its reservation, and then as long as that
waits for room. Staging slots are few and shared: a transfer with announced frames queues for one at
a time, in the order of its first wish, and holds at most ``window``; so slots go round. The link
that has the fewest gets the next (``slot_queue.py``), and over a slow one (``flow.py``) a transfer
holds fewer: quicker ones go on beside it. A frame may be announced long before it is computed; such
ones leave some slots free.

    slots = free + posted + placing          (``check_integrity``)

Slots of a transfer that ends badly stay in "posted" or "placing" (quarantined) until the very
operation has settled. Pure. The shell is shared/worker/receiver.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import (
    InvariantViolated,
    LeaseLost,
    LocalProtocolError,
    MeshError,
    Overloaded,
    RemoteProtocolError,
)
from shared.ids import ID_BYTES, Incarnation, RandomBytes, TransferId
from shared.transfer.effects import AskTerms, EndLeases, ReceiverEffect, ReceiverTiming, SendReply
from shared.transfer.flow import Flow
from shared.transfer.messages import (
    Abort,
    Commit,
    Grant,
    LinkId,
    Open,
    Refused,
    SourceMessage,
    Span,
    TransferKey,
)
from shared.transfer.plan import MAX_FRAMES, FrameRule
from shared.transfer.receiver import Receiver
from shared.transfer.slot_queue import SlotQueue

MAX_ENDED = 4096
"""Reservations that ended before their open came, and are remembered to refuse it."""

MAX_WAITING = 4096
"""Opens that wait for their terms."""

_TAG_RANGES = 1 << 44  # ranges of MAX_FRAMES tags in 64 bits


class OpenWaiting(NamedTuple):
    """An open that waits for its reservation; expires_at: None = for as long as that waits."""

    link: LinkId
    source: Incarnation
    expires_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStatistics:
    """num_settling: transfers that ended badly and whose slots and blocks may still be written."""

    num_waiting: int
    num_live: int
    num_settling: int
    num_free_slots: int


class TagRanges:
    """Tags of one transport: ranges of MAX_FRAMES, from a random start, never handed out twice."""

    def __init__(self, random_bytes: RandomBytes) -> None:
        # Starting in the lower half leaves 2^43 transfers before the counter could come round.
        self._next = int.from_bytes(random_bytes(8), "little") % (_TAG_RANGES // 2)

    def take(self) -> int:
        """Return the first tag of a fresh range."""
        base = self._next * MAX_FRAMES
        self._next += 1
        return base


class Receivers:
    """Every method is an event and returns the effects, in the order in which to perform them."""

    def __init__(
        self,
        *,
        num_slots: int,
        tags: TagRanges,
        random_bytes: RandomBytes,
        window: int = 8,
    ) -> None:
        """window: most slots of one transfer."""
        if num_slots < 1 or window < 1:
            raise LocalProtocolError("a sink needs at least one staging slot")
        self._num_slots = num_slots
        self._window = window
        self._timing = ReceiverTiming()
        self._tags = tags
        self._random_bytes = random_bytes
        self._epoch = 0
        self._free_slots = list(range(num_slots))
        self._links: dict[LinkId, tuple[Incarnation, Flow]] = {}
        self._waiting: dict[TransferKey, OpenWaiting] = {}
        self._ended: dict[TransferKey, MeshError] = {}  # before their open came; oldest first
        self._receivers: dict[TransferKey, Receiver] = {}
        self._by_id: dict[tuple[LinkId, TransferId], Receiver] = {}
        self._queue: SlotQueue[Receiver] = SlotQueue(num_slots, self._may_have_slot)
        self._effects: list[ReceiverEffect] = []
        self.next_tick_at: float | None = None
        """No deadline passes before this; None = there is none. May be earlier than needed."""

    # --- links ---

    def link_up(self, link: LinkId, source: Incarnation, rule: FrameRule) -> None:
        """A source has connected; ``rule`` is what the handshake agreed on."""
        self._links[link] = (source, Flow(rule, self._num_slots))

    def link_lost(self, link: LinkId, error: MeshError, now: float) -> list[ReceiverEffect]:
        """A pair is gone: its opens are forgotten and its transfers end with ``error``; with the
        last pair of a source all leases of that worker end."""
        lost = self._links.pop(link, None)
        for key in [key for key, waiting in self._waiting.items() if waiting.link == link]:
            del self._waiting[key]
        for receiver in [r for r in self._receivers.values() if r.link == link]:
            receiver.peer_lost(error, now)
            self._settle(receiver)
        if lost is not None and all(source != lost[0] for source, _ in self._links.values()):
            self._effects.append(EndLeases(lost[0], error))
        return self._take(now)

    # --- the beginning ---

    def lease_changed(self, key: TransferKey, now: float) -> list[ReceiverEffect]:
        """The lease side has made or granted this reservation: ask it, if an open waits."""
        self._ended.pop(key, None)
        waiting = self._waiting.get(key)
        if waiting is not None:
            self._effects.append(AskTerms(key, waiting.source))
        return self._take(now)

    def must_wait(self, key: TransferKey, now: float, *, is_reserved: bool) -> None:
        """The answer to AskTerms while there are none. is_reserved: the open waits with its
        reservation, whose end ``lease_changed`` or ``give_up`` tells; else only so long."""
        waiting = self._waiting.get(key)
        if waiting is not None and is_reserved:
            self._waiting[key] = waiting._replace(expires_at=None)
        elif waiting is not None and waiting.expires_at is None:
            expires_at = now + self._timing.open_s
            self._waiting[key] = waiting._replace(expires_at=expires_at)
            self._note_deadline(expires_at)

    def attached(
        self,
        key: TransferKey,
        num_tokens: int,
        skip_tokens: int,
        now: float,
        *,
        is_prefix: bool = False,
    ) -> list[ReceiverEffect]:
        """The answer to AskTerms: the lease side gives its terms. Grant the open. is_prefix: see
        ``Receiver``.

        Raises LocalProtocolError: no open waits, or the terms contradict themselves.
        """
        waiting = self._waiting.pop(key, None)
        if waiting is None or not 0 <= skip_tokens <= num_tokens:
            raise LocalProtocolError(
                "terms for no waiting open, or with more skipped than there is"
            )
        self._epoch += 1
        grant = Grant(
            key,
            TransferId(self._random_bytes(ID_BYTES)),
            self._epoch,
            self._tags.take(),
            skip_tokens,
        )
        receiver = Receiver(
            grant,
            waiting.link,
            self._links[waiting.link][1],
            num_tokens,
            window=self._window,
            timing=self._timing,
            effects=self._effects,
            free_slots=self._free_slots,
            is_prefix=is_prefix,
        )
        self._receivers[key] = receiver
        self._by_id[waiting.link, grant.transfer_id] = receiver
        return self._take(now)

    def refused(self, key: TransferKey, error: MeshError, now: float) -> list[ReceiverEffect]:
        """The answer to AskTerms, or the end of the reservation: there is no room for this open."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._effects.append(SendReply(waiting.link, Refused(key, error)))
        return self._take(now)

    # --- the peer, the lease side and the shell ---

    def message(self, link: LinkId, message: SourceMessage, now: float) -> list[ReceiverEffect]:
        """The source said something.

        A message about no transfer of this link is late and dropped; one that breaks the rules
        ends its transfer and no other.
        """
        if isinstance(message, Open):
            self._opened(link, message.key, now)
            return self._take(now)
        receiver = self._by_id.get((link, message.transfer_id))
        if receiver is None:
            return []
        try:
            match message:
                case Span():
                    receiver.span_announced(message, now)
                case Commit():
                    receiver.committed(message, now)
                case Abort():
                    receiver.peer_aborted(message, now)
        except RemoteProtocolError as error:
            receiver.gave_up(error, now, is_reported=True)
        self._settle(receiver)
        return self._take(now)

    def give_up(self, key: TransferKey, error: MeshError, now: float) -> list[ReceiverEffect]:
        """The lease side cancels this attempt: it gets ReleaseLease, and no ReportFailure.

        Without a transfer of that key nothing follows, but its open is refused: the one that waits,
        or the one that is still on its way.
        """
        if key in self._waiting:
            return self.refused(key, error, now)
        receiver = self._receivers.get(key)
        if receiver is not None:
            receiver.gave_up(error, now, is_reported=False)
            self._settle(receiver)
        else:
            # The source opens all the same: refused at once it need not wait for a reservation in
            # vain.
            self._ended[key] = error
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        return self._take(now)

    def receive_settled(
        self, key: TransferKey, frame_idx: int, error: MeshError | None, now: float
    ) -> list[ReceiverEffect]:
        """The answer to one PostReceive. error: the frame is not in the slot."""
        receiver = self._of_operation(key)
        receiver.receive_settled(frame_idx, error, now)
        self._settle(receiver)
        return self._take(now)

    def frame_placed(
        self, key: TransferKey, frame_idx: int, error: MeshError | None, now: float
    ) -> list[ReceiverEffect]:
        """The answer to one VerifyAndPlace. error: header or digest was wrong, or the copy
        failed."""
        receiver = self._of_operation(key)
        receiver.frame_placed(frame_idx, error, now)
        self._settle(receiver)
        return self._take(now)

    def tick(self, now: float) -> list[ReceiverEffect]:
        """Look at the clock; needed at ``next_tick_at``, harmless at any time."""
        self.next_tick_at = None
        for key, waiting in list(self._waiting.items()):
            if waiting.expires_at is not None and now >= waiting.expires_at:
                late = LeaseLost("no reservation came for this transfer", code="open_expired")
                del self._waiting[key]
                self._effects.append(SendReply(waiting.link, Refused(key, late)))
            else:
                self._note_deadline(waiting.expires_at)
        for receiver in list(self._receivers.values()):
            receiver.tick(now)
            self._settle(receiver)
        return self._take(now)

    # --- looking ---

    def is_waiting(self, key: TransferKey) -> bool:
        """Whether an open of this attempt waits for its terms."""
        return key in self._waiting

    def is_live(self, key: TransferKey) -> bool:
        """Whether this attempt has a transfer whose lease is not back yet."""
        return key in self._receivers

    def is_using(self, link: LinkId) -> bool:
        """Whether an open or a transfer on this link is not over."""
        known = (*self._waiting.values(), *self._receivers.values())
        return any(it.link == link for it in known)

    def statistics(self) -> ReceiverStatistics:
        """Counts for metrics and tests."""
        settling = [r for r in self._receivers.values() if r.is_ending]
        return ReceiverStatistics(
            num_waiting=len(self._waiting),
            num_live=len(self._receivers) - len(settling),
            num_settling=len(settling),
            num_free_slots=len(self._free_slots),
        )

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every slot is free, posted or placing, exactly once, and
        no slot is free while somebody may have it."""
        posted = [slot for r in self._receivers.values() for slot in r.posted_slots]
        placing = [slot for r in self._receivers.values() for slot in r.placing_slots]
        if sorted(self._free_slots + posted + placing) != list(range(self._num_slots)):
            raise InvariantViolated(
                f"{self._num_slots} slots != {len(self._free_slots)} free + {len(posted)} posted "
                f"+ {len(placing)} placing, each once"
            )
        if self._free_slots and any(
            r.wants_slot and self._may_have_slot(r) for r in self._receivers.values()
        ):
            raise InvariantViolated("a frame waits for a slot while one is free")

    # --- inside ---

    def _opened(self, link: LinkId, key: TransferKey, now: float) -> None:
        known = self._waiting.get(key) or self._receivers.get(key)
        # The source has ended one that ends here, or it would not begin another.
        is_anew = isinstance(known, Receiver) and known.is_ending
        if link not in self._links or (known is not None and known.link == link and not is_anew):
            return  # late, or said twice
        if known is not None:
            error = RemoteProtocolError("this transfer was opened before", code="opened_twice")
            self._effects.append(SendReply(link, Refused(key, error)))
        elif (ended := self._ended.pop(key, None)) is not None:
            self._effects.append(SendReply(link, Refused(key, ended)))
        elif len(self._waiting) >= MAX_WAITING:
            error = Overloaded("too many transfers wait for a reservation", code="too_many_opens")
            self._effects.append(SendReply(link, Refused(key, error)))
        else:
            source, expires_at = self._links[link][0], now + self._timing.open_s
            self._waiting[key] = OpenWaiting(link, source, expires_at)
            self._note_deadline(expires_at)
            self._effects.append(AskTerms(key, source))

    def _of_operation(self, key: TransferKey) -> Receiver:
        receiver = self._receivers.get(key)
        if receiver is None:
            raise LocalProtocolError("an operation settled after its transfer was over")
        return receiver

    def _settle(self, receiver: Receiver) -> None:
        """After any event of a receiver: forget it, or let it queue; note its deadline."""
        if receiver.is_over:
            self._receivers.pop(receiver.key, None)
            self._queue.discard(receiver.key)
            self._by_id.pop((receiver.link, receiver.grant.transfer_id), None)
            return
        if receiver.wants_slot:
            self._queue.add((receiver.link, receiver.wants_ahead), receiver)
        self._note_deadline(receiver.deadline_at)

    def _note_deadline(self, deadline_at: float | None) -> None:
        if deadline_at is not None and (
            self.next_tick_at is None or deadline_at < self.next_tick_at
        ):
            self.next_tick_at = deadline_at

    def _may_have_slot(self, receiver: Receiver) -> bool:
        # A frame that is not computed yet keeps its slot for as long as a step takes: a link that
        # waits for such ones leaves one of four free, to KV that could cross at once.
        most = 3 * (len(self._free_slots) - 1)
        if receiver.wants_ahead and receiver.flow.num_in_flight > most:
            return False
        return receiver.num_slots < receiver.flow.most

    def _take(self, now: float) -> list[ReceiverEffect]:
        credited: dict[TransferKey, Receiver] = {}
        while self._free_slots and (receiver := self._queue.take()) is not None:
            if receiver.wants_slot:
                receiver.slot_given(self._free_slots.pop(), now)
                credited[receiver.key] = receiver
                self._settle(receiver)
        # One credit a transfer, after all its receives are posted.
        for receiver in credited.values():
            receiver.say_credit()
        # The list itself stays: all receivers append to it.
        effects, self._effects[:] = list(self._effects), []
        return effects
