"""Receives KV: posts receives into staging, verifies, places, and answers.

Every decision is in ``shared/transfer/receivers.py``; who has room is the lease book's
(``LeaseBook``), and links to sources come from ``pairs.py`` (``link.py``). This shell knows no
gateway and no scheduler.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import structlog

from shared.engine.base import Engine
from shared.engine.memory import staging
from shared.engine.worker import ComputeRunner
from shared.errors import EngineFailed, MeshError, TransferFailed
from shared.failpoints import failpoint
from shared.ids import Incarnation, RandomBytes
from shared.runtime.effect_loop import EffectLoop
from shared.runtime.loops import loop_time
from shared.telemetry.moments import Moment, note
from shared.transfer.effects import (
    AskTerms,
    CancelReceive,
    CloseLink,
    EndLeases,
    HandOver,
    PostReceive,
    QuarantineLease,
    ReceiverEffect,
    ReleaseLease,
    ReportFailure,
    SendReply,
    VerifyAndPlace,
)
from shared.transfer.frames import HEADER_BYTES, check_digest, check_header
from shared.transfer.messages import LinkId, Pull, SourceMessage, TransferKey, WindowOffer
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES
from shared.transfer.receivers import Receivers, TagRanges
from shared.transport.base import Operation, Outcome, Transport
from shared.worker.link import PairLink
from shared.worker.slots import ReceiveSlots

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What a lease gives to its transfer. block_table covers num_tokens and does not change until
    the lease is back.

    num_tokens: all tokens whose KV the sequence needs (``len(token_ids)``). skip_tokens: leading
    ones already here. is_prefix: see ``Receiver``.
    """

    num_tokens: int
    skip_tokens: int
    block_table: Sequence[int]
    is_prefix: bool = False


class NoTermsYet(Enum):
    """Why there are no terms; ``KvReceiver.lease_changed`` says when to ask again."""

    NOT_RESERVED = "not reserved"  # the open waits 5 s for it
    NO_ROOM = "no room"  # the open waits as long as its reservation does


class LeaseBook(Protocol):
    """What the receiver asks of the lease side. All calls come on the loop and return at once.

    From ``attach`` returning terms until exactly one of ``placed`` or ``release``, the lease's
    blocks belong to the transfer: nobody frees them. So whoever cancels such a request calls
    ``KvReceiver.abort(key, ...)`` and waits for ``release``.
    """

    def attach(self, key: TransferKey, source: Incarnation) -> LeaseTerms | NoTermsYet:
        """The source opened this transfer. Return the terms, once per lease.

        Raises MeshError: refuse (not reserved for that source, already attached,
        cancelled).
        """
        ...

    def source_lost(self, source: Incarnation, error: MeshError) -> None:
        """No pair with this source is left: leases of it that are not attached fail now.
        The others were reported by ``failed``."""
        ...

    def placed(self, receive: HandOver) -> None:
        """All KV is verified and in the blocks: the sequence may join the batch. The blocks are
        the lease's again."""
        ...

    def failed(self, key: TransferKey, error: MeshError) -> None:
        """The transfer failed, not by ``KvReceiver.abort``. The blocks are NOT free yet:
        ``release`` follows."""
        ...

    def quarantined(self, key: TransferKey) -> None:
        """For accounting: the transfer ended badly and the transport may still touch things;
        ``release`` follows."""
        ...

    def release(self, key: TransferKey) -> None:
        """Nothing touches the blocks any more. Also called after a clean end without the sink (no
        ``failed`` before): then the lease simply goes. May be called before ``KvReceiver.abort``
        returns."""
        ...


