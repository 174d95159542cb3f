"""Routing policies and the peer table they read."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest

from services.gateway.core.routing.peer_table import OwnModel, PeerTable
from services.gateway.core.routing.router import Router
from services.gateway.core.routing.routing import (
    POLICIES,
    route,
)
from services.gateway.core.routing.sides import RouteRequest
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.config import RoutingPolicyName
from shared.errors import IncompatiblePeer
from shared.ids import Incarnation
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from tests.support.routing import REQUEST, a_mesh, a_worker, decide


def pairs_of(table: PeerTable) -> list[tuple[int, int]]:
    """Every pair that may be chosen, in joining order."""
    sides = table.sides
    pairs = [
        (int(prefill.incarnation), int(sides.decodes[place].incarnation))
        for idx, prefill in enumerate(sides.prefills)
        for place in sides.partners_of(idx)
    ]
    assert len(pairs) == sides.num_pairs
    return pairs


def pairs_chosen(policy_name: str, table: PeerTable, n: int) -> Counter[tuple[int, int]]:
    policy = POLICIES[policy_name]()
    chosen: Counter[tuple[int, int]] = Counter()
    for i in range(n):
        decision = decide(policy, table, (i * 0.37) % 1)
        chosen[(decision.prefill, decision.decode)] += 1
    return chosen


@pytest.mark.parametrize("name", ["round_robin", "least_loaded"])
def test_idle_workers_share_the_work_equally(name: str) -> None:
    """Round robin and least loaded use each prefill and each decode worker equally often."""
    chosen = pairs_chosen(name, a_mesh(), 40)
    for side in (0, 1):
        by_worker: Counter[int] = Counter()
        for pair, count in chosen.items():
            by_worker[pair[side]] += count
        assert set(by_worker.values()) == {20}


@pytest.mark.parametrize("name", ["round_robin", "least_loaded"])
def test_one_request_takes_one_turn(name: str) -> None:
    """Also one for which a better pair is to be made first: it would have counted twice."""
    table, policy = PeerTable(), POLICIES[name]()
    everybody = [a_worker(Role.PREFILL, 1 + idx, serves=tuple(Role)) for idx in range(3)]
    for worker in everybody:
        table.join(worker)
        table.report(worker, WorkerStatus(home=Role.DECODE))
    first, second, third = (worker.incarnation for worker in everybody)
    status = WorkerStatus(home=Role.DECODE, paired=frozenset({third}))
    table.report(everybody[1], status)
    router = Router(policy, table, index_bytes=0)
    for turn in range(1, 4):
        decision, wanted = router.route(REQUEST, 0.0, 0.0)
        assert decision is not None
        assert (decision.prefill, decision.decode) == (second, third)
        if name == "round_robin":
            assert policy.memory == turn
        else:
            assert policy.memory == {second: turn, third: turn}
            assert [it.prefill for it in wanted] == [first]  # it has not had its turn


def test_who_has_left_is_forgotten() -> None:
    """By the policy, too, whose records it would be in for ever; and by those asked to pair up with
    it."""
    table, policy = a_mesh(), POLICIES["least_loaded"]()
    router = Router(policy, table, index_bytes=0)
    prefill, _, decode, _ = table.workers
    for _ in range(2):
        decision, _ = router.route(REQUEST, 0.0, 0.0)
    remembered = decision.seen.memory if decision and decision.seen else None
    assert table.ask_for(prefill.incarnation, decode.incarnation, 0.0)
    for worker in (decode, prefill):
        router.left(worker)
        table.leave(worker.incarnation)
    assert policy.memory == {2: 2, 101: 2}
    assert remembered == {1: 1, 100: 1}  # a record stays what it was
    assert not prefill.asked


def test_random_reaches_every_pair() -> None:
    """The random number decides alone."""
    assert len(pairs_chosen("random", a_mesh(), 100)) == 4


def test_least_loaded_joins_the_shortest_queue() -> None:
    """Pending tokens decide for prefill, the share of reserved blocks for decode."""
    table = a_mesh()
    busy_prefill, idle_prefill = table.all(Role.PREFILL)
    busy_decode, idle_decode = table.all(Role.DECODE)
    busy_prefill.report(replace(busy_prefill.status, pending_tokens=500))
    busy_decode.report(replace(busy_decode.status, reserved_blocks=10))
    decision = decide("least_loaded", table)
    assert (decision.prefill, decision.decode) == (
        idle_prefill.incarnation,
        idle_decode.incarnation,
    )
    assert decision.scores.prefills == [500, 0]
    assert decision.scores.decodes == [busy_decode.reserved_share, 0.0]


@pytest.mark.parametrize("seed", range(40))
def test_two_sides_choose_as_the_list_of_all_pairs_would(seed: int) -> None:
    """Partly paired workers of several sizes and loads, some colocated, some to be avoided: the
    choice is the best of all pairs that can take the request, and ``random`` reaches each of them
    equally often."""
    source = random.Random(seed)
    table = PeerTable()
    decodes = [Incarnation(100 + i) for i in range(source.randrange(1, 6))]
    for incarnation in (*range(1, source.randrange(1, 6)), *decodes):
        role = Role.DECODE if incarnation in decodes else Role.PREFILL
        partners = source.sample(decodes, source.randrange(len(decodes) + 1))
        if role is Role.DECODE:
            partners = [incarnation] if source.random() < 0.3 else []
        worker = a_worker(role, incarnation, num_blocks=source.choice([4, 8, 64]))
        worker.report(
            WorkerStatus(
                pending_tokens=source.choice([0, 10, 20]),
                reserved_blocks=source.choice([0, 1, 2]),
                paired=frozenset(map(Incarnation, partners)),
            )
        )
        table.join(worker)
    everyone = [*table.all(Role.PREFILL), *table.all(Role.DECODE)]
    avoid = frozenset(w.incarnation for w in source.sample(everyone, len(everyone) // 3))
    request = RouteRequest(num_tokens=source.choice([1, 70, 127]), max_new_tokens=1, avoid=avoid)

    pairs = [
        (prefill, decode)
        for prefill in everyone
        for decode in table.all(Role.DECODE)
        if decode.incarnation in prefill.status.paired
        and prefill.blocks_for(request.num_tokens) <= prefill.num_blocks
        and decode.blocks_for(request.num_tokens + 1) <= decode.num_blocks
    ]
    counts = [sum(worker.incarnation in avoid for worker in pair) for pair in pairs]
    pairs = [pair for pair, n in zip(pairs, counts, strict=True) if n == min(counts)]
    if not pairs:
        assert route(POLICIES["random"](), request, table.sides, 0.0) is None
        return

    policy = POLICIES["least_loaded"]()
    last_chosen: Counter[int] = Counter()
    for turn in range(1, 8):
        decision = decide(policy, table, request=request)
        want = min(
            pairs,
            key=lambda pair: (
                pair[0].pending_tokens,
                pair[1].reserved_blocks / pair[1].num_blocks,
                last_chosen[pair[0].incarnation],
                last_chosen[pair[1].incarnation],
            ),
        )
        assert (decision.prefill, decision.decode) == tuple(w.incarnation for w in want)
        last_chosen |= {worker.incarnation: turn for worker in want}
    reached: Counter[tuple[int, int]] = Counter()
    for pick in range(len(pairs)):
        decision = decide("random", table, (pick + 0.5) / len(pairs), request)
        reached[decision.prefill, decision.decode] += 1
    assert reached == {(p.incarnation, d.incarnation): 1 for p, d in pairs}


def test_partners_follow_who_joins_leaves_and_reports() -> None:
    """A pair may be named before its decode worker joins; a place that is free is used again."""
    table = a_mesh(num_prefill=2, num_decode=1)
    first, second = table.all(Role.PREFILL)
    table.report(first, WorkerStatus(paired=frozenset({Incarnation(100), Incarnation(200)})))
    assert pairs_of(table) == [(1, 100), (2, 100)]
    table.leave(Incarnation(100))
    assert pairs_of(table) == []
    table.join(a_worker(Role.DECODE, 200))
    assert pairs_of(table) == [(1, 200)]
    assert table.report(second, WorkerStatus(paired=frozenset({Incarnation(200)})))
    assert pairs_of(table) == [(1, 200), (2, 200)]
    again = a_worker(Role.PREFILL, 1)
    table.join(again)
    assert pairs_of(table) == [(2, 200)]
    table.report(again, WorkerStatus(paired=frozenset({Incarnation(200)})))
    assert pairs_of(table) == [(1, 200), (2, 200)]


def test_a_report_of_load_changes_nobodys_usability() -> None:
    """Whatever its numbers; draining does, and another list of pairs."""
    table = a_mesh(num_prefill=1)
    (worker,) = table.all(Role.PREFILL)
    pairs = worker.status.paired
    sides = table.sides
    assert not table.report(worker, WorkerStatus(pending_tokens=9, paired=frozenset(pairs)))
    assert table.sides is sides
    assert table.report(worker, WorkerStatus(is_draining=True, paired=pairs))
    assert pairs_of(table) == []
    assert table.report(worker, WorkerStatus(paired=pairs))
    assert pairs_of(table) == [(1, 100), (1, 101)]


def test_a_worker_that_failed_is_avoided_while_another_is_there() -> None:
    """With a spare it is left out; alone it is used again."""
    table = a_mesh(num_prefill=1)
    for _ in range(3):
        assert decide("round_robin", table, avoid=frozenset({Incarnation(100)})).decode == 101
    decide("random", table, avoid=frozenset(Incarnation(i) for i in (1, 100, 101)))


def test_only_pairs_whose_canary_crossed_are_used() -> None:
    """A prefill worker that reaches no decode worker takes no work, and the reason is said."""
    table = a_mesh(num_prefill=1)
    table.report(table.all(Role.PREFILL)[0], WorkerStatus())
    assert pairs_of(table) == []
    assert "has reached a decode worker" in table.why_not_ready()


def a_colocated_worker(incarnation: int, **status: int) -> Worker:
    worker = a_worker(Role.DECODE, incarnation)
    worker.report(WorkerStatus(paired=frozenset({worker.incarnation}), **status))
    return worker


def test_a_colocated_worker_is_a_pair_with_itself() -> None:
    """Alone it makes the mesh ready; whoever has the shortest queue of prompts is chosen; a
    prefill worker that reaches it is a pair with it, too."""
    table = PeerTable()
    assert table.why_not_ready() == "no prefill worker has joined"
    busy, idle = a_colocated_worker(1, pending_tokens=10), a_colocated_worker(2)
    table.join(busy)
    table.join(idle)
    assert pairs_of(table) == [(1, 1), (2, 2)]
    assert table.why_not_ready() == ""
    decision = decide("least_loaded", table)
    assert decision.is_colocated
    assert decision.decode == idle.incarnation

    prefill = a_worker(Role.PREFILL, 3)
    prefill.status = WorkerStatus(paired=frozenset({busy.incarnation}))
    table.join(prefill)
    assert pairs_of(table) == [(1, 1), (2, 2), (3, 1)]
    idle.is_connected = False
    busy.is_connected = False
    table.note_usability()
    assert "no decode worker is usable" in table.why_not_ready()


def test_a_colocated_worker_that_is_not_usable_is_said_to_be_so() -> None:
    """And not that a prefill worker is missing, which none needs."""
    table = PeerTable()
    worker = a_colocated_worker(1)
    worker.is_connected = False
    table.join(worker)
    assert "is usable" in table.why_not_ready()


def test_a_request_larger_than_a_decode_pool_finds_no_pair() -> None:
    """64 blocks of 16 hold 1,023 prompt tokens and the next."""
    sides = a_mesh().sides
    policy = POLICIES["random"]()
    fits = RouteRequest(num_tokens=1023, max_new_tokens=1)
    too_large = RouteRequest(num_tokens=1024, max_new_tokens=1)
    assert route(policy, fits, sides, 0.0) is not None
    assert route(policy, too_large, sides, 0.0) is None


@pytest.mark.parametrize("state", ["no session", "silent", "draining"])
def test_unusable_workers_get_nothing_new(state: str) -> None:
    """No session, silence, or draining each take a worker out of every pair."""
    table = a_mesh(num_prefill=1)
    prefill = table.all(Role.PREFILL)[0]
    if state == "draining":
        table.report(prefill, WorkerStatus(is_draining=True, paired=prefill.status.paired))
    else:
        if state == "silent":
            prefill.is_silent = True
        else:
            prefill.is_connected = False
        table.note_usability()
    assert pairs_of(table) == []


def test_a_worker_with_another_model_or_layout_is_refused() -> None:
    """The sentence names the difference and the remedy."""
    table = a_mesh(num_prefill=1, num_decode=0)
    other_model = ModelSpec(
        name="x", fingerprint=b"g" * 32, vocab_size=100, max_model_len=512, dtype="float32",
        engine="torch",
    )  # fmt: skip
    with pytest.raises(IncompatiblePeer, match=r"\[mesh\] model = .* \(--model, PDMESH_MODEL\)"):
        table.join(a_worker(Role.DECODE, 7, model=other_model))
    other_layout = KvLayout(dtype="bfloat16", num_layers=2, num_kv_heads=2, head_dim=8)
    with pytest.raises(IncompatiblePeer, match="dtype"):
        table.join(a_worker(Role.DECODE, 7, layout=other_layout))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": "fake"}, "engine: this decode worker has 'fake', the mesh has 'torch': set "
         "[mesh] engine = 'torch' here (--engine, PDMESH_ENGINE)"),
        ({"dtype": "bfloat16"}, "dtype: this decode worker has 'bfloat16', the mesh has 'float32'"),
        ({"name": "other"}, "model: this decode worker has 'other', the mesh has 'm'"),
        ({}, "model: this decode worker has 'm' with fingerprint 6767"),
        ({"vocab_size": 77}, "model: this decode worker has 'm' with 77 tokens, the gateway has "
         "the tokenizer of '/models/m' with 100"),
    ],
)  # fmt: skip
def test_what_must_agree_is_named_with_both_values(change: dict[str, object], words: str) -> None:
    """And with the setting that mends it; the gateway's own model counts even for the first."""
    table = PeerTable(OwnModel(name="/models/m", vocab_size=100))
    table.join(a_worker(Role.PREFILL, 1))
    fields: dict[str, object] = {
        "name": "m", "fingerprint": b"g" * 32, "vocab_size": 100, "max_model_len": 512,
        "dtype": "float32", "engine": "torch",
    }  # fmt: skip
    stranger = a_worker(Role.DECODE, 2, model=ModelSpec(**(fields | change)))  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePeer) as caught:
        table.join(stranger)
    assert words in caught.value.message
    assert "[mesh] " in caught.value.message
    assert len(table) == 1
    with pytest.raises(IncompatiblePeer, match="the gateway has the tokenizer"):
        PeerTable(OwnModel(name="x", vocab_size=99)).join(a_worker(Role.PREFILL, 1))


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("torch", "vllm 0.32.0", "computes with 'vllm 0.32.0', the mesh with 'torch'"),
        ("torch", "torch amx", "where some CPUs have AMX and others not, --kernels avx512"),
        ("vllm 0.32.0", "vllm 0.32.0 amx", "not, --kernels avx512, or of vllm --dtype float32"),
        ("vllm 0.32.1", "vllm 0.32.0", "computes with 'vllm 0.32.0', the mesh with 'vllm 0.32.1'"),
    ],
)
def test_engines_that_differ_serve_together_only_if_told_to(
    ours: str, theirs: str, words: str
) -> None:
    """They round differently: by default the second one is refused, and told the flag."""
    fields = {"name": "m", "fingerprint": b"f" * 32, "vocab_size": 100, "max_model_len": 512}
    workers = [
        a_worker(role, idx, model=ModelSpec(**fields, dtype="float32", engine=engine))  # type: ignore[arg-type]
        for idx, (role, engine) in enumerate(((Role.PREFILL, ours), (Role.DECODE, theirs)), 1)
    ]
    strict = PeerTable(OwnModel(name="m", vocab_size=100))
    strict.join(workers[0])
    with pytest.raises(IncompatiblePeer) as caught:
        strict.join(workers[1])
    assert words in caught.value.message
    lenient = PeerTable(OwnModel(name="m", vocab_size=100, allow_mixed_engines=True))
    for worker in workers:
        lenient.join(worker)
    fake = a_worker(Role.DECODE, 3, model=ModelSpec(**fields, dtype="float32", engine="fake"))  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePeer, match="engine"):
        lenient.join(fake)


