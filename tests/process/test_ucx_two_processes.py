"""UCX between two real processes, on each lane: right bytes, right lane, and every bad end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import AsyncIterator

import pytest

from shared.lanes import Certainty, LaneFinding, more_certain
from shared.transport.address import seal, unseal
from tests.support.tiers import few
from tests.support.ucx_peer import Peer, a_pair, a_peer

pytestmark = [pytest.mark.ucx, pytest.mark.process]

BIG = 16 << 20
HUGE = 64 << 20
LONG = 256 << 20
RENDEZVOUS = 1 << 20
LANES = {"sysv": "^posix", "tcp": "tcp"}


@contextlib.asynccontextmanager
async def a_pair_over(lane: str) -> AsyncIterator[tuple[Peer, Peer]]:
    async with a_pair(UCX_TLS=LANES[lane]) as pair:
        yield pair


async def push(source: Peer, target: Peer, tag: int, num_bytes: int) -> None:
    """Move one message and assert that it arrived."""
    await target.ask("receive", tag=tag, num_bytes=num_bytes)
    await source.ask("send", tag=tag, num_bytes=num_bytes)
    outcome, error, is_pattern, _ = await target.ask("settle", tag=tag)
    assert (outcome, error, is_pattern) == ("done", "", True)
    assert (await source.ask("settle", tag=tag))[0] == "done"


async def lane_of(source: Peer, target: Peer, num_bytes: int) -> str:
    """What carried messages of this size, as both ends together know it from UCX's own tables."""
    sent = await source.ask("find_lane", num_bytes=num_bytes, sends=True)
    received = await target.ask("find_lane", num_bytes=num_bytes, sends=False)
    found = more_certain(LaneFinding(*sent), LaneFinding(*received))
    assert found.certainty >= Certainty.CHOSEN
    return found.lane


async def leave(*peers: Peer) -> None:
    """Close each transport, end each process, and assert that both went well."""
    for peer in peers:
        assert await peer.ask("close") == []
        await peer.tell("leave")
        assert await peer.ended() == 0


@pytest.mark.parametrize("lane", few(LANES, "sysv"))
async def test_bytes_cross_on_the_lane_that_was_meant(lane: str) -> None:
    """64 MiB arrive whole both ways; on one host the lane is shared memory unless tcp is forced."""
    async with a_pair_over(lane) as (left, right):
        for tag, num_bytes in enumerate((0, 1, 8191, 8193, RENDEZVOUS, HUGE)):
            await push(left, right, tag, num_bytes)
            await push(right, left, 100 + tag, num_bytes)
        for num_bytes in (8191, HUGE):
            assert (await lane_of(left, right, num_bytes)).split("/")[0] == lane
        await leave(left, right)


@pytest.mark.quick
async def test_the_default_lane_on_one_host_is_shared_memory() -> None:
    """Nobody has to ask for it, and failure detection does not cost it."""
    async with a_pair() as (left, right):
        await push(left, right, 1, RENDEZVOUS)
        assert await lane_of(left, right, RENDEZVOUS) == "sysv"
        await leave(left, right)


