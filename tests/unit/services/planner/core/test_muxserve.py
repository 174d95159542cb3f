"""MuxServe: the estimator, the placements beside all others, the adaptive batch scheduler."""

from __future__ import annotations

import random

import pytest

from services.planner.core.adbs import Adbs, QuotaShare, QuotaUse, adapted_quota, initial_quota
from services.planner.core.muxserve import (
    ModelMesh,
    MuxModel,
    alone,
    brute_force,
    greedy,
    is_satisfied,
    mesh_groups,
    sm_share,
    throughput,
    total,
)
from services.planner.paper_runs import mux_models

SIZES = {"7b": (6.7e9, 32, 32), "13b": (13e9, 40, 40), "30b": (32.5e9, 60, 52)}


def model(size: str, rate: float, name: str = "") -> MuxModel:
    """One of a size."""
    return MuxModel(name or size, *SIZES[size], rate=rate)


def test_a_unit_is_the_papers_equation() -> None:
    """One model: B / (t_prefill(B) + t_decode(B) * out), and never more than its rate."""
    busy = model("13b", 1000.0)
    found = throughput((busy,), 1)
    best = max(alone(busy, 1, sm_share(busy, 1), batch) for batch in range(1, 257))
    assert 0 < found <= best
    assert throughput((model("7b", 0.3),), 1) == 0.3


def test_prefills_of_a_unit_delay_each_other() -> None:
    """Two models on one mesh serve less than each of them there alone would."""
    a, b = model("13b", 8.0, "a"), model("13b", 8.0, "b")
    together = throughput((a, b), 2)
    assert together < throughput((a,), 2) + throughput((b,), 2)


def test_served_means_near_enough() -> None:
    """A tenth, and at most half a request, below."""
    assert is_satisfied(1.0, 1.09)
    assert not is_satisfied(1.0, 1.1)
    assert not is_satisfied(100.0, 100.5)


def test_a_candidate_takes_the_smallest_share_that_serves() -> None:
    """More demand, more multiprocessors."""
    shares = [sm_share(model("7b", rate), 1) for rate in (0.2, 2.0, 20.0)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_groups_of_a_node_of_eight() -> None:
    """Ten cuts into meshes of a power of two; two nodes: with repetition."""
    assert len(list(mesh_groups(1, 8))) == 10
    assert len(list(mesh_groups(2, 8))) == 55
    assert (4, 2, 1, 1) in set(mesh_groups(1, 8))


def test_memory_decides_what_a_mesh_holds() -> None:
    """30B needs two GPUs, 13B fits beside one more on one."""
    assert not ModelMesh(1).can_hold(model("30b", 1.0))
    assert ModelMesh(2).can_hold(model("30b", 1.0))
    assert ModelMesh(1, (model("13b", 0.2),)).can_hold(model("13b", 0.2, "other"))


@pytest.mark.parametrize("first", range(0, 300, 60))
def test_placements_are_near_the_best_and_never_below_sharing_nothing(first: int) -> None:
    """300 draws on four GPUs, all placements tried: within 5 % with the exchange of models, 20 %
    as published (which falls short by more than 5 % in five of them)."""
    num_short = 0
    for seed in range(first, first + 60):
        models = mux_models(seed)
        best, apart = (
            total(brute_force(models, 1, 4)),
            total(brute_force(models, 1, 4, shares=False)),
        )
        published = greedy(models, 1, 4)
        found = greedy(models, 1, 4, exchanges=True)
        assert total(found) >= 0.95 * best
        assert total(found) >= apart - 1e-9
        assert total(published) >= 0.8 * best
        num_short += total(published) < 0.95 * best
        if published:
            placed = sorted(one.name for mesh in found for one in mesh.models)
            assert placed == sorted(one.name for one in models)
    assert num_short <= 2


# --- adaptive batch scheduling ------------------------------------------------------------------


def test_quotas_follow_rate_and_size() -> None:
    """Blocks by rate x heads x layers; sequences by rate alone."""
    shares = {"a": QuotaShare(3.0, 32, 32), "b": QuotaShare(1.0, 32, 32)}
    found = initial_quota(shares, 1 << 22, 16)
    assert found["a"] / found["b"] == pytest.approx(3, rel=0.02)
    big = {"a": QuotaShare(1.0, 32, 32), "b": QuotaShare(1.0, 64, 80)}
    found = initial_quota(big, 1 << 24, 16)
    assert abs(found["a"] - found["b"]) <= 1


def test_quota_moves_from_who_has_too_much_to_who_is_full() -> None:
    """10 % of the average a period; nothing is lost."""
    quota = {"full": 100, "idle": 100, "half": 100}
    use = {"full": QuotaUse(99, 99, 50), "idle": QuotaUse(0, 0, 0), "half": QuotaUse(50, 50, 0)}
    found = adapted_quota(quota, use)
    assert found["full"] == 110
    assert sum(found.values()) == 300
    assert found["idle"] < found["half"] < 100


def test_nobody_receives_without_a_backlog() -> None:
    """Full alone is not enough."""
    quota = {"full": 100, "idle": 100}
    use = {"full": QuotaUse(95, 95, 5), "idle": QuotaUse(0, 0, 0)}
    assert adapted_quota(quota, use) == quota


@pytest.mark.parametrize("seed", range(30))
def test_quotas_are_conserved(seed: int) -> None:
    """Whatever is used."""
    rng = random.Random(seed)
    quota = {str(idx): rng.randint(1, 300) for idx in range(rng.randint(2, 6))}
    use = {
        name: QuotaUse(rng.uniform(0, num), rng.randint(0, num), rng.randint(0, 400))
        for name, num in quota.items()
    }
    found = adapted_quota(quota, use)
    assert sum(found.values()) == sum(quota.values())
    assert min(found.values()) >= 0


def test_prefills_take_turns_and_go_before_decodes() -> None:
    """A prefill that cannot start holds decodes back; one that can is the next one's turn."""
    policy = Adbs(["a", "b", "c"])
    everyone = lambda name: True  # noqa: E731
    assert [policy.next_prefill(everyone, everyone) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [policy.next_decode(everyone, everyone) for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.next_prefill(everyone, lambda name: False) is None
    assert policy.next_decode(everyone, everyone) is None
    assert policy.next_prefill(lambda name: name == "c", everyone) == "c"
    assert policy.next_decode(everyone, everyone) == "b"
    assert policy.next_prefill(lambda name: False, everyone) is None
    assert policy.next_decode(everyone, everyone) == "c"
