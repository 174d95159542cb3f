"""Prefill and decode together, in virtual time: what goes wrong, and that nothing leaks of it.

Every mesh checks at its end that all pools are exactly full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared import wire
from shared.engine.fake import FakeTiming
from shared.errors import (
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    LeaseLost,
    MeshError,
    NoBlocks,
    Overloaded,
    RemoteProtocolError,
    ShuttingDown,
    TransferFailed,
    WorkerLost,
)
from shared.ids import Incarnation
from shared.messages import codec
from shared.messages.columns import pack_u32
from shared.request import SamplingParams
from tests.support.fake_gateway import FakeRequest
from tests.support.loopback import LoopbackSettings
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import MODEL, a_prompt, expected, worker_mesh

SLOW = FakeTiming(base_s=0.1)
SLOW_LINK = LoopbackSettings(latency_s=0.001, bytes_per_s=20_000)

PHASES: dict[str, Callable[[FakeRequest], object]] = {
    "at once": lambda r: True,
    "granted": lambda r: r.granted,
    "first token sent, KV still moving": lambda r: r.token,
    "joined": lambda r: r.joined,
    "in mid-decode": lambda r: len(r.tokens) > 5,
    "finished": lambda r: r.finish and r.done,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("legs", ["both", "prefill first", "decode first"])
@virtual_time
async def test_a_cancel_in_any_phase_frees_everything(phase: str, legs: str) -> None:
    """Within a step, but for blocks that a transfer may still touch; the next request is exact."""
    prompt = a_prompt(300)
    settings = {"token_budget": 100, "group_kib": 1}
    async with worker_mesh(timing=SLOW, fabric=SLOW_LINK, prefill=settings) as mesh:
        request = mesh.start(prompt, 20)
        await request.until(PHASES[phase])
        if legs != "decode first":
            request.cancel_prefill()
        if legs == "decode first":
            request.cancel_decode()
            await mesh.gateway.until(lambda: mesh.decodes[0].pool.num_held == 0)
            request.cancel_prefill()
        elif legs == "prefill first":
            await mesh.gateway.until(lambda: mesh.prefills[0].pool.num_held == 0)
        if legs != "decode first":
            request.cancel_decode()
        await mesh.idle()
        mesh.assert_pools_full()
        other = a_prompt(30, seed=5)
        assert await mesh.start(other, 5).finished() == expected(other, 5)


@virtual_time
async def test_a_reservation_that_ends_before_its_transfer_opens_refuses_it() -> None:
    """Prefill's open comes to a decode worker that was told to forget it, and is refused then, not
    5 s later: nothing stays open at either end."""
    async with worker_mesh(timing=SLOW, fabric=SLOW_LINK) as mesh:
        requests = [mesh.start(a_prompt(300, seed=number), 20) for number in range(8)]
        for request in requests:
            request.cancel_decode()
        async with asyncio.timeout(1.0):
            await mesh.gateway.until(lambda: all(request.errors for request in requests))
        assert mesh.num_transfers == 0
        await mesh.idle()  # a step that runs is not stopped
        mesh.assert_pools_full()


@virtual_time
async def test_a_cancelled_request_stops_within_one_step() -> None:
    """Decode computes at most the step that ran when the cancel came."""
    async with worker_mesh(timing=SLOW) as mesh:
        request = mesh.start(a_prompt(20), 500)
        await request.until(lambda r: len(r.tokens) > 3)
        scheduler = mesh.decodes[0].worker.scheduler
        before = scheduler.statistics().num_steps
        request.cancel_decode()
        await mesh.gateway.until(lambda: mesh.decodes[0].pool.num_held == 0)
        assert scheduler.statistics().num_steps <= before + 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_lost_gateway_session_cancels_its_requests_only(role: str) -> None:
    """The other gateway's answers go on as if nothing was."""
    prompts = [a_prompt(300, seed=i) for i in range(2)]
    async with worker_mesh(timing=SLOW, prefill={"token_budget": 20}) as mesh:
        request = mesh.start(prompts[0], 30)
        other = mesh.start(prompts[1], 30, by=mesh.other_gateway, request_id=b"o" * 16)
        running = mesh.prefills[0] if role == "prefill" else mesh.decodes[0]
        if role == "prefill":
            scheduler = running.worker.scheduler
            await mesh.gateway.until(lambda: scheduler.statistics().num_running)
        else:
            await request.until(lambda r: len(r.tokens) > 2)
        loop, worker = asyncio.get_running_loop(), running.worker
        mesh.gateway.sessions[running.incarnation].reset()
        reset_at = loop.time()
        await mesh.other_gateway.until(
            lambda: (
                (worker.requests.num_prompts if role == "prefill" else worker.requests.num_answers)
                == 1
            )
        )
        assert loop.time() - reset_at < 0.6  # a status at the latest
        if role == "decode":
            request.cancel_prefill()
        else:
            request.cancel_decode()
        assert await other.finished() == expected(prompts[1], 30)
        assert len(request.tokens) < 30