def _can_unshare(what: str) -> bool:
    return subprocess.run(["unshare", what, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_unshare("--net"), reason="needs the right to make a network namespace")
async def test_messages_do_not_wait_for_wakeups_that_a_network_namespace_swallows() -> None:
    """Two containers with one IPC and two network namespaces: without own looks each message
    waits for UCX's keepalive, about a second; a hundred in 30 s have not."""
    namespaces = {"PEER_PREFIX": "unshare --net", "UCX_TLS": "sysv,self"}
    async with a_pair(**namespaces) as (left, right):
        async with asyncio.timeout(30):
            for tag in range(50):
                await push(left, right, tag, RENDEZVOUS)
                await push(right, left, 100 + tag, 4096)
        assert await lane_of(left, right, RENDEZVOUS) == "sysv"
        await leave(left, right)


@pytest.mark.parametrize("lane", few(LANES, "tcp"))
async def test_a_killed_peer_is_seen_once_and_fails_everything(lane: str) -> None:
    """After SIGKILL every operation settles as failed, and on_lost is called exactly once."""
    async with a_pair_over(lane) as (left, right):
        await push(left, right, 1, RENDEZVOUS)
        await right.ask("receive", tag=2, num_bytes=BIG)
        await right.ask("send", tag=3, num_bytes=BIG)
        left.signal(signal.SIGKILL)
        await left.ended()
        assert await right.ask("wait_lost") == 1
        assert (await right.ask("settle", tag=2))[0] == "failed"
        assert (await right.ask("settle", tag=3))[0] == "failed"
        assert not await right.ask("alive")
        await right.ask("send", tag=4, num_bytes=8)
        assert (await right.ask("settle", tag=4))[0] == "failed"
        await right.ask("close_endpoint")
        assert await right.ask("count_lost") == 1
        await leave(right)


@pytest.mark.parametrize("lane", LANES)
async def test_a_killed_peer_is_seen_amid_a_rendezvous(lane: str) -> None:
    """Dying while bytes move is no different."""
    async with a_pair_over(lane) as (left, right):
        for tag in range(8):
            await right.ask("receive", tag=tag, num_bytes=BIG)
        for tag in range(8):
            await left.tell("send", tag=tag, num_bytes=BIG)
        await left.answer()
        left.signal(signal.SIGKILL)
        await left.ended()
        assert await right.ask("wait_lost") == 1
        outcomes = [(await right.ask("settle", tag=tag))[0] for tag in range(8)]
        assert outcomes[-1] == "failed"
        assert set(outcomes) <= {"done", "failed"}
        await leave(right)


@pytest.mark.parametrize("lane", LANES)
async def test_abort_towards_a_stopped_peer_does_not_wait(lane: str) -> None:
    """A stopped process looks alive; closing its endpoint settles everything all the same."""
    async with a_pair_over(lane) as (left, right):
        await push(left, right, 1, RENDEZVOUS)
        left.signal(signal.SIGSTOP)
        await right.ask("receive", tag=2, num_bytes=BIG)
        await right.ask("send", tag=3, num_bytes=BIG)
        for tag in range(100, 200):
            await right.ask("send", tag=tag, num_bytes=8000)
        assert await right.ask("peek", tag=2) is None
        assert await right.ask("peek", tag=3) is None
        assert await right.ask("alive")
        await right.ask("close_endpoint")
        for tag in (2, 3, 199):
            assert await right.ask("peek", tag=tag) is not None
        assert await right.ask("count_lost") == 0
        await leave(right)


@pytest.mark.parametrize("lane", LANES)
async def test_a_cancelled_buffer_is_left_alone_once_settled(lane: str) -> None:
    """Cancelled amid a rendezvous and reused after settling, a buffer keeps its new bytes."""
    async with a_pair_over(lane) as (left, right):
        for tag in range(4):
            await right.ask("receive", tag=tag, num_bytes=BIG)
            await left.tell("send", tag=tag, num_bytes=BIG)
            if tag % 2:
                await left.answer()
            assert await right.ask("cancel_and_reuse", tag=tag) in ("done", "cancelled")
            if not tag % 2:
                await left.answer()
            assert (await left.ask("settle", tag=tag))[0] == "done"
            await push(left, right, 1000 + tag, RENDEZVOUS)
            assert await right.ask("is_reused_intact", tag=tag)
        await leave(left, right)


@pytest.mark.parametrize("threshold", ["8192", "1g"])
@pytest.mark.parametrize("lane", LANES)
async def test_closing_amid_a_message_leaves_the_buffer_alone(lane: str, threshold: str) -> None:
    """After the endpoint is closed no byte of the peer's arrives any more; also where UCX was told
    to let hardly any message meet its receive first, and the last of its parts comes after that."""
    async with a_pair(UCX_TLS=LANES[lane], UCX_RNDV_THRESH=threshold) as (left, right):
        await right.ask("receive", tag=1, num_bytes=BIG)
        await left.ask("send", tag=1, num_bytes=BIG)
        await right.ask("close_endpoint")
        assert await right.ask("cancel_and_reuse", tag=1) in ("done", "cancelled", "failed")
        await left.ask("close_endpoint")
        assert await left.ask("peek", tag=1) is not None
        address = await right.ask("address")
        await left.ask("connect", address=address)
        await right.ask("connect", address=await left.ask("address"))
        await push(left, right, 2, RENDEZVOUS)
        assert await right.ask("is_reused_intact", tag=1)
        await leave(left, right)


async def test_both_ends_may_close_while_a_socket_is_full() -> None:
    """The source has closed, its socket was full; when it looks again, that has emptied and the
    peer's word that it has closed, too, is there. UCX's own way with both ends the process."""
    async with a_pair_over("tcp") as (source, sink):
        await sink.ask("receive", tag=1, num_bytes=LONG)
        await source.ask("send", tag=1, num_bytes=LONG)
        await asyncio.sleep(0.02)  # nothing tells when its first bytes are on their way,
        sink.signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)  # nor when the socket is full,
        assert await source.ask("peek", tag=1) is None
        await source.ask("close_endpoint")
        source.signal(signal.SIGSTOP)
        sink.signal(signal.SIGCONT)
        await asyncio.sleep(0.05)
        await sink.ask("close_endpoint")
        await asyncio.sleep(0.3)  # nor when its last byte and the peer's word have come
        source.signal(signal.SIGCONT)
        await source.ask("connect", address=await sink.ask("address"))
        await sink.ask("connect", address=await source.ask("address"))
        await push(source, sink, 2, RENDEZVOUS)
        await leave(source, sink)


