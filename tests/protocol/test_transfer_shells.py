"""The shells of a KV push, prefill and decode, over the loopback transport in one process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.engine.worker import StepDone
from shared.errors import (
    InvalidRequest,
    LeaseLost,
    MeshError,
    NoCapacity,
    ShuttingDown,
    TooLarge,
    TransferFailed,
    WorkerLost,
)
from shared.ids import Incarnation, MeshPeer
from shared.profile.machine import MachineProfile
from shared.rpc.heartbeat_stream import MAX_OUTBOX, HeartbeatStream
from shared.telemetry.moments import Moment
from shared.transport.base import Outcome
from shared.transport.pairing import FIRST_CANARY_BYTES
from shared.wire import Heartbeat
from shared.worker import pusher
from shared.worker.handshake import NUM_CANARIES
from shared.worker.pusher import PushHandle, PushStats
from tests.support.loopback import LoopbackFabric, LoopbackSettings, LoopbackTransport
from tests.support.no_fence import take_fence_away
from tests.support.transfer_ends import (
    ADDRESS,
    SLOW_WIRE,
    key_of,
    num_tokens_of,
    running_ends,
    storm,
)
from tests.support.virtual_loop import virtual_time

LONG = next(n for n in range(1000) if num_tokens_of(n, 16) == 16)
"""A request with the longest prompt."""

SHORT = next(n for n in range(1000) if num_tokens_of(n, 16) == 2)

SLOW_MESSAGES = MachineProfile(message_s=1e-3)
HIDES_ONE_MESSAGE_S = 2.5e-3
"""A step under whose four layers one message beside the first fits, but not three."""


@pytest.fixture(params=[False, True], ids=["messages", "windows"])
def wire(request: pytest.FixtureRequest) -> LoopbackFabric:
    """Frames as whole messages, or written into decode's staging by prefill itself."""
    return LoopbackFabric(LoopbackSettings(has_windows=request.param))


@virtual_time
async def test_kv_arrives_bit_for_bit(wire: LoopbackFabric):
    """A prompt pushed layer by layer is in decode's blocks, and both ends count the same bytes."""
    async with running_ends(wire.open) as ends:
        stats = await ends.prefill.push(LONG)
        await ends.settled()
        assert ends.decode.num_placed == 1
        assert stats.num_frames > 1
        assert stats.mode == "layerwise"
        assert stats.lane == "loopback"
        assert stats.exposed_s >= 0
        assert stats.transfer_s > 0
        ends.check_all_home()


@virtual_time
async def test_many_at_once_share_few_slots(wire: LoopbackFabric):
    """40 transfers through four slots on each side; none is starved, none is mixed."""
    async with running_ends(wire.open, prefill_blocks=24, decode_blocks=24) as ends:
        async with asyncio.TaskGroup() as tasks:
            for request in range(40):
                tasks.create_task(ends.prefill.push(request))
        await ends.settled()
        assert ends.decode.num_placed == 40
        ends.check_all_home()


@virtual_time
async def test_what_decode_has_is_not_sent(wire: LoopbackFabric):
    """Tokens below skip stay home; a prompt that decode has whole takes no frame at all."""
    async with running_ends(wire.open) as ends:
        ends.decode.skip = lambda request: 8
        some = await ends.prefill.push(LONG)
        ends.decode.skip = lambda request: num_tokens_of(request, 16)
        nothing = await ends.prefill.push(LONG + 1)
        await ends.settled()
        assert 0 < some.num_bytes < 16 * ends.prefill.engine.layout.token_bytes
        assert nothing.num_frames == 0
        assert nothing.mode == "none"
        assert ends.decode.num_placed == 2
        ends.check_all_home()


@virtual_time
async def test_prefill_may_be_first(wire: LoopbackFabric):
    """An open waits for its reservation, which comes later."""
    async with running_ends(wire.open) as ends:
        ends.decode.is_reserving = False
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        ends.prefill.compute_all(LONG, table, handle)
        while not ends.receiver.core.statistics().num_waiting:
            await asyncio.sleep(0.001)
        ends.decode.reserve(key_of(LONG), Incarnation(1))
        assert (await handle.wait()).num_frames > 1
        ends.prefill.give_back(table)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_a_refusal_reaches_the_caller(wire: LoopbackFabric):
    """Decode's reason is what ``wait`` raises; a prompt that its pool never holds is one."""
    async with running_ends(wire.open, decode_blocks=4) as ends:
        with pytest.raises(NoCapacity, match="16 tokens of KV do not fit"):
            await ends.prefill.push(LONG)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_an_answer_that_needs_no_decode_ends_clean(wire: LoopbackFabric):
    """abort(None): stats without bytes, and decode's lease goes without an error."""
    async with running_ends(wire.open) as ends:
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        ends.pusher.step_planned([(handle, 0, 6)], 0.0)
        handle.span_computed()
        handle.abort(None)
        handle.abort(TransferFailed("too late to matter"))
        assert await handle.wait() == PushStats()
        ends.prefill.give_back(table)
        await ends.settled()
        assert ends.decode.failures == []
        ends.check_all_home()