@virtual_time
async def test_a_silent_gateway_is_dead_after_three_seconds_and_is_joined_again() -> None:
    """Its sequences are cancelled by the worker itself; the worker rejoins with a fresh stream."""
    async with worker_mesh(timing=SLOW) as mesh:
        loop = asyncio.get_running_loop()
        decode = mesh.decodes[0]
        request = mesh.start(a_prompt(40), 1000)
        await request.until(lambda r: len(r.tokens) > 2)
        num_joins = mesh.gateway.num_joins
        session = mesh.gateway.sessions[decode.incarnation]
        session.is_silent = True
        began_at = loop.time()
        await mesh.gateway.until(lambda: decode.pool.num_held == 0)
        assert 2.5 <= loop.time() - began_at <= 4.1
        assert not session.is_open
        await mesh.gateway.until(lambda: mesh.gateway.num_joins > num_joins)


@virtual_time
async def test_a_gateway_that_does_not_read_is_dropped_and_slows_nobody() -> None:
    """Its outbox is bounded: beyond the bound the session ends and its requests are cancelled."""
    many_bytes = SamplingParams(max_tokens=900, logprobs=1000, ignore_eos=True)
    prompt = a_prompt(50)
    async with worker_mesh(decode_blocks=128) as mesh:
        decode = mesh.decodes[0]
        session = mesh.gateway.sessions[decode.incarnation]
        request = mesh.start(a_prompt(10), sampling=many_bytes)
        other = mesh.start(prompt, 900, by=mesh.other_gateway, request_id=b"o" * 16)
        await request.until(lambda r: r.joined)
        for opened in decode.worker.door.sessions:
            opened._max_outbox_bytes = 100_000
        session.may_read.clear()
        await mesh.other_gateway.until(lambda: decode.worker.requests.num_answers == 1)
        assert decode.worker.scheduler.statistics().num_steps < 800
        assert await other.finished() == expected(prompt, 900)
        session.may_read.set()
        await mesh.gateway.until(lambda: not session.is_open)
        assert len(request.tokens) < 800


@pytest.mark.parametrize("dies", ["prefill", "decode"])
@virtual_time
async def test_a_worker_that_dies_in_mid_transfer_costs_the_other_nothing(dies: str) -> None:
    """It reports a typed error and frees its blocks."""
    numbers = {f"num_{dies}": 2}
    async with worker_mesh(**numbers, fabric=SLOW_LINK, prefill={"group_kib": 1}) as mesh:
        request = mesh.start(a_prompt(300), 10)
        await request.until(lambda r: r.token)
        killed, other = mesh.prefills[0], mesh.decodes[0]
        if dies == "decode":
            killed, other = other, killed
        await mesh.kill(killed)
        with pytest.raises((WorkerLost, TransferFailed, ShuttingDown)):
            await request.until(lambda r: r.joined if dies == "prefill" else r.done)
        await mesh.gateway.until(lambda: other.pool.num_held == 0)
        prompt = a_prompt(40, seed=3)
        spare = {"p" if dies == "prefill" else "d": 1}
        assert await mesh.start(prompt, 6, **spare).finished() == expected(prompt, 6)


