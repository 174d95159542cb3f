"""All transfers of one source process: who gets the next staging slot, and which message is whose.

Staging slots are few and shared. A transfer that can send queues for one slot at a time, so slots
go round all transfers and none waits forever: a slot is held only by a frame for which the sink has
posted a receive, so it comes home without help from any other transfer. Prefixes that other workers
pull have at most half of the slots at a time: prompts' KV, for which clients wait, goes first. The
link that has the fewest gets the next; over a slow one few frames go at once (``flow.py``).

    slots = free + in flight          (``check_integrity``)

Pure. The shell is shared/worker/pusher.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import InvariantViolated, LocalProtocolError, MeshError, RemoteProtocolError
from shared.ids import TransferId
from shared.transfer.effects import SenderEffect, SenderTiming
from shared.transfer.flow import Flow
from shared.transfer.messages import (
    Ack,
    Credit,
    Grant,
    LinkId,
    Refused,
    SinkMessage,
    StopSending,
    TransferKey,
)
from shared.transfer.plan import Frame, FrameRule, PushMode, plan_frames
from shared.transfer.sender import Sender
from shared.transfer.slot_queue import SlotQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStatistics:
    """Counts for metrics and tests."""

    num_transfers: int
    num_free_slots: int


class Senders:
    """Every method is an event and returns the effects, in the order in which to perform them.

    Events of the step loop about a transfer that has ended return nothing: the caller learns of
    the end from ``EndTransfer``, and may not have seen it yet.
    """

    def __init__(self, *, num_slots: int, timing: SenderTiming | None = None) -> None:
        if num_slots < 1:
            raise LocalProtocolError("a source needs at least one staging slot")
        self._num_slots = num_slots
        self._timing = timing or SenderTiming()
        self._free_slots = list(range(num_slots))
        self._most_prefix_slots = max(1, num_slots // 2)
        self._num_prefix_slots = 0
        self._flows: dict[LinkId, Flow] = {}
        self._senders: dict[TransferKey, Sender] = {}
        self._by_id: dict[tuple[LinkId, TransferId], Sender] = {}
        self._queue: SlotQueue[Sender] = SlotQueue(num_slots, self._may_have_slot)
        self._effects: list[SenderEffect] = []
        self.next_tick_at: float | None = None
        """No deadline passes before this; None = there is none. May be earlier than needed."""

    # --- links ---

    def link_up(self, link: LinkId, rule: FrameRule) -> None:
        """A pair is ready; ``rule`` is what its handshake agreed on."""
        self._flows[link] = Flow(rule, self._num_slots)

    def link_lost(self, link: LinkId, error: MeshError, now: float) -> list[SenderEffect]:
        """A pair is gone: all its transfers end, each with ``error``."""
        self._flows.pop(link, None)
        for sender in [sender for sender in self._senders.values() if sender.link == link]:
            sender.peer_lost(error, now)
            self._settle(sender)
        return self._take(now)

    # --- the step loop ---

    def begin(
        self,
        key: TransferKey,
        link: LinkId,
        num_tokens: int,
        now: float,
        *,
        is_prefix: bool = False,
    ) -> list[SenderEffect]:
        """Open a transfer. is_prefix: see ``Sender``.

        Raises LocalProtocolError: no such link, or this attempt has one.
        """
        if key in self._senders or link not in self._flows:
            raise LocalProtocolError("a transfer needs a live link, once per attempt")
        flow = self._flows[link]
        sender = Sender(
            key, link, flow, num_tokens, self._timing, self._effects, is_prefix=is_prefix
        )
        self._senders[key] = sender
        flow.num_transfers += 1
        sender.open(now)
        self._settle(sender)
        return self._take(now)

    def span_planned(
        self,
        key: TransferKey,
        start: int,
        stop: int,
        mode: PushMode,
        now: float,
        *,
        is_cached: bool = False,
    ) -> list[SenderEffect]:
        """See ``Sender.span_planned``."""
        return self._local(
            key, now, lambda sender: sender.span_planned(start, stop, mode, is_cached=is_cached)
        )

    def layers_ready(self, key: TransferKey, num_layers: int, now: float) -> list[SenderEffect]:
        """See ``Sender.layers_ready``."""
        return self._local(key, now, lambda sender: sender.layers_ready(num_layers))

    def span_computed(self, key: TransferKey, now: float) -> list[SenderEffect]:
        """See ``Sender.span_computed``."""
        return self._local(key, now, lambda sender: sender.span_computed())

    def commit(self, key: TransferKey, first_token: int, now: float) -> list[SenderEffect]:
        """See ``Sender.commit``."""
        return self._local(key, now, lambda sender: sender.commit(first_token, now))

    def give_up(self, key: TransferKey, error: MeshError | None, now: float) -> list[SenderEffect]:
        """Abort one transfer; None = it is not needed."""
        return self._local(key, now, lambda sender: sender.gave_up(error, now))

    def give_way(self, num_tokens: int, error: MeshError, now: float) -> list[SenderEffect]:
        """Give up the newest whose KV is computed and has no room at its sink yet, until that of so
        many tokens is free."""
        for sender in reversed(list(self._senders.values())):
            if num_tokens > 0 and (num_kept := sender.num_tokens_kept):
                num_tokens -= num_kept
                sender.gave_up(error, now)
                self._settle(sender)
        return self._take(now)

    # --- the peer and the shell ---

    def message(self, link: LinkId, message: SinkMessage, now: float) -> list[SenderEffect]:
        """The sink said something. A message about no transfer of this link is late and dropped."""
        match message:
            case Grant(key=key) | Refused(key=key):
                sender = self._senders.get(key)
            case Credit(transfer_id=id_) | Ack(transfer_id=id_) | StopSending(transfer_id=id_):
                sender = self._by_id.get((link, id_))
        if sender is None or sender.link != link:
            return []
        try:
            match message:
                case Grant():
                    sender.granted(message, now)
                case Refused():
                    sender.refused(message.error)
                case Credit():
                    sender.credit_raised(message, now)
                case Ack():
                    sender.acked(message, now)
                case StopSending():
                    sender.peer_aborted(message, now)
        except RemoteProtocolError as error:
            sender.gave_up(error, now)
        self._settle(sender)
        return self._take(now)

    def send_settled(
        self, key: TransferKey, frame_idx: int, error: MeshError | None, now: float
    ) -> list[SenderEffect]:
        """The answer to one GatherAndSend. error: None = the transport took the whole frame."""
        sender = self._senders.get(key)
        if sender is None:
            raise LocalProtocolError("a send settled after its transfer was over")
        self._free_slots.append(sender.send_settled(frame_idx, error, now))
        self._num_prefix_slots -= sender.is_prefix
        self._settle(sender)
        return self._take(now)

    def tick(self, now: float) -> list[SenderEffect]:
        """Look at the clock; needed at ``next_tick_at``, harmless at any time."""
        self.next_tick_at = None
        for sender in list(self._senders.values()):
            sender.tick(now)
            self._settle(sender)
        return self._take(now)

    # --- looking ---

    def is_live(self, key: TransferKey) -> bool:
        """Whether this attempt has a transfer that is not over."""
        return key in self._senders

    def is_using(self, link: LinkId) -> bool:
        """Whether a transfer on this link is not over."""
        return any(sender.link == link for sender in self._senders.values())

    @property
    def links_in_use(self) -> set[LinkId]:
        """Those with a transfer that is not over."""
        return {sender.link for sender in self._senders.values()}

    def num_on(self, link: LinkId) -> int:
        """Transfers on this link that are not over; they share its bandwidth."""
        return self._flows[link].num_transfers if link in self._flows else 0

    @property
    def pending_bytes(self) -> int:
        """KV that is announced and not acknowledged."""
        return sum(sender.pending_bytes for sender in self._senders.values())

    def frames_of(self, key: TransferKey, start: int, stop: int) -> list[Frame]:
        """Return what tokens [start, stop) would send as far as this end knows: nothing of a
        transfer that has ended, or whose link has, nor of tokens that the sink has."""
        sender = self._senders.get(key)
        if sender is None or sender.is_ended or sender.link not in self._flows:
            return []
        rule = sender.flow.rule
        return plan_frames(rule, start, stop, skip=sender.skip_tokens, first_idx=0)

    def statistics(self) -> SenderStatistics:
        """Counts for metrics and tests."""
        return SenderStatistics(
            num_transfers=len(self._senders),
            num_free_slots=len(self._free_slots),
        )

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every slot is free or in flight, exactly once."""
        in_flight = [slot for sender in self._senders.values() for slot in sender.slots_in_use]
        if sorted(in_flight + self._free_slots) != list(range(self._num_slots)):
            raise InvariantViolated(
                f"{self._num_slots} slots != {len(self._free_slots)} free "
                f"+ {len(in_flight)} in flight"
            )
        for sender in self._senders.values():
            if sender.can_send and self._free_slots and self._may_have_slot(sender):
                raise InvariantViolated("a transfer can send and a slot is free, but nothing goes")

    # --- inside ---

    def _local(
        self, key: TransferKey, now: float, event: Callable[[Sender], None]
    ) -> list[SenderEffect]:
        sender = self._senders.get(key)
        # After the end of blocks' use the caller may not have looked yet; nothing is wrong.
        if sender is None or sender.is_ended:
            return []
        event(sender)
        self._settle(sender)
        return self._take(now)

    def _settle(self, sender: Sender) -> None:
        """After any event of a sender: index it, forget it, or let it queue; note its deadline."""
        if sender.is_over:
            if self._senders.pop(sender.key, None) is not None:
                sender.flow.num_transfers -= 1
            self._queue.discard(sender.key)
            if sender.transfer_id is not None:
                self._by_id.pop((sender.link, sender.transfer_id), None)
            return
        if sender.transfer_id is not None:
            self._by_id[sender.link, sender.transfer_id] = sender
        if sender.can_send:
            # Prefixes in a line of their own, as they may wait for more than their link.
            self._queue.add((sender.link, sender.is_prefix), sender)
        deadline_at = sender.deadline_at
        if deadline_at is not None and (
            self.next_tick_at is None or deadline_at < self.next_tick_at
        ):
            self.next_tick_at = deadline_at

    def _may_have_slot(self, sender: Sender) -> bool:
        is_over_prefixes = sender.is_prefix and self._num_prefix_slots >= self._most_prefix_slots
        return not is_over_prefixes and not sender.flow.is_full

    def _take(self, now: float) -> list[SenderEffect]:
        while self._free_slots and (sender := self._queue.take()) is not None:
            if sender.can_send:
                self._num_prefix_slots += sender.is_prefix
                sender.slot_given(self._free_slots.pop(), now)
                self._settle(sender)
        # The list itself stays: all senders append to it.
        effects, self._effects[:] = list(self._effects), []
        return effects