@pytest.mark.quick
async def test_a_window_is_written_by_the_peer_itself() -> None:
    """On one host: its word is eight bytes, and all the others are there with it."""
    async with a_pair() as (left, right):
        key = await right.ask("offer_window", tag=1, num_bytes=BIG)
        assert await left.ask("write_window", tag=1, key=key)
        assert await right.ask("settle", tag=1) == ["done", "", True, False]
        await leave(left, right)


async def test_a_window_whose_owner_died_can_still_be_written() -> None:
    """The mapping is the writer's own: nothing crashes, and the next window is another one."""
    async with a_pair() as (left, right):
        key = await right.ask("offer_window", tag=1, num_bytes=RENDEZVOUS)
        assert await left.ask("write_window", tag=1, key=key)
        assert (await right.ask("settle", tag=1))[0] == "done"
        right.signal(signal.SIGKILL)
        await right.ended()
        assert await left.ask("wait_lost") == 1
        assert await left.ask("rewrite_windows")
        await leave(left)


async def test_a_key_that_promises_too_much_is_not_mapped() -> None:
    """Its owner's word for address and length is not taken: the kernel knows the segment."""
    async with a_pair() as (left, right):
        key = bytes.fromhex(await right.ask("offer_window", tag=1, num_bytes=RENDEZVOUS))
        payload = unseal(b"UCXW", key)
        address, num_bytes = struct.unpack_from("<QQ", payload)
        for shift, grown in ((0, 1 << 20), (-4096, 4096), (0, 1 << 62), (1 << 40, 0), (0, 1 << 63)):
            place = struct.pack("<QQ", address + shift, num_bytes + grown)
            forged = seal(b"UCXW", place + payload[16:]).hex()
            assert not await left.ask("write_window", tag=2, key=forged)
        await push(left, right, 3, RENDEZVOUS)
        assert await left.ask("write_window", tag=1, key=key.hex())
        assert (await right.ask("settle", tag=1))[0] == "done"
        await leave(left, right)