def test_settings_that_make_another_model_of_one_folder_are_named() -> None:
    """vLLM computes another function with another --max-model-len for some models."""
    table = PeerTable()
    first, second = (
        ModelSpec(
            name="m", fingerprint=bytes([idx]) * 32, vocab_size=100, max_model_len=512,
            dtype="float32", engine="vllm 0.32.0",
        )
        for idx in (1, 2)
    )  # fmt: skip
    table.join(a_worker(Role.PREFILL, 1, model=first))
    words = r"one name \(or other --max-model-len, --vllm-args\): copy"
    with pytest.raises(IncompatiblePeer, match=words):
        table.join(a_worker(Role.DECODE, 2, model=second))


def test_fake_engines_of_another_context_are_told_so() -> None:
    """Their fingerprint counts it."""
    table = PeerTable()
    fields = {"name": "fake", "vocab_size": 100, "dtype": "uint8", "engine": "fake"}
    for incarnation, length in ((1, 512), (2, 256)):
        model = ModelSpec(fingerprint=bytes([incarnation]) * 32, max_model_len=length, **fields)  # type: ignore[arg-type]
        worker = a_worker(Role.DECODE, incarnation, model=model)
        if incarnation == 1:
            table.join(worker)
            continue
        with pytest.raises(IncompatiblePeer, match=r"max_model_len: .* has 256, the mesh has 512"):
            table.join(worker)


