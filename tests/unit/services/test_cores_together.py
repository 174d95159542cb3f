"""The gateway's cores and the workers' together, on one event heap: no asyncio, no socket, no task,
and tokens that are exact to the last one.

If a decision were left in a shell, these tests would have to write it again.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from services.gateway.core.admission.overload import OverloadMode
from services.gateway.core.admission.tenants import Terms
from services.gateway.core.routing.pools import Pool, home_of
from services.sim.mesh import CoreAnswer, CoreMesh
from shared.errors import InvalidRequest, WorkerLost, WouldBeLate
from shared.predict.step_time import MIN_STEPS, StepFit
from shared.request import SamplingParams
from tests.support.core_mesh import MODEL, ThereAndBack, core_mesh
from tests.support.fake_reference import fake_answer

PROMPT = tuple(range(1, 42))


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a socket, a loop or a thread fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("cores decide and never wait")

    monkeypatch.setattr(socket.socket, "__init__", refuse)
    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)


def require_exact(answer: CoreAnswer, *, max_tokens: int) -> None:
    """The answer is what the model's reference computes, token by token."""
    expected, reason = fake_answer(
        answer.prompt, SamplingParams(max_tokens=max_tokens), model=MODEL
    )
    assert answer.error is None
    assert answer.token_ids == expected
    assert answer.life.finish_reason is reason


def over(*answers: CoreAnswer) -> Callable[[], bool]:
    """When all have ended."""
    return lambda: all(answer.is_over for answer in answers)


def require_nothing_left(mesh: CoreMesh) -> None:
    """Every block, slot and order comes home."""
    mesh.run(lambda: mesh.is_idle)
    mesh.check()


def test_a_whole_request() -> None:
    """Admitted, routed, reserved and computed in chunks, pushed layer by layer, joined, decoded."""
    mesh = core_mesh()
    prefill, decode = mesh.start("prefill"), mesh.start("decode")
    mesh.settle()
    answer = mesh.ask(PROMPT, max_tokens=12)
    mesh.run(over(answer))
    require_exact(answer, max_tokens=12)
    (decision,) = answer.decisions
    assert (decision.prefill, decision.decode) == (prefill.incarnation, decode.incarnation)
    assert prefill.ends.num_frames_sent >= 3 * MODEL.num_layers
    require_nothing_left(mesh)


def test_what_decode_has_is_not_sent_again() -> None:
    """The second request finds its prompt in both caches."""
    mesh = core_mesh()
    prefill, _ = mesh.start("prefill"), mesh.start("decode")
    mesh.settle()
    first = mesh.ask(PROMPT, max_tokens=3)
    mesh.run(over(first))
    num_sent = prefill.ends.num_frames_sent
    second = mesh.ask((*PROMPT, 7), max_tokens=3)
    mesh.run(over(second))
    require_exact(second, max_tokens=3)
    assert prefill.ends.num_frames_sent - num_sent == MODEL.num_layers
    require_nothing_left(mesh)


def test_many_at_once_wait_for_a_place_and_for_room() -> None:
    """More than may run at the gateway, and more than decode's pool holds."""
    mesh = core_mesh(max_running=6, num_blocks=24)
    for role in ("prefill", "prefill", "decode"):
        mesh.start(role)
    mesh.settle()
    answers = [mesh.ask((*PROMPT[number:], number), max_tokens=9) for number in range(12)]
    mesh.run(over(*answers))
    for answer in answers:
        require_exact(answer, max_tokens=9)
    assert len({answer.decisions[0].prefill for answer in answers}) == 2
    require_nothing_left(mesh)


def test_a_failover_in_mid_answer() -> None:
    """The decode worker dies with a part of the answer told: another one continues it, and the
    client sees neither a gap nor a repetition."""
    mesh = core_mesh()
    mesh.start("prefill")
    decodes = {core.incarnation: core for core in (mesh.start("decode"), mesh.start("decode"))}
    mesh.settle()
    answer = mesh.ask(PROMPT, max_tokens=40)
    mesh.run(lambda: len(answer.token_ids) >= 9)
    lost = answer.decisions[0].decode
    mesh.kill(decodes[lost])
    mesh.run(over(answer))
    require_exact(answer, max_tokens=40)
    first, second = answer.decisions
    assert second.decode == next(core for core in decodes if core != lost)
    assert second.prefill == first.prefill
    require_nothing_left(mesh)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("delay_us", range(0, 12_000, 300))
