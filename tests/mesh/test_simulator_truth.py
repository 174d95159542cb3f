"""The simulator is judged by the whole mesh: every request feels the same on both, to the rounding
of times, every worker's blocks end the same, and what lies below its pool goes the same ways; with
equal steps skipped or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import structlog

from tests.support.sim_truth import (
    Case,
    Outcome,
    drawn_case,
    drawn_mixture,
    drawn_tiers,
    on_the_mesh,
    simulated,
)
from tests.support.tiers import few

ROUNDING_S = 1e-9


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Say nothing of each of thousands of requests."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)


def require_equal(ours: Outcome, theirs: Outcome) -> None:
    """Token by token, and block by block."""
    for idx, (one, other) in enumerate(zip(ours.felt, theirs.felt, strict=True)):
        assert one.finish == other.finish, idx
        assert one.token_times == pytest.approx(other.token_times, rel=0, abs=ROUNDING_S), idx
    assert ours.ledgers == theirs.ledgers
    for tier, other in zip(ours.tiers, theirs.tiers, strict=True):
        assert tier.decisions == other.decisions
        assert tier.num_lost == other.num_lost
        assert tier.block_s == pytest.approx(other.block_s, rel=1e-6)


def judge(case: Case) -> Outcome:
    """One drawn mesh, policy, pool and load."""
    truth = on_the_mesh(case)
    exact, runs = (simulated(case, truth, skips=skips) for skips in (False, True))
    assert runs == exact
    require_equal(exact, truth.outcome)
    return exact


@pytest.mark.parametrize("seed", few(range(6), 0, 4))
def test_runs_exact_and_the_whole_mesh_are_one(seed: int) -> None:
    """Few, for every day."""
    judge(drawn_case(seed, num_requests=50))


@pytest.mark.parametrize("seed", few((0, 2, 3, 4, 5), 0, 2))
def test_a_full_gateway_refuses_the_same_requests(seed: int) -> None:
    """Who runs, who waits and who is turned away: admission is in both."""
    case = replace(drawn_case(seed, num_requests=50), places=3, rate=150.0)
    assert "" in {it.finish for it in judge(case).felt}


@pytest.mark.parametrize("seed", few(range(12), 0, 1))
def test_workers_that_do_both_and_roles_that_move(seed: int) -> None:
    """Pools are what workers hold, homes change under way, and policies of all kinds see it."""
    judge(drawn_mixture(drawn_case(seed, num_requests=80)))


def test_first_tokens_of_one_step_let_others_in_behind_them() -> None:
    """Three prompts end together on a worker beside one that does both: all three are counted
    before it is seen who has room for those that waited for them."""
    judge(
        Case(
            *(10050, 2, 1, 1, "local"),
            num_requests=95,
            num_blocks=200,
            rate=150.0,
            num_shared=256,
            num_roots=5,
            most_output=120,
            max_pending_tokens=500,
        )
    )


def test_a_whole_request_is_a_prompt_until_that_is_computed() -> None:
    """A worker at home with tokens that takes one whole is mixed until then."""
    judge(
        Case(
            *(3, 2, 1, 0, "splitwise"),
            num_requests=60,
            num_blocks=300,
            rate=150.0,
            num_shared=512,
            num_roots=4,
            most_output=120,
            wire_s=0.00046,
            link_s=0.0009,
            movable=("decode",),
        )
    )


@pytest.mark.parametrize("seed", few(range(36), 0, 4, 12, 34))
def test_memory_below_the_pools_has_the_same_blocks(seed: int) -> None:
    """Block by block and slot by slot, what goes down, gives way, comes back, and for whom."""
    judge(drawn_tiers(drawn_case(seed, num_requests=50), has_disk=False))


@pytest.mark.parametrize("seed", few(range(24), 5, 9))
def test_a_disk_below_them_has_the_same_blocks(seed: int) -> None:
    """Likewise of files, under memory or alone, also of those that are read too late."""
    judge(drawn_tiers(drawn_case(seed, num_requests=50), has_disk=True))


@pytest.mark.nightly
@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_many_seeds_with_tiers_below(seed: int, has_disk: bool) -> None:
    """The same, at length."""
    judge(drawn_tiers(drawn_case(seed, num_requests=200), has_disk=has_disk))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(300))
def test_three_hundred_seeds_of_two_hundred_requests(seed: int) -> None:
    """The same, at length."""
    judge(drawn_case(seed, num_requests=200))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_many_seeds_of_roles_that_move(seed: int) -> None:
    """The same, at length."""
    judge(drawn_mixture(drawn_case(seed, num_requests=200)))
