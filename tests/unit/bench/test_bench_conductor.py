"""bench/conductor: production's policies come out in Mooncake's order on sessions, hits are those
that there are to have, and the load equation is looked at at every report and every order.
"""

from __future__ import annotations

import pytest

from bench.conductor.prefill_pools import STEP_TOKENS, STEPS, Setting, simulate
from bench.conductor.run import (
    ORDER,
    bursts,
    ideal,
    spread_in_ticks,
    summary,
)
from services.cli.bench.sources import Lengths, Sessions
from services.cli.bench.workload import BLOCK_TOKENS, Ask, Load, plan
from services.gateway.core.worker import Worker
from services.planner.core.fetch import prefill_flops
from services.planner.core.kv_size import PUBLISHED
from services.planner.core.roofline import DEVICES
from shared.errors import InvariantViolated

SESSIONS = Sessions("sessions", Lengths(6909, 27367, 126195), Lengths(350, 597, 2000), 0.25)


def some_asks(num_requests: int = 500) -> tuple[Ask, ...]:
    return plan(SESSIONS, Load(rate=2.6, num_requests=num_requests)).asks


@pytest.mark.slow
def test_the_policies_come_out_in_order_on_sessions() -> None:
    """Who knows more of the prefixes is served sooner, and computes less."""
    asks = some_asks()
    found = {policy: summary(simulate(Setting(policy=policy), asks)) for policy in ORDER}
    means = [found[policy]["ttft_s"]["mean"] for policy in ORDER]
    assert means == sorted(means, reverse=True)
    hits = {policy: row["hit"] for policy, row in found.items()}
    assert max(hits["random"], hits["least_loaded"]) < hits["local"] < hits["conductor"]
    assert 0.85 * ideal(asks) < hits["conductor"] <= ideal(asks)
    assert found["conductor"]["fetches"] > 10
    assert not any(row["resyncs"] for row in found.values())
    assert all(row["requests"] == len(asks) for row in found.values())


def test_a_prompt_alone_takes_what_the_paper_s_formula_says() -> None:
    """And the next one that is the same computes its last block alone."""
    ask = Ask(num_input=8192, num_output=1, block_ids=tuple(range(16)))
    again = Ask(num_input=8192, num_output=1, block_ids=tuple(range(16)), due_s=10.0)
    flops = 8 * DEVICES["a800"].flops / 2
    found = simulate(Setting(policy="conductor", num_workers=2), [ask, again])
    (_, first_s), (prompt, second_s) = sorted(found.prompts, key=lambda it: it[0].ask.due_s)
    assert first_s == pytest.approx(prefill_flops(PUBLISHED["llama-3-70b"], 8192) / flops, rel=0.01)
    assert prompt.num_cached == 15 * BLOCK_TOKENS
    last_s = STEPS.prompt_seconds(15 * BLOCK_TOKENS, 8192, STEP_TOKENS)
    assert second_s == pytest.approx(last_s + 0.001, abs=0.0005)


def test_bursts_with_one_hot_prefix_load_all_workers_alike() -> None:
    """Three gateways that do not know of each other's orders: no queue is above 1.5 x the mean."""
    found = simulate(Setting(policy="conductor"), list(bursts(3)), [0.02, 8.02, 16.02])
    assert len(found.queues) == 3
    for queues in found.queues:
        assert min(queues) > 0
        assert max(queues) <= 1.5 * sum(queues) / len(queues)
    assert found.num_checks > 3 * 96


def test_a_load_that_is_not_the_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: an order that a gateway forgets to count."""
    monkeypatch.setattr(Worker, "sent", lambda *_, **__: None)
    with pytest.raises(InvariantViolated, match="a gateway believes in 0 tokens"):
        simulate(Setting(policy="conductor"), some_asks(5))


def test_arrivals_stay_within_their_tick_and_in_order() -> None:
    """A trace that tells time in ticks of 3 s."""
    asks = [Ask(num_input=1 + i, num_output=1, due_s=3.0 * (i // 4)) for i in range(12)]
    spread = spread_in_ticks(asks, 3.0)
    assert [ask.num_input for ask in spread] == [ask.num_input for ask in asks]
    assert all(0 <= new.due_s - old.due_s < 3.0 for new, old in zip(spread, asks, strict=True))
    times = [ask.due_s for ask in spread]
    assert times == sorted(set(times))
