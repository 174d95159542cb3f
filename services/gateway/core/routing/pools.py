"""Pools: what a worker is at the moment, by what it holds; and who may change what it is at home.

Every worker has a home: prompts or tokens. As long as it holds work of that kind alone it is in
the pool of its home; with work of the other kind it is *mixed*, and when none is left it is home
again. Nobody commands it and nobody leads: each gateway computes the same from the same reports
(Splitwise, arXiv 2311.18677, section 4.1, and the MixedPoolScheduler of its public simulator).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.sides import Places, RouteRequest, Scores, Sides
from services.gateway.core.routing.turns import InTurn, least
from services.gateway.core.worker import Role, Worker
from shared.errors import InvalidRequest, NotFound
from shared.home import Home
from shared.ids import Incarnation

MAX_PENDING_TOKENS = 8192
"""A queue of prompts over this is long."""


class Pool(Enum):
    """What a worker is at the moment."""

    PROMPT = "prompt"
    TOKEN = "token"
    MIXED = "mixed"


HOMES = {Pool.PROMPT.value: Role.PREFILL, Pool.TOKEN.value: Role.DECODE}
"""A home's name -> the role that it is."""

_HOME_POOLS = {Role.PREFILL: Pool.PROMPT, Role.DECODE: Pool.TOKEN}


def pool_at_home(worker: Worker) -> Pool:
    """Return the pool that a worker is in while it holds no foreign work."""
    return _HOME_POOLS[worker.home]


def pool_of(worker: Worker) -> Pool:
    """Return the pool of a worker, by its report and what it was sent since."""
    return Pool.MIXED if worker.has_foreign else pool_at_home(worker)


class Splitwise(InTurn):
    """Join the shortest queue of the home pool; where that is long or full take a mixed worker,
    then borrow one from the opposite pool, then let one worker do both.

    Only the least loaded worker of a pool is asked whether it is too full. Ties go to the one
    chosen longest ago.
    """

    name = "splitwise"
    moves_roles = True
    score_prefill = staticmethod(attrgetter("pending_tokens"))
    score_decode = staticmethod(attrgetter("reserved_tokens"))

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return the pair. Who prefers a pool that nobody in reach is in finds the next one."""
        prefills, decodes = sides.prefills, sides.decodes
        prefill = self._from_pools(
            prefills,
            scores.prefills,
            range(len(prefills)),
            Role.PREFILL,
            lambda worker: not _is_long(worker, request),
        )
        decode = None
        if prefill is not None:
            decode = self._from_pools(
                decodes,
                scores.decodes,
                sides.partners_of(prefill),
                Role.DECODE,
                lambda worker: _has_room(worker, request),
            )
        if prefill is None or decode is None:
            prefill, decode = self._one_for_both(sides, scores, prefill)
        self.chosen(prefills[prefill].incarnation, decodes[decode].incarnation)
        return prefill, decode

    def _from_pools(
        self,
        workers: Sequence[Worker],
        scores: Sequence[float],
        places: Sequence[int],
        side: Role,
        takes: Callable[[Worker], bool],
    ) -> int | None:
        """Return the least loaded of the first pool whose least loaded ``takes`` the request, else
        of those that would have to be borrowed; None = there is nobody to borrow."""
        at_home, mixed, away = _by_pool(workers, places, side)
        for pool in filter(None, (at_home, mixed)):
            place = self._least(scores, workers, pool)
            if takes(workers[place]):
                return place
        return self._least(scores, workers, away) if away else None

    def _one_for_both(self, sides: Sides, scores: Scores, prefill: int | None) -> Places:
        """Return the shortest queue of all twice. If nobody can do both, the pair stays apart and
        waits: a queue, however long, is no reason to refuse."""
        prefills = sides.prefills
        # Who is its own partner is colocated, so it stands on both sides.
        both = [idx for idx, mask in enumerate(sides.partners) if mask & prefills[idx].bit]
        if both:
            prefill = self._least(scores.prefills, prefills, both)
            (decode,) = sides.places_of(prefills[prefill].bit)
            return prefill, decode
        if prefill is None:
            prefill = self._least(scores.prefills, prefills, range(len(prefills)))
        return prefill, self._least(scores.decodes, sides.decodes, sides.partners_of(prefill))

    def _least(
        self, scores: Sequence[float], workers: Sequence[Worker], places: Sequence[int]
    ) -> int:
        return self.longest_ago(workers, least(scores, places))


def _by_pool(
    workers: Sequence[Worker], places: Sequence[int], side: Role
) -> tuple[list[int], list[int], list[int]]:
    """Return who is at home on this side, who is mixed, and who would have to be borrowed."""
    at_home: list[int] = []
    mixed: list[int] = []
    away: list[int] = []
    for place in places:
        worker = workers[place]
        if worker.has_foreign:
            mixed.append(place)
        elif worker.home is side or worker.is_home_on(side):
            at_home.append(place)
        else:
            away.append(place)
    return at_home, mixed, away


def _is_long(worker: Worker, request: RouteRequest) -> bool:
    """Whether a prompt would wait too long here. What a busy worker computes already is no
    queue."""
    is_over = worker.pending_tokens + request.num_tokens > MAX_PENDING_TOKENS
    return is_over and worker.num_queued > 0


def _has_room(worker: Worker, request: RouteRequest) -> bool:
    """Whether prompt and answer fit beside what is reserved."""
    num_blocks = worker.blocks_for(request.num_tokens + request.max_new_tokens)
    # Strictly less, as a test has it that writes Splitwise's simulator out once more.
    return worker.reserved_blocks + num_blocks < worker.num_blocks


# --- homes ----------------------------------------------------------------------------------------


class HomeOrder(NamedTuple):
    """A worker and the home that it is to be given."""

    worker: Incarnation
    home: Home


def home_of(worker: Worker) -> Home:
    """Return a worker's home as it reported it."""
    return Home(worker.home, worker.status.home_epoch, worker.status.home_order)


