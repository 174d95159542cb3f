"""Policies that need no index: ``p2c`` and ``hash``."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.rendezvous import BOUND, affinity_of
from services.gateway.core.routing.routing import POLICIES
from services.gateway.core.worker import Role
from shared.ids import StreamId
from shared.messages.columns import pack_u32
from tests.support.routing import a_mesh, decide

KEYS = st.integers(0, 2**64 - 1)
DRAWS = st.floats(0, 1, exclude_max=True)
LOADS = st.lists(st.integers(0, 5000), min_size=1, max_size=9)


def loaded(prefills: list[int], decodes: list[int]) -> PeerTable:
    """A mesh whose workers reported so many prompt tokens and reserved blocks."""
    table = a_mesh(len(prefills), len(decodes))
    for worker, tokens in zip(table.all(Role.PREFILL), prefills, strict=True):
        worker.report(replace(worker.status, pending_tokens=tokens))
    for worker, blocks in zip(table.all(Role.DECODE), decodes, strict=True):
        worker.report(replace(worker.status, reserved_blocks=blocks))
    return table


def test_p2c_takes_the_less_loaded_of_two() -> None:
    """Whoever is drawn beside it, the most loaded prefill worker is never taken."""
    table = loaded([0, 100, 200], [0])
    chosen = Counter(int(decide("p2c", table, (draw + 0.5) / 6).prefill) for draw in range(6))
    assert chosen == {1: 4, 2: 2}


@given(prefills=LOADS, decodes=LOADS, draw=DRAWS)
def test_p2c_never_takes_the_one_most_loaded(
    prefills: list[int], decodes: list[int], draw: float
) -> None:
    """Of two or more, on both sides; where all are alike anybody may be taken."""
    decision = decide("p2c", loaded(prefills, decodes), draw)
    for score, of_side in (
        (prefills[decision.prefill - 1], prefills),
        (decodes[decision.decode - 100], decodes),
    ):
        others = sorted(of_side)[:-1]
        assert score <= (others[-1] if others else of_side[0])


def test_p2c_reaches_every_pair() -> None:
    """One number draws both sides, and does not tie them to each other."""
    table = loaded([0, 0, 0], [0, 0, 0])
    decisions = [decide("p2c", table, (draw + 0.5) / 900) for draw in range(900)]
    seen = Counter((int(it.prefill), int(it.decode)) for it in decisions)
    assert seen == {(prefill, decode): 100 for prefill in (1, 2, 3) for decode in (100, 101, 102)}


@given(key=KEYS, loads=LOADS, draw=DRAWS, size=st.integers(1, 400))
def test_hash_is_bounded_and_does_not_hang_on_chance(
    key: int, loads: list[int], draw: float, size: int
) -> None:
    """Nobody above 1.25 times the mean is given more, and the random number plays no part."""
    table = loaded(loads, [0])
    decision = decide("hash", table, draw, affinity=key, num_tokens=size)
    again = decide("hash", table, 0.0, affinity=key, num_tokens=size)
    assert (decision.prefill, decision.decode) == (again.prefill, again.decode)
    assert loads[decision.prefill - 1] <= BOUND * (sum(loads) + size) / len(loads)


@given(keys=st.lists(KEYS, min_size=1, max_size=30, unique=True), gone=st.integers(1, 6))
def test_hash_moves_only_the_keys_of_who_left(keys: list[int], gone: int) -> None:
    """Rendezvous: a worker that leaves takes nobody else's keys with it."""
    table = loaded([0] * 6, [0])
    before = {key: decide("hash", table, affinity=key).prefill for key in keys}
    table.leave(table.all(Role.PREFILL)[gone - 1].incarnation)
    for key, prefill in before.items():
        after = decide("hash", table, affinity=key).prefill
        assert after == prefill or prefill == gone


def test_hash_spreads_keys() -> None:
    """Of 3,000 keys every one of six workers has about its share, whatever order they come in."""
    table = loaded([0] * 6, [0] * 3)
    keys = [affinity_of(pack_u32([number, number + 1]), b"") for number in range(3000)]
    decisions = [decide("hash", table, affinity=key) for key in keys]
    for side, number in (("prefill", 6), ("decode", 3)):
        counts = Counter(getattr(decision, side) for decision in decisions)
        assert len(counts) == number
        assert max(counts.values()) < 1.2 * 3000 / number


def test_one_hot_prefix_does_not_drown_its_worker() -> None:
    """All requests have one key and nobody finishes: no worker's queue is above the bound and one
    request."""
    table, policy = loaded([0] * 5, [0]), POLICIES["hash"]()
    pending: dict[int, int] = defaultdict(int)
    for number in range(200):
        decision = decide(policy, table, num_tokens=100, affinity=7)
        worker = table.get(decision.prefill)
        assert worker is not None
        worker.sent(Role.PREFILL, StreamId(number + 1), num_tokens=100, num_blocks=1)
        pending[decision.prefill] += 100
        assert max(pending.values()) <= BOUND * sum(pending.values()) / 5 + 100


def test_keys_are_of_the_beginning_and_the_tenant() -> None:
    """What follows the first tokens does not count; another tenant's prompt is another."""
    prompt = list(range(1000))
    assert affinity_of(pack_u32(prompt), b"a") == affinity_of(pack_u32([*prompt[:256], 7]), b"a")
    assert affinity_of(pack_u32(prompt), b"a") != affinity_of(pack_u32(prompt), b"b")
    assert affinity_of(pack_u32(prompt), b"a") != affinity_of(pack_u32([5, *prompt]), b"a")