@pytest.mark.parametrize("stop_after", range(0, 16, 3))
@pytest.mark.parametrize("yields", [0, 1, 5])
@virtual_time
async def test_prefill_may_give_up_at_any_point(wire: LoopbackFabric, stop_after: int, yields: int):
    """Aborted after any piece of work, with anything in flight: everything comes home."""
    async with running_ends(wire.open, seed=stop_after) as ends:
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        for num_done, _ in enumerate(ends.prefill.steps(LONG, table, handle)):
            for _ in range(yields):
                await asyncio.sleep(0)
            if num_done == stop_after:
                break
        error = TransferFailed("cancelled", code="test")
        handle.abort(error)
        with pytest.raises(TransferFailed) as caught:
            await handle.wait()
        assert caught.value is error
        ends.prefill.give_back(table)
        await ends.settled()
        await ends.prefill.push(LONG + 1)  # and the pair still works
        await ends.settled()
        ends.check_all_home()


@pytest.mark.parametrize("turns", range(0, 40, 4))
@virtual_time
async def test_decode_may_give_up_at_any_point(wire: LoopbackFabric, turns: int):
    """Cancelled any number of loop turns after the grant: prefill hears it, all comes home."""
    async with running_ends(wire.open, seed=turns) as ends:
        attached = asyncio.Event()

        async def cancel_later() -> None:
            await attached.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            ends.decode.cancel(key_of(LONG))

        ends.decode.on_attach = lambda key: attached.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cancel_later())
            with contextlib.suppress(LeaseLost):
                await ends.prefill.push(LONG)
        await ends.settled()
        await ends.prefill.push(LONG + 1)
        await ends.settled()
        ends.check_all_home()


@pytest.mark.parametrize(
    "error", [None, InvalidRequest("no message"), TooLarge("too long")], ids=str
)
@virtual_time
async def test_a_lost_pair_fails_its_transfers_and_comes_back(
    wire: LoopbackFabric, error: MeshError | None
):
    """The connection breaks amid a push: WorkerLost, all home, a new link, and it works again. So
    does a stream that one of both ends with an error of clients: no request has made it."""
    async with running_ends(wire.open) as ends:
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        steps = ends.prefill.steps(LONG, table, handle)
        for _ in range(4):
            next(steps)
            await asyncio.sleep(0)
        if error is None:
            ends.network.fabric.kill("prefill")
        else:
            (link,) = ends.pairs._links.values()
            link.lose(error)
        with pytest.raises(WorkerLost):
            await handle.wait()
        assert not ends.paired.is_set()
        with pytest.raises(WorkerLost, match="no pair"):
            ends.prefill.begin(LONG + 1, table)
        ends.prefill.give_back(table)
        await ends.settled()
        await ends.paired.wait()
        await ends.prefill.push(LONG + 2)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_a_dead_transport_ends_the_pair():
    """The data plane sees the death before the control stream does: the pair goes down and up."""
    fabric = LoopbackFabric(LoopbackSettings(detect_s=0.0))
    async with running_ends(fabric.open) as ends:
        (link,) = ends.pairs._links.values()
        link.endpoint._on_lost()  # pyright: ignore[reportAttributeAccessIssue]
        while ends.paired.is_set():
            await asyncio.sleep(0.001)
        await ends.paired.wait()
        await ends.prefill.push(LONG)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_an_unlisted_peer_is_kept_but_not_dialled_again(wire: LoopbackFabric):
    """What it has in hand goes on and the pair stays warm; once lost it is not made again."""
    async with running_ends(wire.open) as ends:
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        ends.pairs.set_peers([])
        ends.prefill.compute_all(LONG, table, handle)
        assert (await handle.wait()).num_frames > 1
        ends.prefill.give_back(table)
        await ends.settled()
        ends.check_all_home()
        (link,) = ends.pairs._links.values()
        link.close("the test wants it")
        await asyncio.sleep(60)
        assert not ends.pairs.speeds
        assert ends.network.num_dials == 1