def change_home(
    table: PeerTable, incarnation: Incarnation, home: str, order: int
) -> list[HomeOrder]:
    """Return the orders that give a worker another home: each goes out when the worker before has
    confirmed its own (``is_confirmed``), and after a refusal none does. order: a number that no
    other order has.

    Somebody stays for the role that is left. If all who could may move themselves, one of them is
    ordered to stay, before: the order uses up the epoch with which another gateway, which does not
    know of this move, would send it away. So of any number of gateways that move different workers
    at once, none takes the last one (the proof: ``docs/roles.md``).

    Raises NotFound: no such worker. InvalidRequest: no such home; it serves one side only; it is
    the last of its role. The message names the remedy.
    """
    worker = table.get(incarnation)
    if worker is None:
        raise NotFound(
            f"no worker {incarnation:016x} is in the mesh: `pdmesh top` lists those that are",
            param="worker",
            code="no_worker",
        )
    role = HOMES.get(home)
    if role is None:
        raise InvalidRequest(
            f"a home is one of {', '.join(HOMES)}, not {home!r}", param="role", code="unknown_home"
        )
    if role not in worker.serves:
        raise InvalidRequest(
            f"worker {incarnation:016x} serves {worker.role.value} alone: start one that serves "
            "both roles, or choose one that does",
            param="worker",
            code="one_role",
        )
    orders = [_order(worker, role, order)]
    if role is worker.home:
        return orders
    others = [
        other
        for other in table.workers
        if other is not worker and other.is_usable and other.is_home_on(worker.home)
    ]
    if not others:
        name = _HOME_POOLS[worker.home].value
        raise InvalidRequest(
            f"worker {incarnation:016x} is the last one for {name}s: start another one, or give "
            f"another one the home {name!r} first",
            param="role",
            code="last_of_role",
        )
    if all(len(other.serves) > 1 for other in others):
        orders.insert(0, _order(others[0], worker.home, order))
    return orders


def _order(worker: Worker, role: Role, order: int) -> HomeOrder:
    return HomeOrder(worker.incarnation, Home(role, worker.status.home_epoch + 1, order))


def is_confirmed(worker: Worker, wanted: Home) -> bool:
    """Whether the worker has taken the home that it was ordered to take.

    Raises InvalidRequest: another gateway's order came before this one, or after it.
    """
    home = home_of(worker)
    if wanted.replaces(home):
        return False
    if home != wanted:
        raise InvalidRequest(
            f"another gateway gave worker {worker.incarnation:016x} a home at the same time (it is "
            f"{pool_at_home(worker).value}): look at it again, then repeat the order",
            param="worker",
            code="old_epoch",
        )
    return True
