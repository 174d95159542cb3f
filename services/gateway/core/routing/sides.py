"""The two sides of the mesh as routing sees them: who computes prompts, who continues them, and who
is paired with whom.

A side is a list, not a product: a decision looks at each worker once. Who is paired is one integer
a prefill worker, with the bit of every decode worker that it reaches; the peer table keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from services.gateway.core.index.fetches import Fetches, Hit
from services.gateway.core.index.prefixes import HashedPrompt
from services.gateway.core.worker import Worker, WorkerView
from shared.ids import Incarnation

if TYPE_CHECKING:
    from services.gateway.core.routing.columns import Side
    from services.gateway.core.routing.peer_table import PeerTable


NO_HITS: Mapping[int, Hit] = {}


class RouteRequest(NamedTuple):
    """What a policy may know of a request. avoid: workers that failed an earlier attempt. prompt:
    what the next two are found by, where the policy goes by one of them. affinity: the key of the
    prompt's beginning (``rendezvous.py``). cached: what workers have of the prompt, as ``prompt``
    found, by their places; who is not there has nothing. fetches: what could be sent from one
    cache to another; None = nothing.
    num_output_tokens: how long such answers are, 0 = not known. now: loop time."""

    num_tokens: int
    max_new_tokens: int
    avoid: frozenset[Incarnation] = frozenset()
    affinity: int = 0
    prompt: HashedPrompt | None = None
    cached: Mapping[int, Hit] = NO_HITS
    fetches: Fetches | None = None
    num_output_tokens: int = 0
    now: float = 0.0


Places = tuple[int, int]
"""A prefill and a decode worker, by their places in the two lists of ``Sides``."""


class PromptTerms(NamedTuple):
    """What a worker's score for a prompt is made of. All in seconds (``is_s``), or in tokens where
    no worker's speed is known. wait: until it would begin. cached_tokens: need not be
    computed; of these ``source`` sends fetched_tokens, which have come after ``fetch``, beside the
    wait; source 0 = nothing is fetched. loaded_tokens of them lie below the worker's pool, and have
    come back after ``load``, beside the wait, too; load 0 = it does not report how fast. by_load:
    it is not predicted, and its load counts at the others' median speed."""

    wait: float
    compute: float
    cached_tokens: int
    is_s: bool
    fetch: float = 0.0
    source: Incarnation = Incarnation(0)
    fetched_tokens: int = 0
    load: float = 0.0
    loaded_tokens: int = 0
    by_load: bool = False

    @property
    def score(self) -> float:
        """Until the prompt is computed."""
        return max(self.wait, self.fetch, self.load) + self.compute


class AnswerTerms(NamedTuple):
    """What a decode worker's score is made of, in seconds a token. step: with this answer among its
    own. no_room: added where it does not fit now. hand_over: of KV that prefill would have to send,
    shared among the answer's tokens. by_load: see ``PromptTerms``."""

    step: float
    no_room: float
    hand_over: float
    by_load: bool = False

    @property
    def score(self) -> float:
        """Between two tokens."""
        return self.step + self.no_room + self.hand_over


TermsT = TypeVar("TermsT")


class AllTerms(Sequence[TermsT]):
    """Those of all workers of a side, kept as columns: ``make`` makes the one that is asked for."""

    def __init__(self, num: int, make: Callable[[int], TermsT]) -> None:
        self._num, self._make = num, make
        self._special: dict[int, TermsT] = {}

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, place: int) -> TermsT: ...
    @overload
    def __getitem__(self, place: slice) -> list[TermsT]: ...
    def __getitem__(self, place: int | slice) -> TermsT | list[TermsT]:
        if isinstance(place, slice):
            return [self[one] for one in range(self._num)[place]]
        if not 0 <= place < self._num:
            raise IndexError(place)
        return self._special[place] if place in self._special else self._make(place)

    def __setitem__(self, place: int, terms: TermsT) -> None:
        """More is known of these than columns tell: a fetch, or a load."""
        self._special[place] = terms


class Scores(NamedTuple):
    """What a policy compares: one number for each place of a side; lower is better. terms and
    answer_terms: of the prefill and the decode workers' scores, where they are sums. source: the
    prefill worker over whose links a hand-over is scored, and whose turn it is; None = none is."""

    prefills: Sequence[float]
    decodes: Sequence[float]
    terms: Sequence[PromptTerms] = ()
    answer_terms: Sequence[AnswerTerms] = ()
    source: int | None = None


Memory = Mapping[Incarnation, int] | int | None
"""What a policy keeps from one decision to the next: a number of each worker, a counter, or
nothing."""


def nothing(worker: Worker) -> float:
    """The score of a policy that compares nothing."""
    return 0.0


