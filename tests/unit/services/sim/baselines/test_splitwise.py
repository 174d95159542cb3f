"""Splitwise's router and machines as coded, and its provisioning."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.planner.core.provisioning import (
    A100,
    DESIGNS,
    H100,
    broken_limits,
    iso_power,
    provision,
    slowdowns,
    within,
)
from services.planner.founding_data import decode_ms
from services.planner.splitwise_data import drawn, machine_times, read_perf_model, runs_of
from services.planner.traces import read_azure
from services.sim.baselines.splitwise import (
    BLOOM_176B,
    LINK_BANDWIDTH,
    LLAMA2_70B,
    LLAMA2_70B_AS_CODED,
    TRAP_BANDWIDTH,
    SplitwiseMachine,
    SplitwiseRequest,
    SplitwiseSim,
    cluster,
)
from services.sim.baselines.splitwise_times import Curve, prediction_error

DATA = Path(__file__).parents[1] / "data"
RUNS = read_perf_model(DATA)
TIMES = machine_times(RUNS, "llama2-70b", "h100-80gb")


def mesh(num_prompt: int = 1, num_token: int = 1) -> SplitwiseSim:
    """Idle machines."""
    return SplitwiseSim(cluster(num_prompt, num_token, TIMES, TIMES, LLAMA2_70B))


def request(prompt: int = 100, output: int = 10, at: float = 0.0, idx: int = 0) -> SplitwiseRequest:
    """One request."""
    return SplitwiseRequest(idx, at, prompt, output)


def names(sim: SplitwiseSim, one: SplitwiseRequest) -> tuple[str, str]:
    """Which machines are chosen."""
    prompt, token = sim.choose(one)
    return prompt.name, token.name


# --- the performance model ----------------------------------------------------------------------


def test_curves_go_through_medians_and_on_beyond_their_ends() -> None:
    """Piecewise linear."""
    curve = Curve([(1, 10.0), (1, 30.0), (1, 11.0), (3, 21.0), (5, 21.0)])
    assert [curve.at(x) for x in (0, 1, 2, 3, 4, 9)] == [6.0, 11.0, 16.0, 21.0, 21.0, 21.0]


def test_it_predicts_unseen_runs_within_3_percent() -> None:
    """80:20, mean over the machines of the paper and over splits."""
    errors: list[float] = []
    for model in ("llama2-70b", "bloom-176b"):
        for hardware in ("a100-80gb", "h100-80gb", "h100-80gb-pcap"):
            group = runs_of(RUNS, model, hardware)
            for seed in range(5):
                mixed = random.Random(seed).sample(group, len(group))
                cut = len(mixed) * 4 // 5
                errors.append(prediction_error(mixed[:cut], mixed[cut:]))
    assert sum(errors) / len(errors) < 0.03


@pytest.mark.parametrize(
    ("model", "hardware", "rates"),
    [
        ("llama2-70b", "h100-80gb", (13182, 15235, 10887)),
        ("llama2-70b", "a100-80gb", (6366, 7244, 5782)),
        ("bloom-176b", "h100-80gb", (7745, 8128, 6305)),
    ],
)
def test_prefill_saturates_at_2048_tokens(
    model: str, hardware: str, rates: tuple[int, int, int]
) -> None:
    """Tokens a second at 1024, 2048 and 4096: why a prompt batch has no more than 2048."""
    times = machine_times(RUNS, model, hardware)
    found = [n / times.prompt_s(n) for n in (1024, 2048, 4096)]
    assert found == pytest.approx(rates, rel=1e-4)


@pytest.mark.parametrize(
    ("hardware", "steps"),
    [("h100-80gb", (30.6, 34.2, 50.2)), ("a100-80gb", (45.0, 50.4, 71.6))],
)
def test_what_batching_costs_decode(hardware: str, steps: tuple[float, ...]) -> None:
    """Llama2-70B, 512-token prompts, batches of 1, 16 and 64: 1.6 times at 64."""
    found = [decode_ms(RUNS, "llama2-70b", hardware, batch) for batch in (1, 16, 64)]
    assert tuple(round(ms, 1) for ms in found) == steps


def test_kinds_of_iterations() -> None:
    """A mixed batch costs 1.1 of its prompt curve, decodes count a token each."""
    assert TIMES.iteration_s(1000, 0) == TIMES.prompt_s(1000)
    assert TIMES.iteration_s(0, 8) == TIMES.token_s(8)
    assert TIMES.iteration_s(1000, 24) == pytest.approx(1.1 * TIMES.prompt_s(1024))


# --- routing ------------------------------------------------------------------------------------


def test_both_machines_come_from_their_pools() -> None:
    """The shortest queue, the least memory."""
    sim = mesh(2, 2)
    assert names(sim, request()) == ("prompt 0", "token 0")
    sim.machines[0].pending = 5
    sim.machines[2].reserved += 1
    assert names(sim, request()) == ("prompt 1", "token 1")


def test_8192_tokens_are_not_long_and_one_more_is() -> None:
    """And a busy machine whose queue is empty never is."""
    sim = mesh()
    prompt = sim.machines[0]
    prompt.pending = 8092
    assert names(sim, request(101))[0] == "prompt 0"
    prompt.prompts.append(request(1, idx=9))
    assert names(sim, request(100))[0] == "prompt 0"
    assert names(sim, request(101))[0] == "token 0"
    assert sim.machines[1].pool == "mixed"


def test_the_mixed_pool_comes_before_the_other_one() -> None:
    """A machine that is mixed already is taken before one more is moved."""
    sim = mesh(1, 2)
    sim.machines[0].pending = 9000
    sim.machines[0].prompts.append(request(idx=9))
    sim.choose(request())
    sim.machines[1].pending = 7
    assert names(sim, request()) == ("token 0", "token 1")
    assert [machine.pool for machine in sim.machines] == ["prompt", "mixed", "token"]


def test_a_full_token_pool_takes_from_the_prompt_pool() -> None:
    """Memory decides there; at the limit exactly it is full."""
    sim = mesh(2, 1)
    token = sim.machines[2]
    token.reserved = token.capacity - token.kv(101) - token.kv(9)
    assert names(sim, request())[1] == "prompt 0"
    assert sim.machines[0].pool == "mixed"


def test_an_empty_cluster_side_means_one_machine_does_both() -> None:
    """Only one machine in all: colocated, nothing is moved."""
    sim = mesh(1, 0)
    one = request(512, 5)
    sim.run([one])
    assert one.end_at == pytest.approx(TIMES.prompt_s(512) + 4 * TIMES.token_s(1))
    assert sim.machines[0].pool == "prompt"  # went home when it was idle
    assert sim.machines[0].used == sim.machines[0].reserved == LLAMA2_70B.weights


# --- whole runs ---------------------------------------------------------------------------------


def test_three_requests_far_apart_feel_the_curves_alone() -> None:
    """Prompt, transfer of the whole KV, decodes; every byte comes back."""
    sim = mesh()
    requests = [request(512 * (n + 1), 10 * n + 1, 100.0 * n, n) for n in range(3)]
    sim.run(requests)
    for one in requests:
        first_s = TIMES.prompt_s(one.prompt_len)
        assert one.first_at - one.at == pytest.approx(first_s)
        moved_s = LLAMA2_70B.kv_token * (one.prompt_len + 1) / LINK_BANDWIDTH
        rest_s = moved_s + one.num_decodes * TIMES.token_s(1) if one.num_decodes else 0.0
        assert one.end_at - one.first_at == pytest.approx(rest_s)
    for machine in sim.machines:
        assert machine.used == pytest.approx(machine.weights)
        assert machine.reserved == pytest.approx(machine.weights)
        assert machine.pending == 0


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_under_load(seed: int) -> None:
    """Every request ends, every byte and every pending token comes back, all machines go home."""
    lengths = read_azure(DATA, "code")
    requests = drawn(lengths, 60.0, 20.0, seed)
    sim = mesh(3, 2)
    sim.run(requests)
    for one in requests:
        assert one.at < one.first_at <= one.end_at
        assert one.num_generated == one.output_len
    for machine in sim.machines:
        assert (machine.pending, machine.pool) == (0, machine.home)
        assert machine.used == pytest.approx(machine.weights)
        assert machine.reserved == pytest.approx(machine.weights)


def machine_with(*running: SplitwiseRequest) -> SplitwiseMachine:
    """A token machine that decodes these."""
    (_, machine) = cluster(1, 1, TIMES, TIMES, LLAMA2_70B)
    for one in running:
        one.is_resident = True
    machine.running = list(running)
    return machine


def test_prompts_come_first_and_preempt_decodes() -> None:
    """2048 tokens: after a prompt of 2047 there is room for one decode; the other counts it."""
    old, new = request(idx=1), request(idx=2)
    machine = machine_with(old, new)
    machine.prompts = [request(2047, idx=3)]
    prompts, decodes = machine.select()
    assert [one.idx for one in prompts] == [3]
    assert [one.idx for one in decodes] == [1]
    assert machine.preempted == [new]
    assert new.num_preempted == 1
    assert new.is_resident


def test_who_was_passed_over_four_times_is_first() -> None:
    """Before any prompt; a single prompt over the budget runs alone."""
    patient = request(idx=1)
    machine = machine_with()
    machine.preempted = [patient]
    patient.is_resident, patient.num_preempted = True, 4
    machine.prompts = [request(3000, idx=2)]
    assert [[one.idx for one in part] for part in machine.select()] == [[], [1]]
    machine.running = []
    assert [[one.idx for one in part] for part in machine.select()] == [[2], []]


# --- provisioning -------------------------------------------------------------------------------


def test_equal_power_is_40_to_70() -> None:
    """And the two traps of their code, both ways."""
    assert iso_power(40, H100, A100) == 70
    assert LLAMA2_70B_AS_CODED.kv_token == 8 * LLAMA2_70B.kv_token
    assert pytest.approx(8.59, abs=0.005) == TRAP_BANDWIDTH / LINK_BANDWIDTH


def test_nine_limits_name_what_breaks() -> None:
    """A request alone on the reference machine is at 1; one late of ten breaks P99 alone."""
    alone = machine_times(RUNS, "llama2-70b", "a100-80gb")
    requests = [request(512, 11, 100.0 * n, n) for n in range(10)]
    for one in requests:
        one.first_at = one.at + alone.prompt_s(512)
        one.end_at = one.first_at + 10 * alone.token_s(1)
    assert {round(v, 9) for values in slowdowns(requests, alone).values() for v in values} == {1.0}
    assert broken_limits(requests, alone) == []
    requests[0].first_at = requests[0].at + 7 * alone.prompt_s(512)
    assert [text.partition(":")[0] for text in broken_limits(requests, alone)] == ["TTFT P99"]


def test_the_frontier_is_that_of_the_whole_grid() -> None:
    """By asking P + T times instead of P x T."""
    asked: list[tuple[int, int]] = []

    def is_fine(p: int, t: int) -> bool:
        asked.append((p, t))
        return 3 * p + 2 * t >= 20 and p >= 2

    found = {one.num_token: one.num_prompt for one in provision(DESIGNS["HA"], 9, 9, is_fine)}
    fine = {t: [p for p in range(1, 10) if 3 * p + 2 * t >= 20 and p >= 2] for t in range(1, 10)}
    fewest = {t: min(ps) for t, ps in fine.items() if ps}
    assert found == {t: p for t, p in fewest.items() if p < fewest.get(t - 1, 99)}
    assert len(asked) <= 2 * (9 + 9)


def test_a_budget_is_spent_on_machines_of_both_kinds() -> None:
    """As many prompt machines as what is left buys; who has the power of 40 H100 has 70 A100."""
    found = within(DESIGNS["HA"], 10.0, "cost", 3, 69)
    assert [(one.num_prompt, one.num_token) for one in found] == [
        *((3, 1), (3, 2), (2, 3), (2, 4), (2, 5), (1, 6), (1, 7))
    ]
    assert found[3].cost == 2 * 2.35 + 4
    for design, num in (("HH", 40), ("AA", 70)):
        most = within(DESIGNS[design], 70.0, "power", 99, 99)
        assert {one.num_prompt + one.num_token for one in most} == {num}


def test_coding_at_70_requests_a_second_takes_27_and_3() -> None:
    """HH, BLOOM-176B, layer-wise transfers: within two machines of the paper's 27P + 3T."""
    lengths = read_azure(DATA, "code")
    times = machine_times(RUNS, "bloom-176b", "h100-80gb")
    alone = machine_times(RUNS, "bloom-176b", "a100-80gb")

    def is_fine(num_prompt: int, num_token: int) -> bool:
        requests = drawn(lengths, 70.0, 120.0, 0)
        machines = cluster(num_prompt, num_token, times, times, BLOOM_176B)
        SplitwiseSim(machines, bandwidth=10 * LINK_BANDWIDTH).run(requests)
        return not broken_limits(requests, alone)

    assert is_fine(29, 3)
    assert not is_fine(24, 3)