@virtual_time
async def test_another_incarnation_is_another_peer(wire: LoopbackFabric):
    """A restarted decode worker on the same address is not the one that was listed."""
    async with running_ends(wire.open) as ends:
        ends.pairs.set_peers([MeshPeer(Incarnation(77), ADDRESS)])
        (link,) = ends.pairs._links.values()
        link.close("the test wants it")
        dials = ends.network.num_dials
        while ends.network.num_dials < dials + 2:
            await asyncio.sleep(1)
        assert not ends.pairs.speeds


@virtual_time
async def test_a_peer_that_cannot_be_reached_is_dialled_again(wire: LoopbackFabric):
    """Connecting hangs: each try ends after seconds, and the pair comes up when the way is free."""
    async with running_ends(wire.open) as ends:
        fabric, began_at = ends.network.fabric, asyncio.get_running_loop().time()
        fabric.partition("prefill", "decode")
        while ends.network.num_dials < 4:
            await asyncio.sleep(1)
        assert 8 <= asyncio.get_running_loop().time() - began_at <= 40
        fabric.heal()
        await ends.paired.wait()
        await ends.prefill.push(LONG)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_another_model_is_refused_before_any_traffic(wire: LoopbackFabric):
    """The handshake compares fingerprints; nothing is paired, and both sides say why."""
    async with running_ends(wire.open, decode_fingerprint=b"x" * 32) as ends:
        while ends.network.num_dials < 2:
            await asyncio.sleep(1)
        assert not ends.pairs.speeds


class FlippingTransport:
    """A transport whose sends damage one byte of the message with the given number."""

    def __init__(self, transport: LoopbackTransport, which: int, at: int) -> None:
        self._transport = transport
        self._which, self._at, self._num_sent = which, at, 0
        self.address = transport.address
        self.receive, self.close = transport.receive, transport.close
        self.new_window = transport.new_window

    async def connect(self, address: bytes, on_lost: Any) -> Any:
        endpoint = await self._transport.connect(address, on_lost)
        send = endpoint.send

        def send_damaged(buffer: Any, num_bytes: int, tag: int) -> Any:
            self._num_sent += 1
            if self._num_sent == self._which:
                buffer = np.array(buffer)
                buffer[self._at] ^= 1
            return send(buffer, num_bytes, tag)

        endpoint.send = send_damaged  # pyright: ignore[reportAttributeAccessIssue]
        return endpoint


@pytest.mark.parametrize(("at", "code"), [(8, "frame_header"), (70, "frame_digest")])
@virtual_time
async def test_damage_is_seen_before_it_is_placed(at: int, code: str):
    """One flipped bit in header or payload: the transfer fails on both ends, the next one works."""
    fabric, canaries = LoopbackFabric(), NUM_CANARIES

    async def open_transport() -> Any:
        return FlippingTransport(await fabric.open(), canaries + 2, at)

    async with running_ends(open_transport) as ends:
        with pytest.raises(TransferFailed):
            await ends.prefill.push(LONG)
        await ends.settled()
        assert [error.code for error in ends.decode.failures] == [code]
        await ends.prefill.push(LONG + 1)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_a_failed_push_leaves_nothing_to_the_garbage_collector():
    """Which comes late: buffers of its frames would stay until then."""
    fabric = LoopbackFabric()

    async def open_transport() -> Any:
        return FlippingTransport(await fabric.open(), NUM_CANARIES + 2, 70)

    def left() -> int:
        # By its type: ``isinstance`` asks what merely looks like another class, which may warn.
        objects = gc.get_objects()
        num_errors = sum(type(it) is TransferFailed and bool(it.__traceback__) for it in objects)
        return num_errors + sum(type(it) is PushHandle for it in objects)

    async with running_ends(open_transport) as ends:
        gc.collect()
        before = left()
        gc.disable()
        try:
            try:
                await ends.prefill.push(LONG)
            except TransferFailed as error:
                error.with_traceback(None)  # as a worker does
            await ends.settled()
            assert [error.code for error in ends.decode.failures] == ["frame_digest"]
            ends.decode.failures.clear()
            assert left() == before
        finally:
            gc.enable()