def test_a_worker_that_dies_at_any_moment(role: str, delay_us: int) -> None:
    """Before its order comes, in each chunk, with frames under way, before the acknowledgement, and
    among the first tokens of decode."""
    mesh = core_mesh()
    cores = {
        core.incarnation: core
        for core in (mesh.start(name) for name in ("prefill", "decode", "prefill", "decode"))
    }
    mesh.settle()
    answer = mesh.ask(PROMPT, max_tokens=6)
    first = answer.decisions[0]
    victim = cores[first.prefill if role == "prefill" else first.decode]
    mesh.clock.after(delay_us * 1e-6, lambda: mesh.kill(victim))
    mesh.run(over(answer))
    require_exact(answer, max_tokens=6)
    require_nothing_left(mesh)


def test_nobody_is_left_to_continue() -> None:
    """The client hears why the attempt failed, after the bounded wait for another pair."""
    mesh = core_mesh()
    mesh.start("prefill")
    decode = mesh.start("decode")
    mesh.settle()
    answer = mesh.ask(PROMPT, max_tokens=40)
    mesh.run(lambda: len(answer.token_ids) >= 2)
    mesh.kill(decode)
    died_at = mesh.clock.now
    mesh.run(over(answer))
    assert isinstance(answer.error, WorkerLost)
    assert "silent" in answer.error.message
    # Five seconds of silence in all: what it took to notice counts.
    assert 4.5 < mesh.clock.now - died_at <= 5.0
    require_nothing_left(mesh)


def test_a_role_move_in_mid_answer() -> None:
    """A worker gets the other home while it decodes: it is mixed until that answer has ended, takes
    prompts from then on, and nothing is lost."""
    mesh = core_mesh(policy="splitwise")
    prefill = mesh.start("prefill", serves_both=True)
    tokens = [mesh.start("decode", serves_both=True) for _ in range(2)]
    mesh.settle()
    before = mesh.ask(PROMPT, max_tokens=60)
    mesh.run(lambda: len(before.token_ids) >= 5)
    moving = next(it for it in tokens if it.incarnation == before.decisions[0].decode)
    staying = next(it for it in tokens if it is not moving)
    wanted = mesh.move(moving, "prompt")
    mesh.run(lambda: home_of(mesh.worker(moving)) == wanted)
    assert not before.is_over
    assert mesh.pool(moving) is Pool.MIXED
    with pytest.raises(InvalidRequest, match="last one"):
        mesh.move(staying, "prompt")
    during = mesh.ask(PROMPT[1:], max_tokens=4)
    mesh.run(over(before, during))
    assert during.decisions[0].decode == staying.incarnation
    mesh.run(lambda: mesh.pool(moving) is Pool.PROMPT)
    after = [mesh.ask((*PROMPT[2:], number), max_tokens=4) for number in range(2)]
    mesh.run(over(*after))
    prompts = {answer.decisions[0].prefill for answer in after}
    assert prompts == {prefill.incarnation, moving.incarnation}
    assert {answer.decisions[0].decode for answer in after} == {staying.incarnation}
    require_exact(before, max_tokens=60)
    for answer in (during, *after):
        require_exact(answer, max_tokens=4)
    require_nothing_left(mesh)


def test_workers_that_have_promised_each_other_their_room_go_on() -> None:
    """Both have promised nearly all their room before the other's prompts got any: none can be
    computed, until the newest promises give way; those requests are tried again."""
    mesh = core_mesh(policy="splitwise", num_blocks=26)
    workers = [mesh.start(role, serves_both=True) for role in ("prefill", "decode")]
    mesh.settle()
    mesh.router.policy = ThereAndBack(num_alone=2)
    answers = [mesh.ask((number,), max_tokens=4) for number in range(2)]
    mesh.run(lambda: all(it.num_answers for it in workers))
    answers += [mesh.ask((*PROMPT, number), max_tokens=4) for number in range(4)]
    mesh.run(over(*answers[:2]))
    assert [it.leases.statistics().num_open for it in workers] == [2, 2]
    mesh.run(over(*answers))
    assert 2 < mesh.clock.now < 4
    for answer in answers:
        require_exact(answer, max_tokens=4)
    require_nothing_left(mesh)


