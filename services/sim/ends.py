"""Both ends of one worker's transfers, and what it fetches from other workers' caches: what the
shells of ``shared/worker`` perform, on an event heap."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from services.sim.clock import counted_bytes
from services.sim.orders import SimJob, WorkerSize
from shared.errors import DeadlinePassed, InvariantViolated, MeshError, TransferFailed
from shared.ids import Incarnation, StreamId
from shared.kv.layout import KvLayout
from shared.kv.pool import BlockTable
from shared.schedule.plan import StepPlan
from shared.transfer import effects as transfer
from shared.transfer.effects import ReceiverEffect, SenderEffect
from shared.transfer.messages import LinkId, Pull, SinkMessage, SourceMessage, TransferKey
from shared.transfer.orders import Order
from shared.transfer.plan import FrameRule, PushMode
from shared.transfer.receivers import Receivers, TagRanges
from shared.transfer.senders import Senders
from shared.worker.core.lease import LeaseState
from shared.worker.core.life import LifeEvent, Task
from shared.worker.core.prefixes import ComingPrefixes, PrefixFetch

if TYPE_CHECKING:
    from services.sim.worker import CoreWorker

AT_ONCE_BYTES_S = 1e18
"""Reported of a link on which a frame takes no time."""


class StagedFrame(NamedTuple):
    """A frame in a staging slot of the sink."""

    order: transfer.GatherAndSend
    payload: object


class KvEnds:
    """One worker's senders and receivers, its links, and its fetches."""

    def __init__(self, worker: CoreWorker, layout: KvLayout, size: WorkerSize) -> None:
        self._worker = worker
        self._clock = worker.clock
        self._layout = layout
        random_bytes = counted_bytes(worker.incarnation)
        self.senders = Senders(num_slots=size.num_slots)
        self.receivers = Receivers(
            num_slots=size.num_slots,
            tags=TagRanges(random_bytes),
            random_bytes=random_bytes,
            window=size.num_slots // 2,
        )
        # By default a frame has one layer: of a simulated model a group of them (``LAYER_GROUPS``).
        self._rule = FrameRule(
            layout=layout, group_bytes=size.group_bytes, max_frame_bytes=size.frame_bytes
        )
        self._link_bytes_s = size.link_bytes_s
        self._byte_s = 1 / size.link_bytes_s if size.link_bytes_s else 0.0
        self._link_free_at = 0.0
        self._link_s = self._clock.wire_s if size.link_s is None else size.link_s
        self.num_frames_sent = 0
        self._sinks: dict[Incarnation, LinkId] = {}
        self.sinks: frozenset[Incarnation] = frozenset()
        """Whom it may push to; the same object until it changes."""
        self._others: dict[LinkId, CoreWorker] = {}
        self._receives: dict[tuple[LinkId, int], transfer.PostReceive] = {}
        self._landed: dict[int, StagedFrame] = {}
        self._todo: deque[SenderEffect | ReceiverEffect] = deque()
        self._is_performing = False
        self._pulled: dict[TransferKey, BlockTable] = {}
        self._bringing: dict[TransferKey, PrefixFetch[SimJob]] = {}
        self._fetches = ComingPrefixes[SimJob](
            worker.scheduler,
            random_bytes,
            is_linked=self._sinks.__contains__,
            start=self._start_fetch,
            give_up=lambda fetch: worker.cancel(fetch.pull.key, Task.PREFIX),
        )

    # --- pairs ------------------------------------------------------------------------------------

    def pair(self, sink: CoreWorker, link: LinkId) -> None:
        """From now on this worker may push to that one."""
        self._sinks[sink.incarnation] = link
        self.sinks = frozenset(self._sinks)
        self._others[link] = sink
        sink.ends._others[link] = self._worker
        self.senders.link_up(link, self._rule)
        sink.ends.receivers.link_up(link, self._worker.incarnation, self._rule)

    @property
    def speeds(self) -> dict[Incarnation, float]:
        """Of each whom it may push to, bytes a second of one more push, beside those on their
        way."""
        found = dict.fromkeys(self.sinks, self._link_bytes_s or AT_ONCE_BYTES_S)
        if self._link_bytes_s:
            for link in self.senders.links_in_use:  # of dozens one or two
                sink = self._others[link].incarnation if link in self._others else None
                if sink is not None and self._sinks.get(sink) == link:
                    found[sink] = self._link_bytes_s / (1 + self.senders.num_on(link))
        return found

    def lose(self, other: CoreWorker, error: MeshError) -> None:
        """The other end of every pair with it is gone, and nothing is under way any more."""
        now = self._clock.now
        self._sinks.pop(other.incarnation, None)
        self.sinks = frozenset(self._sinks)
        for link in [link for link, it in self._others.items() if it is other]:
            del self._others[link]
            self.do(self.senders.link_lost(link, error, now))
            self.do(self.receivers.link_lost(link, error, now))
            for key in [key for key in self._receives if key[0] == link]:
                self._settle_receive(self._receives.pop(key), TransferFailed("endpoint closed"))

    # --- what the worker's steps tell -------------------------------------------------------------

    def begin(self, key: TransferKey, peer: Incarnation, num_tokens: int) -> None:
        self.do(self.senders.begin(key, self._sinks[peer], num_tokens, self._clock.now))

    def announce(self, plan: StepPlan) -> list[TransferKey]:
        """Tell the sinks what a step computes of their prompts; returns whose these are."""
        pushes: list[TransferKey] = []
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            job = self._worker.jobs_of[sequence]
            order = job.order
            if job.life.task is not Task.PROMPT or order.peer is None:
                continue
            pushes.append(order.key)
            if 0 < row.start == sequence.num_cached_tokens:  # its first row
                self._plan_span(order.key, 0, row.start, is_cached=True)
            self._plan_span(order.key, row.start, row.stop, is_cached=False)
        return pushes

    def _plan_span(self, key: TransferKey, start: int, stop: int, *, is_cached: bool) -> None:
        mode, now = PushMode.LAYERWISE, self._clock.now
        self.do(self.senders.span_planned(key, start, stop, mode, now, is_cached=is_cached))

    def layers_ready(self, pushes: list[TransferKey], num_layers: int) -> None:
        """So many layers of the running step are computed."""
        if self._worker.is_alive:
            for key in pushes:
                self.do(self.senders.layers_ready(key, num_layers, self._clock.now))

    def computed(self, pushes: list[TransferKey]) -> None:
        for key in pushes:
            self.do(self.senders.span_computed(key, self._clock.now))

    def commit(self, key: TransferKey, first_token: int) -> None:
        self.do(self.senders.commit(key, first_token, self._clock.now))

    # --- transfers --------------------------------------------------------------------------------

    def do(self, effects: list[SenderEffect] | list[ReceiverEffect]) -> None:
        """Perform effects in order, those that follow from them after them."""
        self._todo += effects
        if self._is_performing:
            return
        self._is_performing = True
        while self._todo:
            self._do(self._todo.popleft())
        self._is_performing = False

    def _do(self, effect: SenderEffect | ReceiverEffect) -> None:
        now, worker = self._clock.now, self._worker
        match effect:
            case transfer.SendMessage(link, message) | transfer.SendReply(link, message):
                self._clock.after(self._link_s, lambda: self._deliver(link, message))
            case transfer.GatherAndSend():
                self._send(effect)
            case transfer.EndTransfer(key, error):
                self._sent(key, error)
            case transfer.AskTerms(key, source):
                self._attach(key, source)
            case transfer.PostReceive(link=link, tag=tag):
                self._receives[link, tag] = effect
            case transfer.CancelReceive(key, frame_idx):
                for place, order in list(self._receives.items()):
                    if (order.key, order.frame.idx) == (key, frame_idx):
                        self._settle_receive(self._receives.pop(place), TransferFailed("cancelled"))
            case transfer.VerifyAndPlace():
                self._place(effect)
            case transfer.HandOver(key, first_token, num_bytes, num_tokens=num_tokens):
                self._hand_over(worker.taker(key), first_token, num_tokens, num_bytes)
            case transfer.ReportFailure(key, error):
                worker.catch_up()
                job = worker.taker(key)
                # The receiver aborts by itself: the effect that would ask it to is dropped.
                worker.leases.cancel(job.its_lease, error, now=now)
                worker.handle(job, LifeEvent.FAILED, error)
            case transfer.QuarantineLease(key):
                worker.leases.begin_quarantine(worker.taker(key).its_lease)
            case transfer.ReleaseLease(key):
                worker.release(worker.taker(key))
            case transfer.EndLeases(source, error):
                worker.catch_up()
                worker.do_leases(worker.leases.lose_source(source, error, now=now))
            case transfer.CloseLink(reason=reason):
                raise InvariantViolated(f"a pair was given up: {reason}")

    def _deliver(self, link: LinkId, message: SourceMessage | SinkMessage | Pull) -> None:
        other = self._others.get(link)
        if other is None or not other.is_alive or not self._worker.is_alive:
            return
        ends, now = other.ends, self._clock.now
        if isinstance(message, Pull):
            ends._be_pulled(link, message)
        # A link is for one direction (``pair``): on one to a sink of ours we are the source.
        elif link in self._sinks.values():
            ends.do(ends.receivers.message(link, message, now))  # type: ignore[arg-type]
        else:
            ends.do(ends.senders.message(link, message, now))  # type: ignore[arg-type]

    def _send(self, order: transfer.GatherAndSend) -> None:
        """Read the blocks now, and let the frame land later; a frame to nobody fails."""
        frame, engine = order.frame, self._worker.engine
        layers = (frame.first_layer, frame.last_layer)
        table = self._pulled.get(order.key)
        blocks = self._prompt_blocks(order.key) if table is None else table.blocks
        payload = engine.read(blocks, frame.start, frame.stop, layers)
        self.num_frames_sent += 1

        def land() -> None:
            other = self._others.get(order.link)
            error = None
            if other is None or not other.is_alive:
                error = TransferFailed("endpoint closed")
            elif (receive := other.ends._receives.pop((order.link, order.tag), None)) is not None:
                other.ends._landed[receive.slot] = StagedFrame(order, payload)
                other.ends._settle_receive(receive, None)
            if self._worker.is_alive:
                now = self._clock.now
                self.do(self.senders.send_settled(order.key, frame.idx, error, now))

        begins_at = max(self._clock.now, self._link_free_at)
        self._link_free_at = begins_at + frame.payload_bytes * self._byte_s
        self._clock.at(self._link_free_at + self._link_s, land)

    def _prompt_blocks(self, key: TransferKey) -> array[int]:
        sequence = self._worker.jobs[key, Task.PROMPT].sequence
        assert sequence is not None
        return sequence.block_table

    def _settle_receive(self, order: transfer.PostReceive, error: MeshError | None) -> None:
        now = self._clock.now
        self.do(self.receivers.receive_settled(order.key, order.frame.idx, error, now))

    def _sent(self, key: TransferKey, error: MeshError | None) -> None:
        table = self._pulled.pop(key, None)
        if table is None:
            job = self._worker.jobs[key, Task.PROMPT]
            self._worker.handle(job, LifeEvent.FAILED if error else LifeEvent.PUSHED, error)
            self._worker.handle(job, LifeEvent.SETTLED)
        else:
            self._worker.catch_up()
            self._worker.pool.release(table)
            self._worker.blocks_freed()

    def _attach(self, key: TransferKey, source: Incarnation) -> None:
        now = self._clock.now
        if not self.receivers.is_waiting(key):
            return
        job = self._worker.jobs.get((key, Task.ANSWER))
        if job is None or job.lease is None:
            self.receivers.must_wait(key, now, is_reserved=False)
        elif not self._worker.leases.open(job.lease, source):
            self.receivers.must_wait(key, now, is_reserved=True)
        else:
            lease, is_prefix = job.lease, job.life.task is Task.PREFIX
            num, skip = lease.num_tokens, lease.skip_tokens
            self.do(self.receivers.attached(key, num, skip, now, is_prefix=is_prefix))

    def _place(self, order: transfer.VerifyAndPlace) -> None:
        lease, frame = self._worker.taker(order.key).its_lease, order.frame
        staged = self._landed.pop(order.slot)
        sent = staged.order
        error = None
        if (sent.transfer_id, sent.epoch, sent.frame) != (order.transfer_id, order.epoch, frame):
            error = TransferFailed("another frame stands in the slot")
        else:
            layers = (frame.first_layer, frame.last_layer)
            table = lease.block_table
            self._worker.engine.write(table, frame.start, frame.stop, layers, staged.payload)
        self.do(self.receivers.frame_placed(order.key, frame.idx, error, self._clock.now))

    def _hand_over(self, job: SimJob, first_token: int, num_tokens: int, num_bytes: int) -> None:
        worker, lease = self._worker, job.its_lease
        if lease.state is not LeaseState.OPEN:
            worker.release(job)  # cancelled in the same instant
        elif job.life.task is Task.PREFIX:
            worker.catch_up()
            cached = lease.skip_tokens
            effects = worker.leases.keep(lease, num_tokens, now=self._clock.now)
            # Before its life ends, which would end the fetch with nothing (``CoreWorker._close``).
            self.fetch_ended(job.order.key, max(0, num_tokens - cached), num_bytes)
            worker.handle(job, LifeEvent.KEPT)
            worker.do_leases(effects)
        else:
            worker.join(job, first_token)

    # --- prefixes from other workers' caches ------------------------------------------------------

    def await_prefix(self, prompt: SimJob) -> None:
        """See ``ComingPrefixes.begin``."""
        self._fetches.begin(prompt, self._clock.now)

    def leave_prefix(self, prompt: SimJob) -> None:
        """See ``ComingPrefixes.leave``."""
        if prompt.prefix is not None:
            self._fetches.leave(prompt)

    def _start_fetch(self, fetch: PrefixFetch[SimJob]) -> None:
        key = fetch.pull.key
        self._bringing[key] = fetch
        # It waits for no room (``wait_s``): what has none now is computed.
        order = Order(StreamId(0), key, fetch.item, fetch.source)
        self._worker.take(Task.PREFIX, order)
        self._clock.after(fetch.wait_s, lambda: self._fetch_is_late(key))

    def prefix_granted(self, key: TransferKey) -> None:
        """There is room for it: ask its source."""
        fetch = self._bringing.get(key)
        link = None if fetch is None else self._sinks.get(fetch.source)
        if fetch is not None and link is not None:
            # The words of a pair go over one connection, whichever way KV flows.
            self._clock.after(self._link_s, lambda: self._deliver(link, fetch.pull))

    def _be_pulled(self, link: LinkId, pull: Pull) -> None:
        """Send what there is of it, if only the word that there is nothing."""
        worker, now = self._worker, self._clock.now
        worker.catch_up()
        table = worker.pool.pin(worker.pool.new_chain(pull.salt), pull.token_ids)
        sink = self._others[link]
        back = self._sinks.get(sink.incarnation)
        if back is None:
            worker.pool.release(table)
            return
        self._pulled[pull.key] = table
        num_tokens = len(pull.token_ids)
        self.do(self.senders.begin(pull.key, back, num_tokens, now, is_prefix=True))
        if table.num_hit_tokens:
            self._plan_span(pull.key, 0, table.num_hit_tokens, is_cached=True)
            self.commit(pull.key, 0)
        else:
            self.do(self.senders.give_up(pull.key, None, now))

    def _fetch_is_late(self, key: TransferKey) -> None:
        job = self._worker.jobs.get((key, Task.ANSWER))
        if job is not None and self._worker.is_alive:
            error = DeadlinePassed("the deadline passed during a fetch")
            self._worker.handle(job, LifeEvent.FAILED, error)

    def fetch_ended(self, key: TransferKey, num_tokens: int = 0, num_bytes: int = 0) -> None:
        """It is here, or no more will come: its prompts wait no longer."""
        fetch = self._bringing.pop(key, None)
        if fetch is not None and self._fetches.ended(fetch, self._clock.now, num_tokens, num_bytes):
            self._worker.wake()

    # --- looking at it ----------------------------------------------------------------------------

    def tables(self) -> list[BlockTable]:
        """Every block table that is held for others who fetch."""
        return list(self._pulled.values())

    def check(self) -> None:
        self.senders.check_integrity()
        self.receivers.check_integrity()