@pytest.mark.parametrize("state", ["waiting for blocks", "granted"])
@virtual_time
async def test_a_lost_prefill_worker_ends_its_leases_at_once(state: str) -> None:
    """Those that have no transfer, too: the gateway hears it now, not when a timer ends."""
    is_waiting = state == "waiting for blocks"
    async with worker_mesh(num_prefill=2, decode_blocks=16, timing=SLOW) as mesh:
        if is_waiting:
            blocker = mesh.start(a_prompt(200), 50, p=1)
            await blocker.until(lambda r: r.joined)
        request = mesh.start(
            a_prompt(100, seed=1), 10, wait_s=60.0, legs="pd" if is_waiting else "d"
        )
        await request.until(lambda r: r.token if is_waiting else r.granted)
        assert not (is_waiting and request.granted)
        loop = asyncio.get_running_loop()
        lost_at = loop.time()
        await mesh.kill(mesh.prefills[0])
        with pytest.raises((WorkerLost, TransferFailed, ShuttingDown)):
            await request.until(lambda r: r.joined)
        assert loop.time() - lost_at < 0.1
        for other in mesh.gateway.requests:
            other.cancel_decode()


@pytest.mark.parametrize("first", ["reserve", "open"])
@virtual_time
async def test_a_transfer_waits_as_long_as_its_reservation(first: str) -> None:
    """Blocks that come free after 20 s, which the gateway allows, cost no attempt."""
    prompt = a_prompt(100, seed=1)
    async with worker_mesh(decode_blocks=16, timing=FakeTiming(base_s=1.0)) as mesh:
        loop = asyncio.get_running_loop()
        blocker = mesh.start(a_prompt(200), 50)
        await blocker.until(lambda r: r.joined)
        if first == "reserve":
            prefill = decode = mesh.start(prompt, 5, wait_s=60.0)
        else:
            decode_worker = mesh.decodes[0].worker
            prefill = mesh.start(prompt, 5, request_id=b"r" * 16, legs="p")
            await prefill.until(lambda r: decode_worker.receiver.core.statistics().num_waiting)
            decode = mesh.start(prompt, 5, request_id=b"r" * 16, legs="d", wait_s=60.0)
        loop.call_later(20.0, blocker.cancel)
        await decode.until(lambda r: r.finish)
        await prefill.until(lambda r: r.done)
        assert {**prefill.tokens, **decode.tokens} == dict(enumerate(expected(prompt, 5)))
        assert decode.granted is not None
        assert decode.granted.wait_s > 19


@virtual_time
async def test_a_reservation_that_fails_refuses_its_open_at_once() -> None:
    """Prefill hears the same reason as the gateway, and computes no longer than that."""
    async with worker_mesh(decode_blocks=16, timing=SLOW) as mesh:
        loop = asyncio.get_running_loop()
        one = mesh.start(a_prompt(200), 50)
        await one.until(lambda r: r.joined)
        began_at = loop.time()
        two = mesh.start(a_prompt(200, seed=1), 10, wait_s=1.0)
        await mesh.gateway.until(lambda: len(two.errors) == 2)
        assert [error.code for error in two.errors] == ["wait_over"] * 2
        assert loop.time() - began_at < 1.1
        one.cancel()


@virtual_time
async def test_a_first_token_that_does_not_exist_fails_its_request_only() -> None:
    """The peer is blamed, and the sequences of the same batch go on."""
    prompts = [a_prompt(40, seed=i) for i in range(2)]
    async with worker_mesh(timing=SLOW) as mesh:
        other = mesh.start(prompts[0], 30)
        await other.until(lambda r: r.joined)
        core = mesh.prefills[0].worker.pusher.core
        commit = core.commit
        core.commit = lambda key, _, now: commit(key, MODEL.vocab_size, now)
        request = mesh.start(prompts[1], 30)
        with pytest.raises(RemoteProtocolError):
            await request.finished()
        assert await other.finished() == expected(prompts[0], 30)
        assert mesh.decodes[0].error is None