@virtual_time
async def test_a_lost_worker_s_memory_is_let_go_at_once():
    """What is mapped would stay after its owner's end: 128 MiB of a decode worker's."""
    fabric = LoopbackFabric(LoopbackSettings(has_windows=True))
    async with running_ends(fabric.open) as ends:
        await ends.prefill.push(LONG)
        table = await ends.prefill.take(LONG + 1)
        handle = ends.prefill.begin(LONG + 1, table)
        ends.prefill.compute_all(LONG + 1, table, handle)
        (link,) = ends.pusher._links.values()
        mapped = [weakref.ref(window) for window in link.windows._windows.values()]
        assert mapped
        gc.disable()
        try:
            ends.network.fabric.kill("prefill")
            with contextlib.suppress(WorkerLost):
                await handle.wait()
            ends.prefill.give_back(table)
            await ends.settled()
            await ends.paired.wait()
            assert [window() for window in mapped] == [None] * len(mapped)
        finally:
            gc.enable()


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(125e3, 0.02), (1e6, 0.4), (1e9, 0.0)])
@virtual_time
async def test_a_slow_or_distant_link_makes_a_pair_too(bytes_per_s: float, latency_s: float):
    """At 1 Mbit/s, over 0.8 s of round trip, and quickly: the first call makes it, and its speed is
    known."""
    settings = LoopbackSettings(bytes_per_s=bytes_per_s, latency_s=latency_s)
    fabric = LoopbackFabric(settings)
    async with running_ends(fabric.open, max_frame_bytes=8 << 20) as ends:
        assert ends.network.num_dials == 1
        (speed,) = ends.pairs.speeds.values()
        took_s = FIRST_CANARY_BYTES / bytes_per_s + 4 * latency_s
        assert FIRST_CANARY_BYTES / took_s / 2 < speed <= bytes_per_s


@virtual_time
async def test_pushes_that_share_a_link_tell_its_speed_and_what_one_more_would_get(
    monkeypatch: pytest.MonkeyPatch,
):
    """Frames that wait for each other make it no slower; who is pushing takes a share."""
    monkeypatch.setattr(pusher, "DEFAULT_GROUP_BYTES", 1)
    fabric = LoopbackFabric(LoopbackSettings(bytes_per_s=1e4, eager_bytes=0))
    async with running_ends(fabric.open) as ends, asyncio.TaskGroup() as tasks:
        (link,) = ends.pairs._links.values()
        pushes = [tasks.create_task(ends.prefill.push(LONG + n)) for n in range(4)]
        await asyncio.sleep(0.1)
        assert ends.pairs.speeds == {link.peer: link.bytes_per_s / 5}
        await asyncio.wait(pushes)
        await ends.settled()
        assert ends.pairs.speeds == {link.peer: pytest.approx(1e4, rel=0.2)}


@virtual_time
async def test_a_damaged_canary_is_no_pair():
    """Ready means that right bytes crossed: the first life fails, the second one is tried."""
    fabric = LoopbackFabric()

    async def open_transport() -> Any:
        return FlippingTransport(await fabric.open(), 2, 70)

    async with running_ends(open_transport) as ends:
        assert ends.network.num_dials == 2
        assert [*ends.pairs.speeds] == [Incarnation(2)]


@virtual_time
async def test_shutting_down_ends_every_transfer(wire: LoopbackFabric):
    """Whoever waits for a push hears ShuttingDown; nobody hangs."""
    handle = None
    async with running_ends(wire.open) as ends:
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
    with pytest.raises((ShuttingDown, WorkerLost)):
        await handle.wait()


@virtual_time
async def test_a_step_that_hides_nothing_is_pushed_at_its_end(wire: LoopbackFabric):
    """Many small messages under a very short step: serialized, and the stats say so."""
    async with running_ends(wire.open, profile=SLOW_MESSAGES) as ends:
        (link,) = ends.pairs._links.values()
        link.bytes_per_s = 1e12
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        ends.pusher.step_planned([(handle, 0, 16)], 1e-6)
        for layer in range(4):
            ends.prefill.engine.stamp(table, 0, 16, layer, LONG)
            handle.layers_ready(layer + 1)
        handle.commit(LONG % 1000)
        assert (await handle.wait()).mode == "serialized"
        ends.prefill.give_back(table)
        await ends.settled()
        ends.check_all_home()


@pytest.mark.parametrize(("bytes_per_s", "mode"), [(0.0, "layerwise"), (1e12, "serialized")])
@virtual_time
async def test_the_speed_of_the_link_decides_how_a_step_is_pushed(
    wire: LoopbackFabric, bytes_per_s: float, mode: str
):
    """A short step over a link whose speed is known goes at once; unknown, layer by layer."""
    async with running_ends(wire.open, profile=SLOW_MESSAGES) as ends:
        (link,) = ends.pairs._links.values()
        link.bytes_per_s = bytes_per_s
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        ends.pusher.step_planned([(handle, 0, 16)], 0.0002)
        for layer in range(4):
            ends.prefill.engine.stamp(table, 0, 16, layer, LONG)
            handle.layers_ready(layer + 1)
        handle.commit(LONG % 1000)
        assert (await handle.wait()).mode == mode
        ends.prefill.give_back(table)
        await ends.settled()
        ends.check_all_home()


