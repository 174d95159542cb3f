"""One worker as the gateway sees it: what it said at its join, its latest report, its session, and
what this gateway has ordered from it.

Pure. How a worker stands is not stored but concluded, from what its session and its reports say:
each of them changes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from shared.home import Role as Role
from shared.ids import Incarnation, StreamId
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.worker_status import WorkerStatus as WorkerStatus

PLACES = 1024
"""Most workers of a gateway."""


class Standing(StrEnum):
    """How a worker stands with this gateway; only a usable one gets new work."""

    CONNECTING = "connecting"  # its session is not up yet, or not any more
    USABLE = "usable"
    SUSPECT = "suspect"  # silent for too long
    DRAINING = "draining"  # it ends when its work is done


@dataclass(slots=True)
class OpenOrder:
    """What one order asks of its worker: prompt tokens until they are computed, blocks to its
    end. sent_at: loop time. num_cached: of its prompt tokens need not be computed. has_prompt: to
    its end, also when they are computed: a prefill worker still pushes their KV."""

    num_tokens: int
    num_blocks: int
    has_prompt: bool
    has_answer: bool
    sent_at: float = 0.0
    num_cached: int = 0


class WorkerView(NamedTuple):
    """What a decision saw of a worker: its report, when that came, and the load with this gateway's
    orders that the report has not seen; and whether its predictions are believed."""

    status: WorkerStatus
    reported_at: float
    pending_tokens: int
    reserved_blocks: int
    num_queued: int
    num_prompts: int
    num_answers: int
    is_believed: bool


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process.

    Its load is what it reported and those orders of this gateway that the report has not seen,
    added up anew from the open orders at each change: nothing is counted twice, and no counter can
    go astray.

    serves: the roles for which it takes orders; empty = its own alone.
    """

    role: Role
    incarnation: Incarnation
    host: str
    port: int
    model: ModelSpec
    layout: KvLayout
    num_blocks: int
    block_size: int
    serves: tuple[Role, ...] = ()
    status: WorkerStatus = field(default_factory=WorkerStatus)
    is_connected: bool = False
    """Whether its session is up."""
    is_silent: bool = False
    """Whether it has been silent there for too long."""
    bit: int = 0
    """This worker in ``partners`` of others; the peer table gives it."""
    partners: int = 0
    """The bits of the workers that this one is paired with and may push to, usable or not."""
    asked: dict[Incarnation, float] = field(default_factory=dict[Incarnation, float])
    """Pairs that it was asked to make, and when."""
    orders: dict[StreamId, OpenOrder] = field(default_factory=dict[StreamId, OpenOrder])
    """This gateway's orders that have not ended, in the order of their ids."""
    pending_tokens: int = field(init=False, default=0)
    """Prompt tokens queued or running here."""
    reserved_blocks: int = field(init=False, default=0)
    """Blocks taken here."""
    reserved_share: float = field(init=False, default=0.0)
    """The same as a share of all blocks."""
    reserved_tokens: int = field(init=False, default=0)
    """The same in tokens, for workers with blocks of other sizes."""
    reported_at: float = field(init=False, default=0.0)
    """Loop time of the report."""
    changed: dict[int, Worker] = field(
        default_factory=dict["int", "Worker"], repr=False, compare=False
    )
    """The workers of its table that have changed since somebody last looked, by their bits."""
    home: Role = field(init=False)
    """What it does when it does one thing alone."""
    has_foreign: bool = field(init=False, default=False)
    """Whether it holds work that is not its home's; one that serves one role never does."""

    _is_believed: bool = field(init=False, default=True)
    _num_prompts: int = field(init=False, default=0)
    num_answers: int = field(init=False, default=0)
    """Answers that it holds, or has been asked for."""
    others_tokens: int = field(init=False, default=0)
    """Prompt tokens that it had of other gateways when it reported."""
    others_answers: int = field(init=False, default=0)
    """Likewise: answers that it held, or had been asked for."""
    _num_unseen: int = field(init=False, default=0)
    _free_at: float | None = field(init=False, default=None)
    """None = not added up since the last change."""
    _view: WorkerView | None = field(init=False, default=None)
    """Likewise."""
    _is_timed: tuple[bool, bool] = field(init=False, default=(False, False))
    """Whether it reports step times: of prompts, of answers."""

    def __post_init__(self) -> None:
        self.serves = self.serves or (self.role,)
        self._add_up()

    @property
    def standing(self) -> Standing:
        """How it stands."""
        if self.status.is_draining:
            return Standing.DRAINING
        if not self.is_connected:
            return Standing.CONNECTING
        return Standing.SUSPECT if self.is_silent else Standing.USABLE

    @property
    def is_colocated(self) -> bool:
        """Whether this decode worker is its own prefill worker, too: it is paired with itself."""
        return self.incarnation in self.status.paired

    def is_home_on(self, side: Role) -> bool:
        """Whether it stands on this side without being borrowed. A colocated worker that serves
        one role is at home on both."""
        if len(self.serves) == 1:
            return side in self.serves or self.is_colocated
        return self.home is side

    @property
    def place(self) -> int:
        """Its bit's number: small, and nobody else's while it is here."""
        return self.bit.bit_length() - 1

    @property
    def is_usable(self) -> bool:
        """Whether new work may be sent here."""
        return self.standing is Standing.USABLE

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits here while nothing else is."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens fills."""
        return -(-num_tokens // self.block_size)

    # --- load -----------------------------------------------------------------------------------

    @property
    def view(self) -> WorkerView:
        """All that follows at once, and never changed: made anew instead."""
        if self._view is None:
            self._view = WorkerView(
                self.status,
                self.reported_at,
                self.pending_tokens,
                self.reserved_blocks,
                self.num_queued,
                self._num_prompts,
                self.num_answers,
                self._is_believed,
            )
        return self._view

    @property
    def num_queued(self) -> int:
        """Orders that wait here for their first step."""
        status, num_unseen = self.status, self._num_unseen
        # On an idle worker the first of those that the report has not seen begins at once.
        is_idle = not (status.num_running or status.num_waiting)
        return status.num_waiting + num_unseen - (is_idle and num_unseen > 0)

    @property
    def is_believed(self) -> bool:
        """Whether its predictions have come true lately; if not, it is taken by its load alone."""
        return self._is_believed

    @is_believed.setter
    def is_believed(self, is_it: bool) -> None:
        self._is_believed = is_it
        self._conclude()

    @property
    def is_predictable(self) -> bool:
        """Whether seconds may be compared: it reports step times, and they have come true."""
        return self._is_believed and self._is_timed[0]

    @property
    def is_step_predictable(self) -> bool:
        """The same of the steps of its answers."""
        return self._is_believed and self._is_timed[1]

    def wait_s(self, now: float) -> tuple[float, float]:
        """Return the predicted seconds until a prompt that comes now would begin: those of the
        report that have not passed yet, and those of this gateway's orders that it has not seen."""
        queue_s = max(0.0, self.reported_at + self.status.queue_s - now)
        return queue_s, max(0.0, self.free_at - now) - queue_s

    @property
    def free_at(self) -> float:
        """When all prompts that it has, this gateway's orders among them, are predicted to be
        computed: loop time."""
        if self._free_at is None:
            self._free_at = self._add_up_prompts()
        return self._free_at

    def _add_up_prompts(self) -> float:
        status = self.status
        free_at = self.reported_at + status.queue_s
        for order in reversed(self._unseen()):
            if order.num_tokens:
                begins_at = max(free_at, order.sent_at)
                free_at = begins_at + status.prompt_s(order.num_tokens, order.num_cached)
        return free_at

    def _unseen(self) -> list[OpenOrder]:
        """Return the orders that the report has not seen, the newest first."""
        # Ids only grow, so they stand at the end.
        unseen = takewhile(self.status.seen.__lt__, reversed(self.orders))
        return [self.orders[stream_id] for stream_id in unseen]

    def report(self, status: WorkerStatus, now: float | None = None) -> None:
        """Take the worker's report. now: None = it is corrected here, and as old as it was."""
        self.status = status
        if now is not None:
            self.reported_at = now
        self._add_up()
        if now is not None:
            self._add_up_others()

    def ordered(
        self,
        role: Role,
        stream_id: StreamId,
        num_tokens: int,
        *,
        computes: bool,
        now: float,
        num_cached: int = 0,
    ) -> None:
        """An order for a prompt of so many tokens went out. computes: it is computed here. Who goes
        on with the answer has room for its first token, too."""
        self.sent(
            role,
            stream_id,
            num_tokens=num_tokens if computes else 0,
            num_blocks=self.blocks_for(num_tokens + (role is Role.DECODE)),
            now=now,
            num_cached=num_cached,
        )

    def sent(
        self,
        role: Role,
        stream_id: StreamId,
        *,
        num_tokens: int,
        num_blocks: int,
        now: float = 0.0,
        num_cached: int = 0,
    ) -> None:
        """See ``ordered``; ids only grow."""
        order = self.orders[stream_id] = OpenOrder(
            num_tokens,
            num_blocks,
            has_prompt=num_tokens > 0,
            has_answer=role is Role.DECODE,
            sent_at=now,
            num_cached=num_cached,
        )
        if stream_id > self.status.seen:
            self._count(order, 1)
            self._conclude()

    def computed(self, stream_id: StreamId) -> None:
        """An order's prompt is computed. Idempotent."""
        order = self.orders.get(stream_id)
        if order is not None and order.num_tokens:
            num_tokens, order.num_tokens = order.num_tokens, 0
            if stream_id > self.status.seen:
                self.pending_tokens -= num_tokens
                self._num_unseen -= 1
                self._conclude()

    def ended(self, stream_id: StreamId) -> None:
        """An order asks for nothing any more. Idempotent."""
        order = self.orders.pop(stream_id, None)
        if order is not None and stream_id > self.status.seen:
            self._count(order, -1)
            self._conclude()

    def lost(self) -> None:
        """The session is gone, and with it all that was ordered over it."""
        self.orders.clear()
        self._add_up()

    def take_over(self, before: Worker) -> None:
        """This entry replaces an earlier one of the same process: what it sent stays open."""
        self.is_connected, self.is_silent = before.is_connected, before.is_silent
        self.bit, self.orders, self.asked = before.bit, before.orders, before.asked
        self._is_believed = before.is_believed
        self._add_up()

    def _add_up(self) -> None:
        status = self.status
        self.pending_tokens, self.reserved_blocks = status.pending_tokens, status.reserved_blocks
        self._num_prompts, self.num_answers = status.num_prompts, status.num_answers
        self._num_unseen = 0
        for order in self._unseen():
            self._count(order, 1)
        self._is_timed = status.prompt_steps.is_known, status.answer_steps.is_known
        home = status.home
        self.home = self.role if home is None or home not in self.serves else home
        self._conclude()

    def _add_up_others(self) -> None:
        """What the report counts, without this gateway's orders that it has seen."""
        self.others_tokens = self.others_answers = 0
        if self.status.num_gateways < 2:
            return
        # Of either number those that it has not seen are in it.
        own = sum(order.has_answer for order in self.orders.values())
        self.others_answers = max(0, self.num_answers - own)
        num_tokens = self.status.pending_tokens
        for stream_id, order in self.orders.items():
            if order.num_tokens and stream_id <= self.status.seen:
                num_tokens -= max(0, order.num_tokens - order.num_cached)
        self.others_tokens = max(0, num_tokens)

    def _count(self, order: OpenOrder, times: int) -> None:
        """Count what an order asks for that the report has not seen, or (-1) count it no more."""
        self.pending_tokens += times * order.num_tokens
        self.reserved_blocks += times * order.num_blocks
        self._num_prompts += times * order.has_prompt
        self.num_answers += times * order.has_answer
        self._num_unseen += times * (order.num_tokens > 0)

    def _conclude(self) -> None:
        self._free_at = self._view = None
        self.changed[self.bit] = self
        self.reserved_share = self.reserved_blocks / (self.num_blocks or 1)
        self.reserved_tokens = self.reserved_blocks * self.block_size
        if len(self.serves) > 1:
            num_foreign = self.num_answers if self.home is Role.PREFILL else self._num_prompts
            self.has_foreign = num_foreign > 0