class RoutingPolicy(ABC):
    """Chooses among workers that can all take the request; never called with empty sides."""

    name: str
    moves_roles = False
    """Whether it borrows workers from the other side. All others leave workers that serve both
    roles to their home, unless nobody is there."""

    needs_affinity = False
    """Whether it looks at ``RouteRequest.affinity``."""

    needs_prefixes = False
    """Whether it looks at ``RouteRequest.cached``."""

    fetches = False
    """Whether it has prefixes sent from one worker's cache to another: looks at
    ``RouteRequest.fetches``."""

    score_prefill: Callable[[Worker], float] = staticmethod(nothing)
    score_decode: Callable[[Worker], float] = staticmethod(nothing)

    memory: Any = None
    """A ``Memory``: never changed, but set anew; set to what a record has, it decides as then."""

    def left(self, incarnation: Incarnation) -> None:
        """A worker has left: its number is forgotten."""
        memory: Memory = self.memory
        if isinstance(memory, Mapping):
            self.memory = {it: number for it, number in memory.items() if it != incarnation}

    def scores(self, request: RouteRequest, sides: Sides) -> Scores:
        """Return what this policy compares: by itself each worker alone, the same for every
        request."""
        return Scores(
            list(map(self.score_prefill, sides.prefills)),
            list(map(self.score_decode, sides.decodes)),
        )

    @abstractmethod
    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return a prefill worker and one of its partners. random: uniform in [0, 1), drawn by
        the shell for this decision."""
        ...


@dataclass(slots=True)
class Sides:
    """Prefill and decode workers that may be chosen, in joining order: each has a partner here.

    partners: of each prefill worker, the bits of the decode workers here that it may push to. A
    colocated worker stands on both sides and is its own partner. at_home: of these, who need not be
    borrowed: each on the side of its home; None = all. table: that has the workers; None = they are
    in none.
    """

    prefills: Sequence[Worker]
    partners: Sequence[int]
    decodes: Sequence[Worker]
    at_home: Sides | None = None
    table: PeerTable | None = field(default=None, compare=False, repr=False)
    is_whole: bool = field(init=False)
    """Whether everybody is paired with everybody."""
    _in_columns: tuple[Side, Side] | None = field(init=False, default=None, compare=False)
    _decode_bits: int = field(init=False)
    _least_prefill_tokens: int = field(init=False)
    _least_decode_tokens: int = field(init=False)
    _least_model_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._decode_bits = sum(worker.bit for worker in self.decodes)
        self.is_whole = all(mask == self._decode_bits for mask in self.partners)
        self._least_prefill_tokens = min((w.capacity_tokens for w in self.prefills), default=0)
        self._least_decode_tokens = min((w.capacity_tokens for w in self.decodes), default=0)
        both = (*self.prefills, *self.decodes)
        self._least_model_tokens = min((w.model.max_model_len for w in both), default=0)

    def __bool__(self) -> bool:
        return bool(self.prefills)

    @property
    def num_pairs(self) -> int:
        """Pairs that take new work."""
        return sum(mask.bit_count() for mask in self.partners)

    def in_columns(self) -> tuple[Side, Side]:
        """Return the two sides as columns of numbers."""
        if self._in_columns is None:
            from services.gateway.core.routing.columns import Columns, Side

            own = Columns()

            def of_these() -> Columns:
                # Nobody tells who has changed, as a table does: all are written at each look.
                own.update((*self.prefills, *self.decodes))
                return own

            table = of_these if self.table is None else self.table.columns
            self._in_columns = Side(self.prefills, table), Side(self.decodes, table)
        return self._in_columns

    def views(self) -> Sequence[WorkerView | None]:
        """Return all workers as they are now, by their places."""
        if self.table is not None:
            return self.table.views()
        views = {worker.place: worker.view for worker in (*self.prefills, *self.decodes)}
        return [views.get(place) for place in range(max(views) + 1)]

    def places_of(self, bits: int) -> Sequence[int]:
        """Return the places of the decode workers with these bits, in order."""
        if bits == self._decode_bits:
            return range(len(self.decodes))
        return [place for place, worker in enumerate(self.decodes) if worker.bit & bits]

    def partners_of(self, prefill: int) -> Sequence[int]:
        """Return the places of the decode workers that a prefill worker (its place) reaches."""
        return self.places_of(self.partners[prefill])

    def fitting(self, num_tokens: int, max_new_tokens: int) -> Sides:
        """Leave out who could not hold a prompt of this length (on decode: and its next token), or
        would refuse it, or end its answer early: who has a shorter context than the workers that
        were here when it was let in."""
        most = num_tokens + max_new_tokens
        has_room = num_tokens <= self._least_prefill_tokens
        if has_room and num_tokens < self._least_decode_tokens and most <= self._least_model_tokens:
            return self
        return sides_of(
            [
                (worker, mask)
                for worker, mask in zip(self.prefills, self.partners, strict=True)
                if num_tokens <= worker.capacity_tokens and num_tokens < worker.model.max_model_len
            ],
            [
                worker
                for worker in self.decodes
                if num_tokens < worker.capacity_tokens and most <= worker.model.max_model_len
            ],
            self.table,
        )

    def without(self, avoid: Collection[Incarnation], *, most: int) -> Sides:
        """Leave out every pair with more than ``most`` (0 or 1) workers to avoid; a colocated
        worker is two."""
        bad = sum(worker.bit for worker in self.decodes if worker.incarnation in avoid)
        prefills = [
            # One to be avoided is one already: only partners that are not stay with it.
            (worker, mask if most > (worker.incarnation in avoid) else mask & ~bad)
            for worker, mask in zip(self.prefills, self.partners, strict=True)
            if most or worker.incarnation not in avoid
        ]
        return sides_of(prefills, self.decodes, self.table)


def sides_of(
    prefills: Sequence[tuple[Worker, int]],
    decodes: Sequence[Worker],
    table: PeerTable | None,
) -> Sides:
    """Return the sides of these workers, without those that have no partner among them.

    prefills: with the bits of their partners, wherever those are. table: see ``Sides``.
    """
    there = sum(worker.bit for worker in decodes)
    kept = [(worker, mask & there) for worker, mask in prefills if mask & there]
    reached = 0
    for _, mask in kept:
        reached |= mask
    return Sides(
        [worker for worker, _ in kept],
        [mask for _, mask in kept],
        [worker for worker in decodes if worker.bit & reached],
        table=table,
    )