@pytest.mark.parametrize(("skip", "mode"), [(0, "serialized"), (14, "layerwise")])
@virtual_time
async def test_tokens_that_decode_has_do_not_count_for_the_mode(
    wire: LoopbackFabric, skip: int, mode: str
):
    """Four frames of a whole prompt cost more messages than the step hides; the two frames of what
    is really sent do not."""
    async with running_ends(wire.open, profile=SLOW_MESSAGES) as ends:
        ends.decode.skip = lambda request: skip
        (link,) = ends.pairs._links.values()
        link.bytes_per_s = 1e6
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        await asyncio.sleep(1.0)  # of virtual time: the grant is here
        ends.pusher.step_planned([(handle, 0, 16)], HIDES_ONE_MESSAGE_S)
        for layer in range(4):
            ends.prefill.engine.stamp(table, 0, 16, layer, LONG)
            handle.layers_ready(layer + 1)
        handle.commit(LONG % 1000)
        assert (await handle.wait()).mode == mode
        ends.prefill.give_back(table)
        await ends.settled()
        ends.check_all_home()


@pytest.mark.parametrize("is_shared", [False, True])
@virtual_time
async def test_all_prompts_of_a_step_count_for_the_mode(wire: LoopbackFabric, is_shared: bool):
    """A short prompt alone is pushed layer by layer; beside a long one over the same link both
    wait for the end of the step, which hides too little of so many messages."""
    async with running_ends(wire.open, profile=SLOW_MESSAGES) as ends:
        (link,) = ends.pairs._links.values()
        link.bytes_per_s = 1e6
        requests = [SHORT, LONG] if is_shared else [SHORT]
        tables = [await ends.prefill.take(request) for request in requests]
        pairs = zip(requests, tables, strict=True)
        handles = [ends.prefill.begin(request, table) for request, table in pairs]
        spans = [
            (handle, 0, num_tokens_of(request, 16))
            for handle, request in zip(handles, requests, strict=True)
        ]
        ends.pusher.step_planned(spans, HIDES_ONE_MESSAGE_S)
        for layer in range(4):
            for request, table, (handle, start, stop) in zip(requests, tables, spans, strict=True):
                ends.prefill.engine.stamp(table, start, stop, layer, request)
                handle.layers_ready(layer + 1)
        for request, handle in zip(requests, handles, strict=True):
            handle.commit(request % 1000)
        expected = "serialized" if is_shared else "layerwise"
        assert [(await handle.wait()).mode for handle in handles] == [expected] * len(handles)
        for table in tables:
            ends.prefill.give_back(table)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_overlap_ends_with_the_step_and_not_when_the_loop_heard_of_it(
    wire: LoopbackFabric, monkeypatch: pytest.MonkeyPatch
):
    """A loop that was busy for a second hid nothing by that; moments of layers say when the device
    had written them."""
    noted: list[tuple[float, int]] = []
    monkeypatch.setattr(
        "shared.worker.pusher.note",
        lambda moment, _, at_s=None, **facts: (
            noted.append((at_s, facts["num_layers"])) if moment is Moment.LAYERS_WRITTEN else None
        ),
    )
    async with running_ends(wire.open) as ends:
        now = asyncio.get_running_loop().time
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        ends.pusher.step_planned([(handle, 0, 16)], 0.0)
        for layer in range(4):
            ends.prefill.engine.stamp(table, 0, 16, layer, LONG)
            handle.layers_ready(layer + 1)
        await asyncio.sleep(0.5)
        layers_at, step_at = [now() - 0.4, now() - 0.3, now() - 0.2, now() - 0.1], now()
        await asyncio.sleep(1.0)
        handle.span_computed(StepDone(layers_at, step_at))
        handle.commit(LONG % 1000)
        stats = await handle.wait()
        assert stats.exposed_s == pytest.approx(1.0, abs=0.02)
        assert stats.overlap == pytest.approx(0.5 / 1.5, abs=0.02)
        assert noted == [(at_s, layer + 1) for layer, at_s in enumerate(layers_at)]
        ends.prefill.give_back(table)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_pushes_refine_the_speed_of_the_link():
    """Large frames measure it; small ones, whose time is latency, do not."""
    fabric = LoopbackFabric(LoopbackSettings(bytes_per_s=2e8))
    sizes: dict[str, Any] = {"most_tokens": 9000, "prefill_blocks": 2300, "decode_blocks": 4600}
    short = next(n for n in range(1000) if num_tokens_of(n, 9000) < 100)
    long = [n for n in range(1000) if num_tokens_of(n, 9000) > 6000][:8]
    async with running_ends(
        fabric.open, max_frame_bytes=4 << 20, group_bytes=2 << 20, **sizes
    ) as ends:
        ends.prefill.chunk = 9000
        (link,) = ends.pairs._links.values()
        link.bytes_per_s = 1e9
        await ends.prefill.push(short)
        assert link.bytes_per_s == 1e9
        for request in long:
            await ends.prefill.push(request)
        await ends.settled()
        assert 2e8 < link.bytes_per_s < 7e8