@virtual_time
async def test_a_prefill_worker_that_dies_after_the_join_costs_nothing_at_all() -> None:
    """Decode has everything it needs."""
    prompt = a_prompt(50)
    async with worker_mesh(timing=SLOW) as mesh:
        request = mesh.start(prompt, 20)
        await request.until(lambda r: r.joined)
        await mesh.kill(mesh.prefills[0])
        await request.until(lambda r: r.finish)
        assert request.answer == expected(prompt, 20)


@pytest.mark.parametrize("frozen", ["prefill", "decode"])
@virtual_time
async def test_a_stopped_transport_peer_fails_the_transfer_by_its_silence(frozen: str) -> None:
    """KV stops moving though the control stream lives: a bound on progress ends the transfer."""
    async with worker_mesh(fabric=SLOW_LINK, prefill={"group_kib": 1}) as mesh:
        request = mesh.start(a_prompt(300), 10)
        await request.until(lambda r: r.token)
        worker = mesh.prefills[0] if frozen == "prefill" else mesh.decodes[0]
        mesh.fabric.freeze(worker.transport_address)
        with pytest.raises(MeshError):
            await request.until(lambda r: r.joined)
        mesh.fabric.thaw(worker.transport_address)


@virtual_time
async def test_an_unknown_decode_worker_is_refused_at_once() -> None:
    """Prefill computes nothing for a worker it is not paired with."""
    async with worker_mesh() as mesh:
        request = mesh.gateway.start(
            a_prompt(10),
            SamplingParams(max_tokens=4),
            prefill=mesh.prefills[0].incarnation,
            decode=Incarnation(12345),
            legs="p",
        )
        with pytest.raises(WorkerLost):
            await request.finished()
        assert mesh.prefills[0].worker.scheduler.statistics().num_steps == 0


@virtual_time
async def test_a_prompt_that_leaves_no_room_is_the_clients_fault() -> None:
    """Both workers say so at once."""
    async with worker_mesh(prefill_blocks=200, decode_blocks=200) as mesh:
        for legs in "pd":
            request = mesh.start(a_prompt(2048), 4, legs=legs)
            with pytest.raises(InvalidRequest):
                await request.finished()


@virtual_time
async def test_more_jobs_than_the_bound_are_refused_at_once() -> None:
    """Overloaded, before any work; the others are not disturbed."""
    async with worker_mesh(prefill={"max_jobs": 2}, timing=SLOW) as mesh:
        prompts = [a_prompt(20, seed=i) for i in range(3)]
        requests = [mesh.start(prompt, 3) for prompt in prompts]
        with pytest.raises(Overloaded):
            await requests[2].finished()
        requests[2].cancel_decode()
        for prompt, request in zip(prompts[:2], requests[:2], strict=True):
            assert await request.finished() == expected(prompt, 3)


@virtual_time
async def test_no_blocks_in_time_is_an_answer() -> None:
    """The reservation waits as long as it may, then fails; prefill is cancelled by the gateway."""
    async with worker_mesh(decode_blocks=16, timing=SLOW) as mesh:
        loop = asyncio.get_running_loop()
        one = mesh.start(a_prompt(200), 100, wait_s=1.0)
        await one.until(lambda r: r.joined)
        began_at = loop.time()
        two = mesh.start(a_prompt(200, seed=1), 10, wait_s=1.0)
        with pytest.raises(NoBlocks):
            await two.finished()
        assert 1.0 <= loop.time() - began_at < 1.1
        two.cancel_prefill()
        one.cancel()