@pytest.mark.parametrize(
    ("num_blocks", "num_answers", "gives_way"), [(36, 120, False), (24, 4, True)]
)
def test_workers_full_of_prompts_that_wait_for_each_other_go_on(
    num_blocks: int, num_answers: int, gives_way: bool
) -> None:
    """Computed prompts fill both. With memory for two, what comes free takes the other's KV; with
    memory for one the newest gives way after two seconds, and is tried again."""
    mesh = core_mesh(policy="splitwise", num_blocks=num_blocks, max_running=num_answers)
    workers = [mesh.start(role, serves_both=True) for role in ("prefill", "decode")]
    mesh.settle()
    mesh.router.policy = ThereAndBack()
    prompts = [tuple(range(number, number + 60)) for number in range(num_answers)]
    answers: list[CoreAnswer] = []
    for prompt in prompts:
        answers.append(mesh.ask(tuple(it % MODEL.vocab_size for it in prompt), max_tokens=8))
        if len(answers) == 2:  # before others, for whom all room would be promised
            mesh.run(lambda: all(it.work.num_steps for it in workers))
    mesh.run(over(*answers))
    for answer in answers:
        require_exact(answer, max_tokens=8)
    assert (mesh.clock.now > 2) is gives_way
    assert any(len(answer.decisions) > 1 for answer in answers) is gives_way
    require_nothing_left(mesh)


def test_two_runs_are_one() -> None:
    """Every event at the same instant, whatever the hashes are: what a simulator needs."""

    def played() -> tuple[float, list[list[int]], list[object]]:
        mesh = core_mesh(policy="splitwise", num_blocks=24)
        workers = [mesh.start(role, serves_both=True) for role in ("prefill", "decode", "decode")]
        mesh.settle()
        answers = [mesh.ask(PROMPT[number:], max_tokens=9) for number in range(6)]
        mesh.run(lambda: len(answers[0].token_ids) >= 2)
        mesh.kill(workers[1])
        mesh.run(over(*answers))
        for answer in answers:
            require_exact(answer, max_tokens=9)
        decisions = [decision for answer in answers for decision in answer.decisions]
        return mesh.clock.now, [answer.token_ids for answer in answers], [*decisions]

    assert played() == played()


def test_tokens_of_an_answer_are_its_tenant_s_too() -> None:
    """Whoever gets long answers waits until the other has had as much."""
    mesh = core_mesh(max_running=1)
    for kind in ("prefill", "decode"):
        mesh.start(kind)
    mesh.settle()
    long, short = Terms(tenant="long"), Terms(tenant="short")
    answers = {
        name: [mesh.ask(PROMPT, terms, max_tokens=most) for _ in range(4)]
        for name, terms, most in (("long", long, 60), ("short", short, 2))
    }
    mesh.run(over(*answers["long"], *answers["short"]))
    second, last = answers["long"][1], answers["short"][-1]
    assert last.sent_at < second.sent_at
    require_nothing_left(mesh)


def test_at_the_second_stage_an_answer_is_refused_that_its_prompt_was_computed_for() -> None:
    """``--overload stage`` looks at decode when the first token is there, and hands nothing on."""
    mesh, known = core_mesh(), StepFit(constant_s=0.002, num_steps=MIN_STEPS)
    for kind in ("prefill", "decode"):
        mesh.start(kind).engine.fits = lambda: (known, known)
    mesh.settle()
    mesh.run(over(mesh.ask(PROMPT, max_tokens=40)))  # after which reports tell what steps take
    mesh.overload.mode = OverloadMode.STAGE
    answer = mesh.ask(PROMPT, Terms(tpot_s=1e-9), max_tokens=12)
    mesh.run(over(answer))
    assert isinstance(answer.error, WouldBeLate)
    assert (len(answer.decisions), answer.token_ids) == (1, [])
    require_nothing_left(mesh)