@pytest.mark.parametrize("has_windows", [False, True])
@virtual_time
async def test_late_writes_meet_the_fence(has_windows: bool):
    """A wire that goes on writing after a cancel, as UCX does: no foreign KV, nothing lost."""
    options: dict[str, Any] = {"prefill_blocks": 32, "decode_blocks": 16, "num_slots": 3}
    fabric = LoopbackFabric(replace(SLOW_WIRE, has_windows=has_windows))
    async with running_ends(fabric.open, **options) as ends:
        await storm(ends, count=150, seed=3)
        assert ends.decode.book.num_quarantined > 5
        assert {error.code for error in ends.decode.failures} <= {""}
        ends.check_all_home()


@pytest.mark.parametrize("has_windows", [False, True])
@virtual_time
async def test_late_writes_without_the_fence_are_seen(
    has_windows: bool, monkeypatch: pytest.MonkeyPatch
):
    """The same storm without the fence makes somebody read foreign KV."""
    take_fence_away(monkeypatch)
    options: dict[str, Any] = {"prefill_blocks": 32, "decode_blocks": 16, "num_slots": 3}
    fabric = LoopbackFabric(replace(SLOW_WIRE, has_windows=has_windows))
    async with running_ends(fabric.open, **options) as ends:
        await storm(ends, count=150, seed=3)
        assert ends.decode.num_foreign > 0


class WatchfulTransport:
    """A transport that refuses memory which it has abandoned before."""

    def __init__(self, transport: LoopbackTransport) -> None:
        self._transport = transport
        self._used: list[tuple[Any, Any]] = []
        self.address, self.close = transport.address, transport.close
        self.new_window = transport.new_window

    @property
    def num_abandoned(self) -> int:
        return sum(operation.outcome is Outcome.ABANDONED for operation, _ in self._used)

    def receive(self, endpoint: Any, buffer: Any, num_bytes: int, tag: int, **more: Any) -> Any:
        return self._note(self._transport.receive(endpoint, buffer, num_bytes, tag, **more), buffer)

    async def connect(self, address: bytes, on_lost: Any) -> Any:
        endpoint = await self._transport.connect(address, on_lost)
        send = endpoint.send
        endpoint.send = lambda buffer, *more: self._note(  # pyright: ignore[reportAttributeAccessIssue]
            send(buffer, *more), buffer
        )
        return endpoint

    def _note(self, operation: Any, buffer: Any) -> Any:
        for earlier, used in self._used:
            if earlier.outcome is Outcome.ABANDONED:
                assert not np.shares_memory(buffer, used)
        self._used.append((operation, buffer))
        return operation


@virtual_time
async def test_memory_that_the_transport_abandoned_is_never_used_again():
    """A pair is closed amid frames that do not settle: both ends put new buffers into those slots,
    and what is written late meets nobody."""
    fabric = LoopbackFabric(replace(SLOW_WIRE, bytes_per_s=2e4, settles_on_close=False))
    transports: list[WatchfulTransport] = []

    async def open_transport() -> Any:
        transports.append(WatchfulTransport(await fabric.open()))
        return transports[-1]

    async with running_ends(open_transport) as ends:
        await ends.cut_amid_frames(LONG)
        assert all(transport.num_abandoned for transport in transports)
        for request in range(8):
            await ends.prefill.push(request)
        await ends.settled()
        assert ends.decode.num_placed == 8
        ends.check_all_home()