@virtual_time
async def test_a_reservation_that_nobody_fills_expires_by_the_clock() -> None:
    """No other request is needed to notice."""
    async with worker_mesh() as mesh:
        request = mesh.start(a_prompt(50), 10, legs="d")
        with pytest.raises(LeaseLost):
            await request.finished()


@virtual_time
async def test_a_prefill_worker_without_the_leases_token_places_nothing() -> None:
    """A worker of this very mesh, with a pair, that knows the request and the attempt: it is
    refused, no frame is sent, and the lease ends as one that nobody opened."""
    prompt = a_prompt(40)
    async with worker_mesh() as mesh:
        known = {"request_id": b"r" * 16}
        lease = mesh.start(prompt, 8, legs="d", lease_token=b"t" * 16, **known)
        forged = mesh.start(prompt, 8, legs="p", lease_token=b"f" * 16, **known)
        with pytest.raises(LeaseLost) as of_lease:
            await lease.finished()
        with pytest.raises(LeaseLost) as of_forged:
            await forged.until(lambda r: r.done)
        assert [of_lease.value.code, of_forged.value.code] == ["unopened", "open_expired"]
        assert not lease.joined
        await mesh.idle()
        mesh.assert_pools_full()
        assert await mesh.start(prompt, 5).finished() == expected(prompt, 5)


@virtual_time
async def test_a_transfer_that_nobody_reserved_is_refused_after_a_while() -> None:
    """Prefill frees its blocks."""
    async with worker_mesh() as mesh:
        request = mesh.start(a_prompt(50), 10, legs="p")
        with pytest.raises(MeshError):
            await request.until(lambda r: r.done)


@pytest.mark.parametrize("where", ["prefill queue", "waiting for blocks", "transfer", "decode"])
@virtual_time
async def test_the_deadline_is_kept_everywhere(where: str) -> None:
    """Each worker ends its part by its own timer."""
    more: dict[str, object] = {}
    if where == "waiting for blocks":
        more["decode_blocks"] = 16
    if where == "transfer":
        more["fabric"] = LoopbackSettings(bytes_per_s=1000)
    timing = FakeTiming(base_s=5.0 if where == "prefill queue" else 0.1)
    async with worker_mesh(timing=timing, **more) as mesh:  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        if where in ("prefill queue", "waiting for blocks"):
            blocker = mesh.start(a_prompt(200), 1000, wait_s=60.0)
            await blocker.until(lambda r: r.granted)
        began_at = loop.time()
        request = mesh.start(a_prompt(100, seed=1), 1000, deadline_s=2.0, wait_s=60.0)
        with pytest.raises(DeadlinePassed):
            await request.finished()
        assert loop.time() - began_at == pytest.approx(2.0, abs=0.01)
        request.cancel()
        for other in mesh.gateway.requests:
            other.cancel()


@virtual_time
async def test_a_broken_command_fails_its_request_not_its_session() -> None:
    """The gateway is told what is wrong with it."""
    async with worker_mesh() as mesh:
        request = mesh.start(a_prompt(10), 4, legs="")
        start = wire.WorkOrder(
            stream_id=request.stream_id, role=wire.Role.PREFILL, request_id=b"short"
        )
        mesh.gateway.sessions[request.prefill].send(wire.WorkerCommand(order=start))
        with pytest.raises(RemoteProtocolError):
            await request.finished()
        assert mesh.gateway.sessions[request.prefill].is_open


@virtual_time
async def test_an_order_of_a_role_that_a_worker_does_not_have_fails_alone() -> None:
    """All roles' orders come over one session."""
    async with worker_mesh() as mesh:
        decode, sampling = mesh.decodes[0].incarnation, SamplingParams(max_tokens=4)
        request = mesh.gateway.start(
            a_prompt(10), sampling, prefill=decode, decode=decode, legs="p"
        )
        with pytest.raises(RemoteProtocolError, match="computes no prompts"):
            await request.finished()
        assert mesh.gateway.sessions[decode].is_open