class KvReceiver:
    """All transfers into this sink; its ``PairTable`` tells it of links that come in. One per
    process; ``run`` owns every task. tags: canaries take theirs from where transfers do."""

    def __init__(
        self,
        *,
        engine: Engine,
        compute: ComputeRunner,
        transport: Transport,
        leases: LeaseBook,
        random_bytes: RandomBytes,
        num_slots: int = 16,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        """``open`` allocates ``num_slots`` staging slots of ``max_frame_bytes`` (slots.py)."""
        self._engine = engine
        self._compute = compute
        self._transport = transport
        self._leases = leases
        self._slots = ReceiveSlots(
            engine, compute, transport, num_slots, max_frame_bytes, random_bytes
        )
        self.tags = TagRanges(random_bytes)
        self.core = Receivers(num_slots=num_slots, tags=self.tags, random_bytes=random_bytes)
        self._links: dict[LinkId, PairLink] = {}
        self._block_tables: dict[TransferKey, Sequence[int]] = {}
        self._receives: dict[tuple[TransferKey, int], Operation] = {}
        self._withdrawn: set[Operation] = set()  # the source will never send these frames
        self._effects: EffectLoop[ReceiverEffect] = EffectLoop(self.core, self._do)

    async def open(self) -> None:
        """Make the staging slots. Before ``run``, and before anybody hears of this worker: a pair
        that comes earlier is refused, and tried again only after a pause."""
        await self._slots.open()

    def close(self) -> None:
        """Let go of the staging slots, so that the transport can end; after the pairs' end."""
        self._slots.close()

    async def run(self) -> None:
        """Work until cancelled. Then nothing new starts; the pairs close what there is."""
        await self._effects.run()

    def lease_changed(self, key: TransferKey) -> None:
        """The lease side has made or granted this reservation: if an open waits, ``attach``
        follows."""
        self._effects.perform(self.core.lease_changed(key, loop_time()))

    def abort(self, key: TransferKey, error: MeshError) -> None:
        """Give one transfer up: cancelled, deadline... ``release`` follows, maybe before this
        returns.

        No transfer has that key: nothing follows, but its open is refused, also if it comes later.
        """
        self._effects.perform(self.core.give_up(key, error, loop_time()))

    def is_linked(self, source: Incarnation) -> bool:
        """Whether this source can push to us now."""
        return any(link.peer == source for link in self._links.values())

    def pull(self, source: Incarnation, pull: Pull) -> None:
        """Ask a source for what it has in its cache; its open follows. On a link that is lost it
        goes nowhere."""
        link = next((link for link in self._links.values() if link.peer == source), None)
        if link is not None:
            link.reply(pull)

    def lane_from(self, source: Incarnation) -> str:
        """What carries KV from this source; '' if there is no pair with it now."""
        lanes = (link.lane_in for link in self._links.values() if link.peer == source)
        return next(lanes, "")

    # --- events of the links ------------------------------------------------------------------

    @property
    def windows(self) -> tuple[list[WindowOffer], object]:
        """Staging that a source may write, as it is now; and what keeps it so while held."""
        return self._slots.offers, self._slots.memory

    def link_up(self, link: PairLink) -> None:
        self._links[link.id] = link
        link.offer([offer for offer in self._slots.offers if offer not in link.offered])
        self.core.link_up(link.id, link.peer, link.rule)

    def link_message(self, link: PairLink, message: SourceMessage) -> None:
        self._effects.perform(self.core.message(link.id, message, loop_time()))

    def is_using(self, link: PairLink) -> bool:
        return self.core.is_using(link.id)

    def link_lost(self, link: PairLink, error: MeshError) -> None:
        del self._links[link.id]
        self._effects.perform(self.core.link_lost(link.id, error, loop_time()))

    # --- performing effects ---------------------------------------------------------------------

    def _do(self, effect: ReceiverEffect) -> None:
        match effect:
            case SendReply(link=link_id, message=message):
                if (link := self._links.get(link_id)) is not None:
                    link.reply(message)
            case PostReceive():
                self._post(effect)
            case CancelReceive(key=key, frame_idx=frame_idx):
                # It may have settled since this was ordered.
                if (operation := self._receives.get((key, frame_idx))) is not None:
                    self._withdrawn.add(operation)
                    operation.cancel()
            case VerifyAndPlace(key=key):
                self._spawn(self._place(effect, self._block_tables[key]))
            case AskTerms(key=key, source=source):
                if self.core.is_waiting(key):  # since it was ordered the open may have ended
                    self._attach(key, source)
            case HandOver(key=key):
                del self._block_tables[key]
                self._leases.placed(effect)
            case ReportFailure(key=key, error=error):
                self._leases.failed(key, error)
            case QuarantineLease(key=key):
                self._leases.quarantined(key)
            case ReleaseLease(key=key):
                del self._block_tables[key]
                self._leases.release(key)
            case EndLeases(source=source, error=error):
                self._leases.source_lost(source, error)
            case CloseLink(link=link_id, reason=reason):
                if (link := self._links.get(link_id)) is not None:
                    link.close(reason)

    def _attach(self, key: TransferKey, source: Incarnation) -> None:
        try:
            terms = self._leases.attach(key, source)
        except MeshError as error:
            self._effects.perform(self.core.refused(key, error, loop_time()))
            return
        if isinstance(terms, NoTermsYet):
            is_reserved = terms is NoTermsYet.NO_ROOM
            self.core.must_wait(key, loop_time(), is_reserved=is_reserved)
            return
        self._block_tables[key] = terms.block_table
        note(Moment.OPENED, key.request_id, cached_tokens=terms.skip_tokens)
        self._effects.perform(
            self.core.attached(
                key,
                terms.num_tokens,
                terms.skip_tokens,
                loop_time(),
                is_prefix=terms.is_prefix,
            )
        )

    def _post(self, order: PostReceive) -> None:
        link = self._links[order.link]
        peer_writes = bool(link.offered)
        num_bytes = HEADER_BYTES if peer_writes else order.frame.num_bytes
        operation = self._transport.receive(
            link.endpoint, self._slots[order.slot], num_bytes, order.tag
        )
        self._receives[order.key, order.frame.idx] = operation
        note(Moment.FRAME_POSTED, order.key.request_id, frame_idx=order.frame.idx)
        self._spawn(self._wait_receive(order, operation, peer_writes=peer_writes))

    async def _wait_receive(
        self, order: PostReceive, operation: Operation, *, peer_writes: bool
    ) -> None:
        outcome = await operation.settled()
        del self._receives[order.key, order.frame.idx]
        is_withdrawn = operation in self._withdrawn
        self._withdrawn.discard(operation)
        error = None
        if outcome is not Outcome.DONE:
            why = operation.error or outcome.value
            error = TransferFailed(f"a frame did not arrive: {why}", code="receive")
        # Lost before its word came, a writer may have stopped amid the frame, and may go on.
        is_open_to_writes = peer_writes and outcome is not Outcome.DONE and not is_withdrawn
        if is_open_to_writes or outcome is Outcome.ABANDONED:
            is_abandoned = outcome is Outcome.ABANDONED
            offer = await self._slots.replace(order.slot, is_abandoned=is_abandoned)
            for link in self._links.values():
                link.offer([] if offer is None else [offer])
        self._effects.perform(
            self.core.receive_settled(order.key, order.frame.idx, error, loop_time())
        )

    async def _place(self, order: VerifyAndPlace, block_table: Sequence[int]) -> None:
        """Verify before a single byte reaches the pool; ends with exactly one ``frame_placed``."""
        frame, buffer = order.frame, self._slots[order.slot]

        def place() -> None:
            expected = check_header(
                staging.read_header(buffer),
                transfer_id=order.transfer_id,
                epoch=order.epoch,
                frame_idx=frame.idx,
                payload_bytes=frame.payload_bytes,
            )
            payload = staging.payload(buffer, frame.payload_bytes)
            if expected is not None:
                check_digest(expected, staging.digest(payload))
            self._engine.scatter(
                block_table, frame.start, frame.stop, frame.first_layer, frame.last_layer, payload
            )

        error: MeshError | None = None
        try:
            await self._compute.copy(place)
        except EngineFailed:
            raise  # the device is gone: so is this process
        except MeshError as failure:
            _log.warning("frame refused", code=failure.code, error=failure.message)
            error = failure.with_traceback(None)  # its frames keep it, and buffers
        if error is None:
            note(Moment.FRAME_PLACED, order.key.request_id, frame_idx=frame.idx)
        failpoint("decode.mid_push")
        self._effects.perform(self.core.frame_placed(order.key, frame.idx, error, loop_time()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if (tasks := self._effects.tasks) is None:
            work.close()  # shutting down: the endpoints are closed next, nobody waits for slots
        else:
            tasks.create_task(work)