@pytest.mark.parametrize("held", [("prefill", "decode"), ("decode", "prefill"), None])
@virtual_time
async def test_silence_ends_a_pair_within_three_seconds(held: tuple[str, str] | None):
    """A partition, one way or both: each end notices alone, everything comes home, it heals."""
    async with running_ends(LoopbackFabric(SLOW_WIRE).open) as ends:
        loop, fabric = asyncio.get_running_loop(), ends.network.fabric
        table = await ends.prefill.take(LONG)
        handle = ends.prefill.begin(LONG, table)
        steps = ends.prefill.steps(LONG, table, handle)
        for _ in range(5):
            next(steps)
            await asyncio.sleep(0.0001)
        if held is None:
            fabric.partition("prefill", "decode")
        else:
            fabric.hold(*held)
        silent_since = loop.time()
        with pytest.raises((WorkerLost, TransferFailed)):
            await handle.wait()
        assert loop.time() - silent_since <= 3.5
        ends.prefill.give_back(table)
        await ends.settled()
        assert loop.time() - silent_since <= 7
        fabric.heal()
        await ends.paired.wait()
        await ends.prefill.push(LONG + 2)
        await ends.settled()
        ends.check_all_home()


# --- the stream below ----------------------------------------------------------------------------


class Said(str):
    """A message, or a heartbeat."""

    @property
    def heartbeat(self) -> Heartbeat | None:
        return Heartbeat(asks=self == "ask") if self in ("ask", "answer") else None