@pytest.mark.parametrize("how", ["tcp", "ipc namespace"])
async def test_a_window_that_cannot_be_reached_is_not_mapped(how: str) -> None:
    """Over tcp alone, or out of another IPC namespace: the peer says so and writes nothing."""
    environment = {"UCX_TLS": LANES["tcp"]} if how == "tcp" else {"PEER_PREFIX": "unshare --ipc"}
    if how != "tcp" and not _can_unshare("--ipc"):
        pytest.skip("this user may not make an IPC namespace")
    async with a_peer(**environment) as left, a_peer() as right:
        left_address, right_address = await left.ask("open"), await right.ask("open")
        await left.ask("connect", address=right_address)
        await right.ask("connect", address=left_address)
        key = await right.ask("offer_window", tag=1, num_bytes=RENDEZVOUS)
        assert key is not None
        assert not await left.ask("write_window", tag=1, key=key)
        await push(left, right, 2, RENDEZVOUS)
        await leave(left, right)


@pytest.mark.parametrize("lane", LANES)
async def test_an_address_of_a_dead_process_harms_nobody(lane: str) -> None:
    """Connecting to one who is gone is refused or soon reported lost, without a hang or crash."""
    async with a_peer(UCX_TLS=LANES[lane]) as left:
        await left.ask("open")
        async with a_peer(UCX_TLS=LANES[lane]) as right:
            address = await right.ask("open")
            right.signal(signal.SIGKILL)
            await right.ended()
        if await left.ask("try_connect", address=address):
            await left.ask("send", tag=1, num_bytes=RENDEZVOUS)
            assert await left.ask("wait_lost") == 1
            assert (await left.ask("settle", tag=1))[0] == "failed"
        await leave(left)


async def test_a_host_that_answers_no_connection_holds_up_nobody() -> None:
    """As behind a firewall that drops: connecting does not wait for it, and meanwhile KV goes on
    to others."""
    async with a_pair_over("tcp") as (left, right), contextlib.AsyncExitStack() as sockets:
        async with a_peer(UCX_TLS="tcp") as gone:
            address, ports = await gone.ask("open"), await gone.ask("tcp_ports")
            gone.signal(signal.SIGKILL)
            await gone.ended()
        assert ports
        for port in ports:
            deaf = sockets.enter_context(socket.create_server(("", port), backlog=0))
            for _ in range(4):  # its queue is full after the first: the kernel drops what comes
                filler = sockets.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", deaf.getsockname()[1]))
        async with asyncio.timeout(20):
            await left.ask("connect", address=address)
            await left.ask("send", tag=1, num_bytes=8)
            await left.ask("connect", address=await right.ask("address"))
            await push(left, right, 2, RENDEZVOUS)
        await leave(left, right)