def test_every_policy_can_be_chosen_and_every_choice_is_a_policy() -> None:
    """The names that settings take are those of the policies."""
    assert set(get_args(RoutingPolicyName)) == set(POLICIES)


@pytest.mark.parametrize("role", list(Role))
def test_a_worker_with_a_shorter_context_gets_no_answer_that_was_let_in_before_it(
    role: Role,
) -> None:
    """It would refuse the prompt, or end the answer early: one that has failed on another worker,
    or has waited, is not for it."""
    table = a_mesh(1, 1)
    (large,) = table.all(role)
    small = a_worker(role, 7, model=replace(large.model, max_model_len=512))
    table.join(small)
    if role is Role.DECODE:
        (prefill,) = table.all(Role.PREFILL)
        pairs = frozenset({large.incarnation, small.incarnation})
        table.report(prefill, WorkerStatus(paired=pairs))
    else:
        table.report(small, WorkerStatus(paired=large.status.paired))
    assert table.sides.num_pairs == 2
    longer = RouteRequest(num_tokens=512, max_new_tokens=100)
    for request, chosen in ((REQUEST, (large, small)), (longer, (large,))):
        policy = POLICIES["round_robin"]()
        decisions = [decide(policy, table, request=request) for _ in range(4)]
        found = {it.prefill if role is Role.PREFILL else it.decode for it in decisions}
        assert found == {worker.incarnation for worker in chosen}
    large.is_connected = False
    table.note_usability()
    assert route(POLICIES["round_robin"](), longer, table.sides, 0.0) is None