class Peer:
    """A raw stream, and its other end, in memory."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.inbox: asyncio.Queue[str | None] = asyncio.Queue()
        self.is_busy = True
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self.can_send_nowait = False
        self.round_trip_s = 0.0
        self.there: list[str] = []

    def send_nowait(self, message: str) -> bool:
        if self.can_send_nowait:
            self.sent.append(message)
        return self.can_send_nowait

    def receive_nowait(self) -> Said | None:
        return Said(self.there.pop(0)) if self.there else None

    async def receive(self) -> Said | None:
        said = await self.inbox.get()
        return None if said is None else Said(said)

    async def send(self, message: str) -> None:
        await self.is_reading.wait()
        self.sent.append(message)

    def stream(self) -> HeartbeatStream[str, Said]:
        return HeartbeatStream(
            self,
            heartbeat=lambda asks: "ask" if asks else "answer",
            peer="peer",
            is_busy=lambda: self.is_busy,
        )


@virtual_time
async def test_a_peer_that_is_far_away_may_be_silent_for_longer():
    """Three round trips: what is lost on the way to it comes again after one or two."""
    peer = Peer()
    peer.round_trip_s = 0.2
    error = await peer.stream().run(lambda message: None)
    assert "silent for 1.6 s" in error.message


@virtual_time
async def test_a_silent_peer_ends_the_stream():
    """It is asked while nothing comes in, until it is dead."""
    peer = Peer()
    error = await peer.stream().run(lambda message: None)
    assert isinstance(error, WorkerLost)
    assert "silent for 1.0 s" in error.message
    assert peer.sent == ["ask"] * 4
    assert asyncio.get_running_loop().time() == 1.0


@virtual_time
async def test_who_speaks_is_not_asked_and_who_asks_is_answered():
    """Whatever comes in says that the peer lives; an answer is no message, and asks for none."""
    peer, heard = Peer(), list[str]()
    peer.can_send_nowait = True
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(peer.stream().run(heard.append))
        for said in ("1", "answer", "2", "ask", "3"):
            await asyncio.sleep(0.15)
            peer.inbox.put_nowait(said)
        await asyncio.sleep(0.19)
        assert peer.sent == ["answer"]
        await asyncio.sleep(0.02)
        assert peer.sent[1:] == ["ask"]
        await running
    assert heard == ["1", "2", "3"]


@virtual_time
async def test_a_peer_for_which_nobody_waits_is_seldom_asked():
    """It is asked every two seconds, and dead after six."""
    peer = Peer()
    peer.is_busy = False
    error = await peer.stream().run(lambda message: None)
    assert "silent for 6.0 s" in error.message
    assert peer.sent == ["ask"] * 2


@pytest.mark.parametrize("by", ["what is sent", "what comes", "neither"])
@virtual_time
async def test_a_peer_for_which_somebody_waits_has_a_second(by: str):
    """From then on, however long it was silent: whoever sends it work, or hears of some, looks at
    once, and everybody within two seconds."""
    peer = Peer()
    peer.can_send_nowait, peer.is_busy = True, False
    stream, loop = peer.stream(), asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stream.run(lambda message: None))
        await asyncio.sleep(1.9)
        peer.is_busy = True
        if by == "what is sent":
            stream.send("work")
        elif by == "what comes":
            peer.inbox.put_nowait("work")
        assert "silent for 1.0 s" in (await running).message
    assert loop.time() == pytest.approx(3.0 if by == "neither" else 2.9, abs=0.3)
    assert peer.sent[-4:] == ["ask"] * 4


@virtual_time
async def test_a_suspect_stays_one_until_it_is_heard():
    """That nobody waits for it any more says nothing of it."""
    peer, told = Peer(), list[bool]()
    stream = HeartbeatStream(
        peer,
        heartbeat=lambda asks: "ask" if asks else "answer",
        peer="peer",
        is_busy=lambda: peer.is_busy,
        on_suspect=told.append,
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stream.run(lambda message: None))
        await asyncio.sleep(0.7)
        peer.is_busy = False
        await asyncio.sleep(2.0)
        assert told == [True]
        peer.inbox.put_nowait("answer")
        await asyncio.sleep(0.01)
        assert told == [True, False]
        running.cancel()


@virtual_time
async def test_a_peer_that_does_not_read_ends_the_stream():
    """The outbox is bounded; nobody waits for it."""
    peer = Peer()
    stream = peer.stream()
    peer.is_reading.clear()
    for number in range(MAX_OUTBOX + 1):
        stream.send(str(number))
    error = await stream.run(lambda message: None)
    assert "unread" in error.message


@virtual_time
async def test_messages_keep_their_order_and_the_end_is_told_once():
    """What is queued goes out in order; the first reason to end counts."""
    peer, heard = Peer(), []
    stream = peer.stream()
    for number in range(5):
        stream.send(str(number))
    peer.inbox.put_nowait("hello")
    peer.inbox.put_nowait(None)
    error = await stream.run(heard.append)
    assert heard == ["hello"]
    assert "ended" in error.message
    stream.close(TransferFailed("later"))
    stream.send("nobody hears this")
    assert peer.sent in ([str(n) for n in range(5)], [])


@virtual_time
async def test_a_message_that_need_not_wait_leaves_at_once():
    """No task is woken for it; where one has to wait, all that follow keep their order."""
    peer = Peer()
    peer.can_send_nowait = True
    stream = peer.stream()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stream.run(lambda message: None))
        stream.send("1")
        assert peer.sent == ["1"]
        peer.is_reading.clear()
        peer.can_send_nowait = False
        stream.send("2")
        stream.send("3")
        await asyncio.sleep(0)  # the writer is amid sending the second
        peer.can_send_nowait = True
        stream.send("4")
        assert peer.sent == ["1"]
        peer.is_reading.set()
        await asyncio.sleep(0.01)
        assert peer.sent == ["1", "2", "3", "4"]
        stream.send("5")
        assert peer.sent[-1] == "5"
        running.cancel()


@virtual_time
async def test_a_message_may_be_left_to_a_task():
    """What its sender does in the same turn, and what it wakes by that, comes first."""
    peer = Peer()
    peer.can_send_nowait = True
    stream = peer.stream()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stream.run(lambda message: None))
        await asyncio.sleep(0.01)
        stream.send("1", at_once=False)
        assert peer.sent == []
        await asyncio.sleep(0.01)
        assert peer.sent == ["1"]
        running.cancel()


@pytest.mark.parametrize("at_once", [True, False])
@virtual_time
async def test_a_message_that_must_not_be_sent_ends_the_stream(at_once: bool):
    """Its sender does not hear of it; whoever runs the stream does. Nothing follows it, neither
    from the queue nor at once: the peer would miss one of several."""

    class Strict(Peer):
        def send_nowait(self, message: str) -> bool:
            if at_once:
                raise TooLarge(f"{message} is too large")
            return super().send_nowait(message)

        async def send(self, message: str) -> None:
            if at_once:
                return await super().send(message)
            self.can_send_nowait = True
            asyncio.get_running_loop().call_soon(stream.send, "2")
            raise TooLarge(f"{message} is too large")

    peer = Strict()
    stream = peer.stream()
    stream.send("1")
    assert stream.is_over is at_once
    error = await stream.run(lambda message: None)
    assert isinstance(error, TooLarge)
    assert peer.sent == []


@virtual_time
async def test_all_that_has_arrived_is_told_in_one_go():
    """What is there is not waited for, and its order is kept."""
    peer = Peer()
    peer.there = ["2", "3"]
    heard: list[str] = []

    def on_message(message: str) -> None:
        heard.append(message)
        if message == "3":
            stream.close(WorkerLost("enough"))

    stream = peer.stream()
    peer.inbox.put_nowait("1")
    assert (await stream.run(on_message)).message == "enough"
    assert heard == ["1", "2", "3"]