def _reset_all(listener: socket.socket) -> None:
    """Reset each connection as soon as it is there, until the listener is shut down."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


async def test_a_host_that_resets_each_connection_ends_nobody() -> None:
    """Often before the first message has left: UCX, where it waits in connect(), ends the process
    then."""
    async with a_peer(UCX_TLS="tcp", UCX_TCP_MAX_CONN_RETRIES="1") as left:
        await left.ask("open")
        async with a_peer(UCX_TLS="tcp") as gone:
            address, ports = await gone.ask("open"), await gone.ask("tcp_ports")
            gone.signal(signal.SIGKILL)
            await gone.ended()
        listeners = [socket.create_server(("", port)) for port in ports]
        resetters = [threading.Thread(target=_reset_all, args=(it,)) for it in listeners]
        for resetter in resetters:
            resetter.start()
        try:
            for tag in range(20):
                if await left.ask("try_connect", address=address):
                    await left.ask("send", tag=tag, num_bytes=8)
                    assert (await left.ask("settle", tag=tag))[0] == "failed"
                    await left.ask("close_endpoint")
        finally:
            for listener, resetter in zip(listeners, resetters, strict=True):
                listener.shutdown(socket.SHUT_RDWR)
                resetter.join()
                listener.close()
        await leave(left)


async def test_processes_without_a_common_lane_cannot_connect() -> None:
    """It is said at once, as TransferFailed."""
    async with a_peer(UCX_TLS="tcp") as left, a_peer(UCX_TLS="sysv,self") as right:
        await left.ask("open")
        assert not await left.ask("try_connect", address=await right.ask("open"))
        await leave(left, right)


@pytest.mark.parametrize("lane", LANES)
async def test_an_idle_transport_costs_no_cpu(lane: str) -> None:
    """With an endpoint and a posted receive the pump sleeps: CPU time stays far below a core."""
    async with a_pair_over(lane) as (left, right):
        await push(left, right, 1, RENDEZVOUS)
        await right.ask("receive", tag=2, num_bytes=RENDEZVOUS)
        assert await right.ask("idle_cpu_share", seconds=1.0) < 0.1
        await leave(left, right)


@pytest.mark.parametrize("lane", LANES)
async def test_a_process_that_just_ends_does_not_hang(lane: str) -> None:
    """Without any close, and with operations in flight, the process ends with exit code 0."""
    async with a_pair_over(lane) as (left, right):
        await right.ask("receive", tag=2, num_bytes=BIG)
        await right.ask("send", tag=3, num_bytes=BIG)
        await right.tell("leave")
        assert await right.ended() == 0
        await leave(left)


async def test_uvloop_carries_the_transport() -> None:
    """The same under the loop that production uses."""
    pytest.importorskip("uvloop")
    async with a_pair(PEER_LOOP="uvloop") as (left, right):
        await push(left, right, 1, BIG)
        left.signal(signal.SIGKILL)
        await left.ended()
        assert await right.ask("wait_lost") == 1
        await leave(right)


async def test_the_users_environment_wins() -> None:
    """A variable that is set already is not touched. The others are set before UCX is loaded, each
    time that a worker is made, and are gone afterwards: they are for nothing else that starts."""
    program = (
        "import asyncio, os\n"
        "from shared.transport.settings import UcxSettings\n"
        "from shared.transport.ucxx import open_ucx\n"
        "async def opened():\n"
        "    transport = await open_ucx(UcxSettings(tls='tcp,self', keepalive_interval_s=7.0))\n"
        "    told = transport._pump._context.config\n"
        "    assert told['TLS'] == 'tcp,sysv,self'\n"
        "    assert told['KEEPALIVE_INTERVAL'] == '7000000.00us'\n"
        "    await transport.close()\n"
        "async def main():\n"
        "    await opened()\n"
        "    await asyncio.gather(opened(), opened())\n"
        "before = dict(os.environ)\n"
        "asyncio.run(main())\n"
        "assert dict(os.environ) == before, {**os.environ}.keys() - before.keys()\n"
    )
    async with a_peer(UCX_TLS="tcp,sysv,self", PEER_PROGRAM=program) as peer:
        assert await peer.ended() == 0


async def test_importing_the_module_does_not_load_ucx() -> None:
    """The environment can still be set after the import; only ``open_ucx`` loads the library."""
    program = (
        "import sys\n"
        "import shared.transport.ucxx\n"
        "assert not any('libucxx' in name for name in sys.modules)\n"
    )
    async with a_peer(PEER_PROGRAM=program) as peer:
        assert await peer.ended() == 0


async def test_the_pumps_thread_is_prepared_before_ucx_starts_on_it() -> None:
    """A device library gets its context on the thread that makes progress."""
    program = (
        "import asyncio, threading\n"
        "from shared.transport.ucxx import open_ucx\n"
        "names = []\n"
        "async def main():\n"
        "    prepare = lambda: names.append(threading.current_thread().name)\n"
        "    transport = await open_ucx(prepare_thread=prepare)\n"
        "    await transport.close()\n"
        "asyncio.run(main())\n"
        "assert names == ['ucx-pump'], names\n"
    )
    async with a_peer(PEER_PROGRAM=program) as peer:
        assert await peer.ended() == 0