@pytest.mark.parametrize(
    ("role", "param"),
    [(wire.Role.UNSPECIFIED, "role"), (wire.Role.GATEWAY, "role"), (wire.Role.DECODE, "peer")],
)
@virtual_time
async def test_an_order_for_nobody_fails_alone(role: wire.Role, param: str) -> None:
    """It names no role of a worker, or, for an answer, nobody who computes its prompt."""
    async with worker_mesh() as mesh:
        request = mesh.start(a_prompt(10), 4, legs="")
        order = wire.WorkOrder(
            stream_id=request.stream_id,
            role=role,
            request_id=b"r" * 16,
            lease_token=b"t" * 16,
            token_ids=pack_u32(a_prompt(10)),
            num_prompt_tokens=10,
            sampling=codec.sampling_to_wire(SamplingParams(max_tokens=4)),
            wait_s=1.0,
        )
        mesh.gateway.sessions[request.decode].send(wire.WorkerCommand(order=order))
        with pytest.raises(RemoteProtocolError) as told:
            await request.finished()
        assert told.value.param.startswith(param)
        assert mesh.gateway.sessions[request.decode].is_open


@virtual_time
async def test_a_stream_id_in_use_ends_the_session() -> None:
    """A gateway that breaks the fence cannot be served."""
    async with worker_mesh(timing=SLOW) as mesh:
        request = mesh.start(a_prompt(10), 50)
        await request.until(lambda r: r.joined)
        again = wire.WorkOrder(stream_id=request.stream_id)
        session = mesh.gateway.sessions[request.decode]
        session.send(wire.WorkerCommand(order=again))
        await mesh.gateway.until(lambda: not session.is_open)
        assert isinstance(session.error, RemoteProtocolError)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_drain_loses_nothing(role: str) -> None:
    """What is in hand is finished, what comes is refused, then the worker ends by itself."""
    prompt = a_prompt(300)
    async with worker_mesh(timing=SLOW, fabric=SLOW_LINK, prefill={"group_kib": 1}) as mesh:
        request = mesh.start(prompt, 15)
        await request.until(lambda r: r.granted)
        running = (mesh.prefills if role == "prefill" else mesh.decodes)[0]
        running.stop.set()
        status = mesh.gateway.status
        await mesh.gateway.until(lambda: status[running.incarnation].draining)
        refused = mesh.start(a_prompt(20, seed=1), 5, legs=role[0])
        with pytest.raises(ShuttingDown):
            await refused.finished()
        assert await request.finished() == expected(prompt, 15)
        assert running.task is not None
        await asyncio.wait([running.task])
        assert running.error is None


@virtual_time
async def test_a_gateway_may_ask_a_worker_to_drain() -> None:
    """The directive on the join stream does the same as a signal."""
    async with worker_mesh() as mesh:
        mesh.gateway.drain.set()
        tasks = [r.task for r in (*mesh.prefills, *mesh.decodes) if r.task is not None]
        await asyncio.wait(tasks)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_failed_engine_fails_its_requests_and_ends_the_worker(role: str) -> None:
    """Every request gets the typed error before the process goes."""
    async with worker_mesh(timing=SLOW) as mesh:
        running = (mesh.prefills if role == "prefill" else mesh.decodes)[0]
        hosts = mesh.network.host, running.host
        if role == "prefill":  # what comes after the failure is refused, so both come at once
            mesh.network.fabric.hold(*hosts)
        requests = [mesh.start(a_prompt(20, seed=i), 30) for i in range(2)]
        if role == "decode":
            for request in requests:
                await request.until(lambda r: r.joined)

        def broken(*_: object) -> None:
            raise RuntimeError("device lost")

        running.engine.step = broken  # type: ignore[method-assign, assignment]
        await asyncio.sleep(0.001)
        mesh.network.fabric.release(*hosts)
        for request in requests:
            with pytest.raises(EngineFailed):
                await request.finished()
        assert running.task is not None
        await asyncio.wait([running.task])
        assert isinstance(running.error, EngineFailed)
