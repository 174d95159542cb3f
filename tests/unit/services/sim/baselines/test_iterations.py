"""Orca's and Sarathi-Serve's rules, as invariants of drawn runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from services.sim.baselines.iterations import OrcaPolicy, Part, SarathiPolicy, Stream, serve

BASE_S, TOKEN_S, CONTEXT_S = 0.010, 1e-4, 2e-8


def step_s(batch: Sequence[Part]) -> float:
    """Affine in tokens and in what they attend to."""
    tokens = sum(part.num_tokens for part in batch)
    attended = sum(part.num_tokens * (part.start + part.num_tokens / 2) for part in batch)
    return BASE_S + TOKEN_S * tokens + CONTEXT_S * attended


def drawn(seed: int, num: int = 60, rate: float = 8.0, longest: int = 1500) -> list[Stream]:
    """Requests by Poisson."""
    rng = random.Random(seed)
    at, streams = 0.0, list[Stream]()
    for idx in range(num):
        streams.append(Stream(idx, at, rng.randint(1, longest), rng.randint(1, 60)))
        at += rng.expovariate(rate)
    return streams


def check_finished(streams: Sequence[Stream]) -> None:
    """Everybody has all tokens, in order, after arriving."""
    for stream in streams:
        assert len(stream.token_times) == stream.output_len
        assert stream.token_times == sorted(stream.token_times)
        assert stream.token_times[0] > stream.at


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_orca_is_first_come_first_served_by_iterations(seed: int, workers: int) -> None:
    """Who came earlier has run at least as many iterations; reservations keep their bound."""
    streams = drawn(seed)
    policy = OrcaPolicy(max_batch=8, num_slots=6000, num_workers=workers)

    def watch(batch: Sequence[Part]) -> None:
        assert len(batch) <= 8
        assert policy.num_reserved <= 6000
        unfinished = [s for s in streams if not s.is_finished and s.num_iterations]
        for earlier, later in itertools.pairwise(unfinished):
            # Those under way are an iteration further than their count.
            early = earlier.num_iterations + earlier.is_running
            early += any(part.stream is earlier for part in batch)
            assert early >= later.num_iterations + later.is_running

    serve(policy, streams, step_s, watch)
    check_finished(streams)
    assert policy.num_reserved == 0
    firsts = [stream.token_times[0] for stream in streams]
    assert firsts == sorted(firsts)


def test_orca_lets_nobody_overtake_who_does_not_fit() -> None:
    """The small one behind a large one waits, though there is room for it."""
    streams = [Stream(0, 0.0, 60, 20), Stream(1, 0.001, 60, 20), Stream(2, 0.002, 1, 1)]
    serve(OrcaPolicy(max_batch=8, num_slots=100), streams, step_s)
    assert streams[2].token_times[0] >= streams[1].token_times[0] >= streams[0].token_times[-1]


def test_orca_returns_what_is_finished_at_once() -> None:
    """A short answer does not wait for the long one of its batch; a newcomer joins in between."""
    streams = [Stream(0, 0.0, 10, 50), Stream(1, 0.0, 10, 2), Stream(2, 0.05, 10, 2)]
    serve(OrcaPolicy(max_batch=4, num_slots=1000), streams, step_s)
    assert streams[1].token_times[-1] < streams[2].token_times[-1] < streams[0].token_times[-1]


@pytest.mark.parametrize("budget", [64, 256, 512])
@pytest.mark.parametrize("seed", range(6))
def test_sarathi_never_stalls_a_decode(seed: int, budget: int) -> None:
    """Every decode is in every iteration, and so no gap is longer than the budget allows."""
    streams = drawn(seed)
    policy = SarathiPolicy(budget)
    longest = 0.0

    def watch(batch: Sequence[Part]) -> None:
        nonlocal longest
        tokens = sum(part.num_tokens for part in batch)
        decodes = [part for part in batch if part.stream.is_decoding]
        assert tokens <= max(budget, len(decodes))
        longest = max(longest, step_s(batch))
        running = {s.idx for s in streams if s.token_times and not s.is_finished}
        assert running == {part.stream.idx for part in decodes}

    serve(policy, streams, step_s, watch)
    check_finished(streams)
    worst = BASE_S + TOKEN_S * max(budget, 128) + CONTEXT_S * (budget + 128) * 1600
    for stream in streams:
        assert all(gap <= longest + 1e-9 for gap in stream.gaps)
        assert all(gap <= worst for gap in stream.gaps)
    firsts = [stream.token_times[0] for stream in streams]
    assert firsts == sorted(firsts)


def test_whole_prompts_stall_decodes_and_chunks_do_not() -> None:
    """Why: the worst gap of Orca's batches is many times that of a budget of 256."""
    worst: list[float] = []
    for policy in (OrcaPolicy(64, 1 << 40), SarathiPolicy(256)):
        streams = drawn(1, longest=8000, rate=3.0)
        serve(policy, streams, step_s)
        worst.append(max(gap for stream in streams for gap in stream.gaps))
    assert worst[0] > 8 * worst[1]


def test_only_the_last_chunk_yields_a_token() -> None:
    """1000 tokens in chunks of 300: four iterations to the first token."""
    stream = Stream(0, 0.0, 1000, 3)
    parts: list[int] = []
    serve(SarathiPolicy(300), [stream], step_s, lambda batch: parts.append(batch[0].num_tokens))
    assert parts == [300, 300, 300, 100, 1, 1]


@pytest.mark.parametrize(("chunk", "most"), [(512, 0.25), (2048, 0.05)])
def test_what_chunks_cost(chunk: int, most: float) -> None:
    """Reading the KV of earlier chunks anew, and a step's fixed cost: little at 512."""

    def first_token_s(budget: int) -> float:
        stream = Stream(0, 0.0, 8192, 1)
        serve(SarathiPolicy(budget), [stream], step_s)
        return stream.token_times[0]

    assert 0 < first_token_s(chunk) / first_token_s(8192) - 1 <= most


def test_a_relaxed_limit_serves_at_least_as_much() -> None:
    """Capacity under a limit of the gaps' P99 grows with the limit."""

    def capacity(limit_s: float) -> float:
        best = 0.0
        for rate in (0.5, 1.0, 2.0, 4.0, 8.0):
            streams = drawn(3, rate=rate, longest=3000)
            serve(SarathiPolicy(512), streams, step_s)
            gaps = sorted(gap for stream in streams for gap in stream.gaps)
            waits = sorted(stream.token_times[0] - stream.at for stream in streams)
            if gaps[int(0.99 * len(gaps))] <= limit_s and waits[len(waits) // 2] <= 2.0:
                best = rate
        return best

    strict, relaxed = capacity(0.02), capacity(0.10)
    assert strict <= relaxed
    assert relaxed > 0
