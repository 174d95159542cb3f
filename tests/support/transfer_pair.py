"""Both ends of a pair with a hostile wire between them, in memory: what tests and fuzzers drive.

    pair = TransferPair(...)
    pair.begin(key, num_tokens=9, hit=2)      # the step loop's side
    pair.reserve(key, num_tokens=9, skip=0)   # the lease side's side
    while choices := pair.choices():          # everything that could happen next
        pair.perform(pick(choices))           # who picks, is the adversary

The wire keeps the contract of ``shared/transport/base.py`` and nothing more: control messages keep
their order among themselves and may be repeated, but data, completions and copies happen in any
order; a receive that was cancelled may still be written until it settles. Memory is modelled token
by token: each KV cell holds (request, token, layer), blocks and slots are reused at once, and the
pair raises InvariantViolated the moment anybody would read a cell that is not its own.

Pure: no randomness and no clock of its own.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from shared.errors import (
    InvariantViolated,
    LocalProtocolError,
    MeshError,
    TransferFailed,
    WorkerLost,
)
from shared.ids import Incarnation, RandomBytes
from shared.kv.layout import KvLayout
from shared.transfer.effects import (
    AskTerms,
    CancelReceive,
    CloseLink,
    EndLeases,
    EndTransfer,
    GatherAndSend,
    HandOver,
    PostReceive,
    QuarantineLease,
    ReceiverEffect,
    ReleaseLease,
    ReportFailure,
    SenderEffect,
    SendMessage,
    SendReply,
    VerifyAndPlace,
)
from shared.transfer.messages import LinkId, SinkMessage, SourceMessage, TransferKey
from shared.transfer.plan import FrameRule, PushMode
from shared.transfer.receivers import Receivers, TagRanges
from shared.transfer.senders import Senders
from tests.support.transfer_pair_memory import CellPool, Job, Receive, Send, SlotBytes

Choice: TypeAlias = tuple[str, *tuple[object, ...]]
"""A thing that may happen next: its name, then what it happens to."""


class TransferPair:
    """One source and one sink process with one pair, and everything between them."""

    def __init__(
        self,
        *,
        random_bytes: RandomBytes,
        layout: KvLayout,
        group_bytes: int,
        max_frame_bytes: int,
        prefill_blocks: int,
        decode_blocks: int,
        block_size: int,
        send_slots: int,
        receive_slots: int,
        window: int = 2,
        chunk: int = 4,
        has_windows: bool = False,
    ) -> None:
        """has_windows: the source gathers into the sink's slots, and only its word travels."""
        self._layout = layout
        self._has_windows = has_windows
        self._rule = FrameRule(
            layout=layout, group_bytes=group_bytes, max_frame_bytes=max_frame_bytes
        )
        self._chunk = chunk
        self.now = 0.0
        self.senders = Senders(num_slots=send_slots)
        self.receivers = Receivers(
            num_slots=receive_slots,
            tags=TagRanges(random_bytes),
            random_bytes=random_bytes,
            window=window,
        )
        self.prefill_pool = CellPool(prefill_blocks, block_size, layout.num_layers)
        self.decode_pool = CellPool(decode_blocks, block_size, layout.num_layers)
        self.jobs: dict[TransferKey, Job] = {}
        self.num_handed_over = 0
        self.num_refused_frames = 0
        self._send_slots: list[SlotBytes | None] = [None] * send_slots
        self._memory_of = list(range(receive_slots))  # the sink's slots -> memory
        self._receive_memory: dict[int, SlotBytes | None] = {}
        self._sends: dict[int, Send] = {}
        self._receives: dict[int, Receive] = {}
        self._placements: dict[int, tuple[VerifyAndPlace, list[int], MeshError | None, bool]] = {}
        self._num_placements = 0
        self._num_memories = receive_slots
        self._commands: deque[tuple[LinkId, SourceMessage]] = deque()
        self._replies: deque[tuple[LinkId, SinkMessage]] = deque()
        self._is_prefill_up = False
        self._is_decode_up = False
        self._link = LinkId(0)
        self.connect()

    @property
    def is_quiet(self) -> bool:
        """Whether no operation of either endpoint is in flight."""
        return not self._sends and not self._receives

    # --- what the driver does -------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether both ends have a live link."""
        return self._is_prefill_up and self._is_decode_up

    def connect(self) -> None:
        """Pair up (again): a new link; what the old one carried has ended."""
        if self._sends or self._receives:
            raise LocalProtocolError("a new pair needs the old one's endpoints closed")
        self._link = LinkId(self._link + 1)
        self._commands.clear()
        self._replies.clear()
        self.senders.link_up(self._link, self._rule)
        self.receivers.link_up(self._link, Incarnation(1), self._rule)
        self._is_prefill_up = self._is_decode_up = True

    def begin(self, key: TransferKey, num_tokens: int, hit: int) -> bool:
        """Start a request at the source, ``hit`` tokens of it from its cache; False: no room."""
        table = self.prefill_pool.take(num_tokens)
        if table is None or not self._is_prefill_up:
            if table is not None:
                self.prefill_pool.give_back(table)
            return False
        job = self.jobs.setdefault(key, Job(num_tokens))
        job.prefill_table, job.hit = table, hit
        for token in range(num_tokens):
            for layer in range(self._layout.num_layers):
                cell = (key, token, layer) if token < hit else None
                self.prefill_pool.write(table, token, layer, cell)
        self._do_all(self.senders.begin(key, self._link, num_tokens, self.now))
        return True

    def reserve(self, key: TransferKey, num_tokens: int, skip: int) -> bool:
        """Reserve room on the sink, the first ``skip`` tokens from its cache; False: no room."""
        table = self.decode_pool.take(num_tokens)
        if table is None:
            return False
        job = self.jobs.setdefault(key, Job(num_tokens))
        job.decode_table, job.skip, job.is_reserved = table, skip, True
        for token in range(num_tokens):
            for layer in range(self._layout.num_layers):
                # What the last owner left behind stays, as in a real pool.
                if token < skip:
                    self.decode_pool.write(table, token, layer, (key, token, layer))
        self._do_all(self.receivers.lease_changed(key, self.now))
        return True

    def finish(self, key: TransferKey) -> None:
        """The sequence that the sink runs has ended: check its KV for the last time, free it."""
        job = self.jobs[key]
        assert job.decode_table is not None
        self._require_own_kv(key)
        self.decode_pool.give_back(job.decode_table)
        job.decode_table = None

    def abort_prefill(self, key: TransferKey, error: MeshError | None) -> None:
        """The source's step loop gives the request up."""
        self._do_all(self.senders.give_up(key, error, self.now))

    def abort_decode(self, key: TransferKey) -> None:
        """The lease side gives the request up."""
        job = self.jobs[key]
        if job.is_reserved:
            self._end_unattached(job)
        elif self.receivers.is_live(key):
            gone = TransferFailed("cancelled by the lease side")
            self._do_all(self.receivers.give_up(key, gone, self.now))

    def lose_link(self, *, prefill_sees: bool, decode_sees: bool) -> None:
        """The stream breaks; each end may see it at its own time. Both must see it in the end."""
        if prefill_sees and self._is_prefill_up:
            self._is_prefill_up = False
            lost = WorkerLost("the pair is gone")
            self._do_all(self.senders.link_lost(self._link, lost, self.now))
            self._replies.clear()
        if decode_sees and self._is_decode_up:
            self._is_decode_up = False
            lost = WorkerLost("the pair is gone")
            self._do_all(self.receivers.link_lost(self._link, lost, self.now))
            self._commands.clear()

    # --- what may happen ------------------------------------------------------------------------

    def choices(self) -> list[Choice]:
        """Everything that could happen next without anybody's will, but for the clock."""
        found: list[Choice] = []
        if self._commands and self._is_decode_up:
            found.append(("command",))
        if self._replies and self._is_prefill_up:
            found.append(("reply",))
        found += [("compute", key) for key, job in self.jobs.items() if self._can_compute(key, job)]
        for tag, send in self._sends.items():
            receive = self._receives.get(tag)
            if not send.is_gathered:
                found.append(("gather", tag))
            elif send.has_left:
                found.append(("send_settled", tag))
            elif receive is not None and not receive.has_landed:
                found.append(("land", tag))
                if not self._is_prefill_up:
                    found.append(("send_failed", tag))
            elif not self._is_prefill_up:
                found.append(("send_failed", tag))
            elif receive is None:
                found.append(("sink", tag))  # its receive is gone: the transport drops it
        for tag, receive in self._receives.items():
            if receive.has_landed:
                found.append(("receive_settled", tag))
            elif receive.is_cancelled or not self._is_decode_up:
                found.append(("receive_cancelled", tag))
        found += [("verify", idx) for idx, p in self._placements.items() if not p[3]]
        found += [("place", idx) for idx, p in self._placements.items() if p[3]]
        return found

    def perform(self, choice: Choice) -> None:
        """Let one of ``choices`` happen."""
        match choice:
            case ("command",):
                self._hear_command(*self._commands.popleft())
            case ("reply",):
                link, reply = self._replies.popleft()
                self._do_all(self.senders.message(link, reply, self.now))
            case ("compute", key) if isinstance(key, TransferKey):
                self._compute(key, self.jobs[key])
            case ("gather", int(tag)):
                self._gather(self._sends[tag])
            case ("land", int(tag)):
                send, receive = self._sends[tag], self._receives[tag]
                if not self._has_windows:
                    memory = self._memory_of[receive.order.slot]
                    self._receive_memory[memory] = self._send_slots[send.order.slot]
                send.has_left = receive.has_landed = True
            case ("sink", int(tag)):
                self._sends[tag].has_left = True
            case ("send_settled" | "send_failed" as how, int(tag)):
                order = self._sends.pop(tag).order
                error = None if how == "send_settled" else TransferFailed("endpoint closed")
                self._do_all(self.senders.send_settled(order.key, order.frame.idx, error, self.now))
            case ("receive_settled" | "receive_cancelled" as how, int(tag)):
                is_cancelled = (receive := self._receives.pop(tag)).is_cancelled
                order = receive.order
                if self._has_windows and how == "receive_cancelled" and not is_cancelled:
                    # No word came: the source may write yet, so the slot gets new memory.
                    self._num_memories += 1
                    self._memory_of[order.slot] = self._num_memories
                error = None if how == "receive_settled" else TransferFailed("cancelled")
                self._do_all(
                    self.receivers.receive_settled(order.key, order.frame.idx, error, self.now)
                )
            case ("verify", int(idx)):
                order, table, _, _ = self._placements[idx]
                self._placements[idx] = (order, table, self._verify(order), True)
            case ("place", int(idx)):
                self._place(*self._placements.pop(idx)[:3])
            case _:
                raise InvariantViolated(f"no such choice: {choice}")

    def repeat_command(self) -> None:
        """Deliver the next command without taking it off the wire: it comes again."""
        if self._commands and self._is_decode_up:
            self._hear_command(*self._commands[0])

    def repeat_reply(self) -> None:
        """Deliver the next reply without taking it off the wire: it comes again."""
        if self._replies and self._is_prefill_up:
            self._do_all(self.senders.message(*self._replies[0], self.now))

    def corrupt_slot(self) -> bool:
        """Flip a cell in a landed frame that is not verified yet; False: there is none."""
        for receive in self._receives.values():
            memory = self._memory_of[receive.order.slot]
            held = self._receive_memory.get(memory)
            if receive.has_landed and held is not None and held.cells:
                cells = (None, *held.cells[1:])
                self._receive_memory[memory] = held._replace(cells=cells)
                return True
        return False

    def let_time_pass(self) -> None:
        """Move the clock to the next deadline of either end."""
        deadlines = (self.senders.next_tick_at, self.receivers.next_tick_at)
        self.now = max([self.now, *(at for at in deadlines if at is not None)])
        self._do_all(self.senders.tick(self.now))
        self._do_all(self.receivers.tick(self.now))

    # --- what must hold -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantViolated unless slots are accounted for and running KV is its own."""
        self.senders.check_integrity()
        self.receivers.check_integrity()
        for key, job in self.jobs.items():
            if len(job.prefill_end) > 1 or len(job.decode_end) > 1:
                raise InvariantViolated("a transfer ended twice")
            if job.decode_end == ["handed over"] and job.decode_table is not None:
                self._require_own_kv(key)

    def _require_own_kv(self, key: TransferKey) -> None:
        job = self.jobs[key]
        assert job.decode_table is not None
        for token in range(job.num_tokens):
            for layer in range(self._layout.num_layers):
                cell = self.decode_pool.read(job.decode_table, token, layer)
                if cell != (key, token, layer):
                    raise InvariantViolated(f"foreign KV: {key} reads {cell} at {token}, {layer}")

    # --- inside ---------------------------------------------------------------------------------

    def _can_compute(self, key: TransferKey, job: Job) -> bool:
        return job.prefill_table is not None and not job.is_committed and not job.prefill_end

    def _compute(self, key: TransferKey, job: Job) -> None:
        """One piece of the step loop: plan a span, write a layer, or commit."""
        assert job.prefill_table is not None
        if job.num_planned == 0 and job.hit:
            job.num_planned = job.hit
            job.num_layers_done = self._layout.num_layers
            self._plan(key, 0, job.hit, is_cached=True)
        elif job.num_planned > job.hit and job.num_layers_done < self._layout.num_layers:
            for token in range(job.span_start, job.num_planned):
                cell = (key, token, job.num_layers_done)
                self.prefill_pool.write(job.prefill_table, token, job.num_layers_done, cell)
            job.num_layers_done += 1
            self._do_all(self.senders.layers_ready(key, job.num_layers_done, self.now))
            if job.num_layers_done == self._layout.num_layers:
                self._do_all(self.senders.span_computed(key, self.now))
        elif job.num_planned < job.num_tokens:
            job.span_start = job.num_planned
            job.num_planned = min(job.num_tokens, job.num_planned + self._chunk)
            job.num_layers_done = 0
            self._plan(key, job.span_start, job.num_planned, is_cached=False)
        else:
            job.is_committed = True
            self._do_all(self.senders.commit(key, 7, self.now))

    def _plan(self, key: TransferKey, start: int, stop: int, *, is_cached: bool) -> None:
        mode = PushMode.SERIALIZED if start % 2 else PushMode.LAYERWISE
        self._do_all(
            self.senders.span_planned(key, start, stop, mode, self.now, is_cached=is_cached)
        )

    def _hear_command(self, link: LinkId, message: SourceMessage) -> None:
        self._do_all(self.receivers.message(link, message, self.now))

    def _attach(self, key: TransferKey) -> None:
        job = self.jobs.get(key)
        if job is not None and job.is_reserved:
            job.is_reserved = False  # terms are given once
            self._do_all(self.receivers.attached(key, job.num_tokens, job.skip, self.now))

    def _end_unattached(self, job: Job) -> None:
        """Nothing was attached: the lease side frees the blocks alone."""
        assert job.decode_table is not None
        job.decode_end.append("never attached")
        job.is_reserved = False
        self.decode_pool.give_back(job.decode_table)
        job.decode_table = None

    def _gather(self, send: Send) -> None:
        order = send.order
        job = self.jobs[order.key]
        if job.prefill_table is None:
            raise InvariantViolated("a frame is gathered after its blocks were freed")
        frame = order.frame
        cells = tuple(
            self.prefill_pool.read(job.prefill_table, token, layer)
            for layer in range(frame.first_layer, frame.last_layer)
            for token in range(frame.start, frame.stop)
        )
        held = SlotBytes(order.transfer_id, order.epoch, frame.idx, cells, hash(cells))
        if self._has_windows:
            self._receive_memory[send.memory] = held
        else:
            self._send_slots[order.slot] = held
        send.is_gathered = True

    def _verify(self, order: VerifyAndPlace) -> MeshError | None:
        held = self._receive_memory.get(self._memory_of[order.slot])
        wanted = (order.transfer_id, order.epoch, order.frame.idx)
        if held is None or held[:3] != wanted:
            # The header check would refuse it; that it is needed is the violation.
            raise InvariantViolated(f"foreign KV: a slot of {order.key} was written by another")
        if hash(held.cells) != held.digest:
            self.num_refused_frames += 1
            return TransferFailed("damaged")
        return None

    def _place(self, order: VerifyAndPlace, table: list[int], error: MeshError | None) -> None:
        held, frame = self._receive_memory.get(self._memory_of[order.slot]), order.frame
        if error is None and held is not None:
            places = [
                (token, layer)
                for layer in range(frame.first_layer, frame.last_layer)
                for token in range(frame.start, frame.stop)
            ]
            # Read from the slot now: what was verified may have been overwritten since.
            for (token, layer), cell in zip(places, held.cells, strict=False):
                self.decode_pool.write(table, token, layer, cell)
        self._do_all(self.receivers.frame_placed(order.key, frame.idx, error, self.now))

    def _do_all(self, effects: list[SenderEffect] | list[ReceiverEffect]) -> None:
        for effect in effects:
            self._do(effect)

    def _do(self, effect: SenderEffect | ReceiverEffect) -> None:
        match effect:
            case SendMessage(link=link, message=message):
                if link == self._link and self._is_prefill_up:
                    self._commands.append((link, message))
            case SendReply(link=link, message=message):
                if link == self._link and self._is_decode_up:
                    self._replies.append((link, message))
            case AskTerms(key=key):
                self._attach(key)
            case EndLeases():
                for job in [job for job in self.jobs.values() if job.is_reserved]:
                    self._end_unattached(job)
            case GatherAndSend(tag=tag):
                self._sends[tag] = Send(effect, self._memory_of[effect.peer_slot])
            case EndTransfer(key=key, error=error):
                job = self.jobs[key]
                job.prefill_end.append(error)
                assert job.prefill_table is not None
                self.prefill_pool.give_back(job.prefill_table)
                job.prefill_table = None
            case PostReceive(tag=tag):
                self._receives[tag] = Receive(effect)
            case CancelReceive(key=key, frame_idx=frame_idx):
                for receive in self._receives.values():
                    order = receive.order
                    if (order.key, order.frame.idx) == (key, frame_idx):
                        receive.is_cancelled = True
            case VerifyAndPlace(key=key):
                table = self.jobs[key].decode_table
                assert table is not None
                self._num_placements += 1
                self._placements[self._num_placements] = (effect, list(table), None, False)
            case HandOver(key=key):
                self.jobs[key].decode_end.append("handed over")
                self.num_handed_over += 1
                self._require_own_kv(key)
            case ReleaseLease(key=key):
                job = self.jobs[key]
                job.decode_end.append("released")
                assert job.decode_table is not None
                self.decode_pool.give_back(job.decode_table)
                job.decode_table = None
            case ReportFailure() | QuarantineLease():
                pass
            case CloseLink(link=link):
                if link == self._link:
                    self.lose_link(prefill_sees=True, decode_sees=True)
