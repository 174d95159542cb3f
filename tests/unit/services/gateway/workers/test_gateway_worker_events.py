"""What a worker tells the gateway: nothing in it may do more than end that worker's session."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.gateway.core.lifecycle import Leg, Lifecycle
from services.gateway.core.routing.router import Routed
from services.gateway.core.routing.routing import POLICIES, PairWanted
from services.gateway.core.scaling.scaling import seen_workers
from services.gateway.core.worker import Role, Worker, WorkerStatus
from services.gateway.workers.membership import Membership
from services.gateway.workers.peers import WorkerSession
from services.gateway.workers.registry import read_announcement
from services.gateway.workers.session import LegShell
from services.gateway.workers.timeline import Timeline
from shared import wire
from shared.address import Address, is_host
from shared.errors import IncompatiblePeer, MeshError, RemoteProtocolError, WorkerLost
from shared.ids import Incarnation, StreamId
from shared.messages import codec
from shared.messages.columns import pack_u32, pack_u64
from shared.messages.message_codec import MessageCodec
from shared.messages.status_codec import StatusReader
from shared.request import SamplingParams
from shared.rpc.methods import WORKER_SESSION
from shared.rpc.stream import open_stream
from shared.rpc.tcp import TcpNetwork
from shared.schedule.plan import PromptTimes
from tests.support.routing import REQUEST, a_worker
from tests.support.worker_mesh import MODEL


class AWorker:
    """As much of a worker as a session needs to hear from it."""

    def __init__(self, role: Role) -> None:
        self.role = role


def a_session(role: Role) -> WorkerSession:
    none: Any = None
    worker = cast("Any", AWorker(role))
    return WorkerSession(worker, none, Incarnation(1), lambda: None)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1e-9, 1e9])
async def test_a_time_that_cannot_be_is_as_if_it_was_not_told(value: float) -> None:
    """One would spoil sums and histograms for ever, but no answer hangs on it."""
    timeline = Timeline(0.0)
    life = Lifecycle((1,), SamplingParams(), max_attempts=1)
    request: Any = SimpleNamespace(timeline=timeline, lifecycle=life, granted=lambda _: None)
    leg = LegShell(request, 0, Leg.PREFILL, cast("Any", None))
    leg.granted(wire.Granted(stream_id=1, wait_s=value))
    leg.joined(wire.Joined(stream_id=1, bytes_received=1, receive_s=value))
    assert (timeline.receipt().reserve_wait_s, timeline.receipt().transfer_s) == (0.0, 0.0)
    leg.pushed(wire.PrefillDone(stream_id=1, bytes_sent=1, transfer_s=value, exposed_s=value))
    assert (timeline.receipt().transfer_s, timeline.receipt().transfer_exposed_s) == (0.0, 0.0)
    told = dict.fromkeys(("queue_s", "compute_s", "fetch_s", "load_s"), value)
    _, times = codec.prefill_token_from_wire(wire.PrefillToken(stream_id=1, **told))
    assert times == PromptTimes(0.0, 0.0, 0)


@pytest.mark.parametrize(
    "event",
    [
        wire.WorkerEvent(token=wire.PrefillToken(stream_id=1, token_id=100, logprob=math.nan)),
        wire.WorkerEvent(
            tokens=wire.StepTokens(
                stream_ids=pack_u32([1, 2]),
                indices=pack_u32([1, 1]),
                token_ids=pack_u32([99, 100]),
                finish_reasons=bytes(2),
            )
        ),
    ],
    ids=["first", "step"],
)
def test_what_is_no_token_of_the_model_is_no_answer(event: wire.WorkerEvent) -> None:
    """The client would read it, and be refused for it when another worker is to go on."""
    session = a_session(Role.DECODE)
    session.worker = a_worker(Role.DECODE, 5)
    session._legs[StreamId(1)] = cast("Any", object())
    with pytest.raises(RemoteProtocolError, match="below the vocabulary size 100"):
        session._on_event(event)


@pytest.mark.parametrize(
    ("event", "error", "words"),
    [
        (wire.WorkerEvent(heartbeat=wire.Heartbeat()), RemoteProtocolError, "begins with a"),
        (wire.WorkerEvent(hello=wire.Hello(incarnation=5)), IncompatiblePeer, "protocol 0"),
        (
            wire.WorkerEvent(hello=codec.own_hello(wire.Role.DECODE, Incarnation(6))),
            WorkerLost,
            "another process",
        ),
    ],
    ids=["no hello", "another release", "another process"],
)
async def test_why_a_worker_did_not_say_hello_is_told(
    event: wire.WorkerEvent, error: type[MeshError], words: str
) -> None:
    """Only an incarnation that differs is another process."""

    class Stream:
        async def receive(self) -> wire.WorkerEvent:
            return event

    session = a_session(Role.DECODE)
    session.worker = a_worker(Role.DECODE, 5)
    with pytest.raises(error, match=words):
        await session._shake_hands(cast("Any", Stream()))


def an_announcement(**fields: Any) -> wire.WorkerAnnounce:
    return wire.WorkerAnnounce(
        hello=wire.Hello(
            role=wire.Role.PREFILL, incarnation=5, protocol_version=codec.PROTOCOL_VERSION
        ),
        model=codec.model_to_wire(MODEL.spec),
        layout=codec.layout_to_wire(MODEL.layout),
        host="gpu-1",
        port=9,
        num_blocks=9,
        block_size=9,
        **fields,
    )


def test_what_a_worker_serves_is_its_role_or_what_it_says() -> None:
    """Different roles, its own among them; anything else is no announcement."""
    assert read_announcement(an_announcement(), "peer").serves == (Role.PREFILL,)
    both = [wire.Role.DECODE, wire.Role.PREFILL]
    assert read_announcement(an_announcement(serves=both), "peer").serves == tuple(Role)
    for serves in (
        [wire.Role.DECODE],
        [wire.Role.GATEWAY],
        [wire.Role.PREFILL, wire.Role.GATEWAY],
        [wire.Role.PREFILL, wire.Role.PREFILL],
        [wire.Role.PREFILL, wire.Role.UNSPECIFIED],
    ):
        with pytest.raises(RemoteProtocolError, match="different roles"):
            read_announcement(an_announcement(serves=serves), "peer")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"port": 65536}, "port must be in 1..65535"),
        ({"block_size": 0}, "num_blocks and block_size must be positive"),
        ({"model": wire.ModelInfo()}, "fingerprint must be 32 bytes"),
        ({"layout": wire.KvLayout(dtype="int3")}, "dtype must be one of float32"),
    ],
)
def test_an_announcement_that_is_refused_says_which_field(
    fields: dict[str, Any], words: str
) -> None:
    """The sentence alone: it is all that a log shows."""
    announce = an_announcement()
    for name, value in fields.items():
        setattr(announce, name, value)
    with pytest.raises(RemoteProtocolError, match=words):
        read_announcement(announce, "peer")


def test_a_report_says_what_is_held_and_where_home_is() -> None:
    """What a worker leaves out means nothing held, and the home that it joined with."""
    reader = StatusReader()
    plain = reader.read(wire.WorkerStatus(paired=pack_u64([7])))
    assert (plain.num_prompts, plain.num_answers, plain.home, plain.home_epoch) == (0, 0, None, 0)
    full = reader.read(
        wire.WorkerStatus(
            paired=pack_u64([7]),
            seen_id=4,
            num_prompts=2,
            num_answers=5,
            home=wire.Role.DECODE,
            home_epoch=6,
            dram_token_s=1e-6,
            ssd_token_s=float("nan"),
            step_s=float("nan"),
        )
    )
    assert (full.dram_token_s, full.ssd_token_s) == (1e-6, 0.0)  # what is no amount is not believed
    assert full.step_s == 0.0
    assert full.seen == 4
    assert (full.num_prompts, full.num_answers, full.home_epoch) == (2, 5, 6)
    assert full.home is Role.DECODE
    assert full.paired is plain.paired
    assert reader.read(wire.WorkerStatus()).paired == frozenset()


class Silence:
    """A network in which nobody answers."""

    @contextlib.asynccontextmanager
    async def channel(self, address: Address) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield address


async def test_a_worker_that_serves_both_roles_has_one_session() -> None:
    """It is usable when that is up; what it is at home says whether it has standing partners, or
    is one; its orders count whatever they ask for."""
    network: Any = Silence()
    policy = POLICIES["splitwise"]()
    randbytes = random.Random(1).randbytes
    async with Membership(network, policy, Incarnation(1), randbytes).running() as members:
        both = read_announcement(an_announcement(serves=[2, 3]), "peer")
        hello = wire.Hello(
            role=wire.Role.DECODE, incarnation=6, protocol_version=codec.PROTOCOL_VERSION
        )
        other_announcement = an_announcement()
        other_announcement.hello = hello
        other = read_announcement(other_announcement, "peer")
        for worker in (both, other):
            members.join(worker)
        assert len(members.sessions) == 2
        assert not both.is_usable
        both.is_connected = True
        assert both.is_usable
        both.is_silent = True
        assert not both.is_usable

        def partners(worker: Worker) -> list[int]:
            return [peer.incarnation for peer in members.table.standing_partners(worker)]

        third = a_worker(Role.PREFILL, 9)
        assert [partners(it) for it in (both, other, third)] == [[6], [], [6]]
        members.update(both.incarnation, WorkerStatus(home=Role.DECODE, home_epoch=1))
        assert [partners(it) for it in (both, other, third)] == [[], [], [5, 6]]
        members.update(both.incarnation, WorkerStatus(seen=StreamId(1)))
        both.sent(Role.PREFILL, StreamId(1), num_tokens=9, num_blocks=1)
        both.sent(Role.DECODE, StreamId(2), num_tokens=0, num_blocks=2)
        assert (both.pending_tokens, both.reserved_blocks) == (0, 2)
        members.sessions[both.incarnation].abandon(WorkerLost("gone"))
        assert both.reserved_blocks == 0
        members.leave(both, "it left")
        assert members.table.at_home_with_tokens == (other,)
        assert len(members.sessions) == 1


async def test_a_pair_that_is_wanted_is_told_to_its_worker_alone() -> None:
    """A thousand tasks that wake for each cost more than all decisions."""
    network: Any = Silence()
    policy, randbytes = POLICIES["conductor"](), random.Random(1).randbytes
    async with Membership(network, policy, Incarnation(1), randbytes).running() as members:
        for number in (5, 6, 7):
            members.join(a_worker(Role.PREFILL, number))
        told = {number: it.next for number, it in members.directives.items()}
        wanted = Routed(None, [PairWanted(Incarnation(6), Incarnation(5))])
        members.router.route = lambda *_: wanted  # type: ignore[method-assign]
        assert members.route(REQUEST) is None
        assert [number for number, it in told.items() if it.is_set()] == [6]


async def test_what_has_just_joined_is_new() -> None:
    """Its first report comes a moment later: until then it is no worker that was silent for
    hours."""
    network: Any = Silence()
    policy, randbytes = POLICIES["least_loaded"](), random.Random(1).randbytes
    async with Membership(network, policy, Incarnation(1), randbytes).running() as members:
        members.join(read_announcement(an_announcement(), "peer"))
        (seen,) = seen_workers(members.table.workers, asyncio.get_running_loop().time())
        assert seen.age_s < 1.0


async def test_silence_before_a_leave_is_remembered() -> None:
    """A client has waited through it; that of an earlier session is over."""
    session = a_session(Role.DECODE)
    session.worker = a_worker(Role.DECODE, 5)
    control: Any = SimpleNamespace(silence_s=0.9)
    for before in (0.0, 5.0):
        session._last_silence_s, session._control = before, control
        session.abandon(WorkerLost("the worker left the mesh"))
        assert session.silence_s == 0.9


NO_HOSTS = [
    "",
    ".",
    "gpu..local",
    "a" * 64,
    "-gpu",
    "gpu-",
    "a b",
    "a/b",
    "gpü",
    "a." * 127 + "abc",
]


@pytest.mark.parametrize("host", NO_HOSTS)
def test_what_is_no_host_name(host: str) -> None:
    """Labels of 1 to 63 letters, digits, hyphens and underscores."""
    assert not is_host(host)


@pytest.mark.parametrize(
    "host", ["gpu-1.local", "gpu-1.local.", "a", "7", "my_service", "10.0.0.1", "fd00::7", "::1"]
)
def test_what_is_a_host(host: str) -> None:
    """Names, and addresses of both families."""
    assert is_host(host)


@pytest.mark.parametrize("host", [host for host in NO_HOSTS if host])
async def test_a_worker_with_an_impossible_host_does_not_join(host: str) -> None:
    """Its session would end in whatever the resolver raises; a call to it is a typed error, too."""
    announce = an_announcement()
    assert read_announcement(announce, "peer").host == "gpu-1"
    announce.host = host
    with pytest.raises(RemoteProtocolError, match="host"):
        read_announcement(announce, "peer")
    with pytest.raises(MeshError) as caught:
        async with (
            TcpNetwork().channel(Address(host, 9)) as channel,
            open_stream(channel, WORKER_SESSION) as stream,
        ):
            await stream.send(wire.WorkerCommand())
    assert isinstance(caught.value, WorkerLost)


def test_a_worker_may_have_learned_from_more_steps_than_a_u32_counts() -> None:
    """At 0.4 ms a step it takes twenty days."""
    codec = MessageCodec()
    fit = wire.StepFit(token_s=1.0, num_steps=1 << 32)
    assert codec.decode(codec.encode(fit, wire.StepFit), wire.StepFit) == fit
