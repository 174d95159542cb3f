"""What a worker tells the gateway: nothing in it may do more than end that worker's session."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from services.gateway.core.worker import Role
from services.gateway.workers.peers import WorkerSession
from services.gateway.workers.registry import read_announcement
from shared import wire
from shared.address import Address, is_host
from shared.errors import MeshError, RemoteProtocolError, WorkerLost
from shared.ids import Incarnation
from shared.messages import codec
from shared.rpc.methods import PREFILL_SESSION
from shared.rpc.stream import open_stream
from shared.rpc.tcp import TcpNetwork
from tests.support.worker_mesh import MODEL


class AWorker:
    """As much of a worker as a session needs to hear from it."""

    def __init__(self, role: Role) -> None:
        self.role = role


def a_session(role: Role) -> WorkerSession:
    none: Any = None
    return WorkerSession(
        cast("Any", AWorker(role)), Address("h", 1), none, Incarnation(1), "1", lambda: None
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0])
@pytest.mark.parametrize("name", ["queue_s", "compute_s", "transfer_s", "exposed_s"])
def test_times_of_a_prefill_worker_are_checked(name: str, value: float) -> None:
    """They go into sums and histograms, which one bad value would spoil for ever."""
    if name in ("queue_s", "compute_s"):
        token = wire.PrefillToken(logprob=math.nan, **{name: value})
        with pytest.raises(RemoteProtocolError, match="seconds"):
            codec.prefill_token_from_wire(token)
        return
    event = wire.PrefillEvent(done=wire.PrefillDone(stream_id=1, bytes_sent=9, **{name: value}))
    with pytest.raises(RemoteProtocolError, match="seconds"):
        a_session(Role.PREFILL)._on_prefill_event(event)


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_times_of_a_decode_worker_are_checked(value: float) -> None:
    """As prefill's."""
    session = a_session(Role.DECODE)
    for event in (
        wire.DecodeEvent(granted=wire.Granted(stream_id=1, wait_s=value)),
        wire.DecodeEvent(joined=wire.Joined(stream_id=1, receive_s=value)),
    ):
        with pytest.raises(RemoteProtocolError, match="seconds"):
            session._on_decode_event(event)


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
    announce = wire.WorkerAnnounce(
        hello=wire.Hello(
            role=wire.Role.PREFILL, incarnation=5, protocol_version=codec.PROTOCOL_VERSION
        ),
        model=codec.model_to_wire(MODEL.spec),
        layout=codec.layout_to_wire(MODEL.layout),
        host="gpu-1",
        port=9,
        num_blocks=9,
        block_size=9,
    )
    assert read_announcement(announce, "peer").host == "gpu-1"
    announce.host = host
    with pytest.raises(RemoteProtocolError, match="host"):
        read_announcement(announce, "peer")
    with pytest.raises(MeshError) as caught:
        async with (
            TcpNetwork().channel(Address(host, 9)) as channel,
            open_stream(channel, PREFILL_SESSION) as stream,
        ):
            await stream.send(wire.PrefillCommand())
    assert isinstance(caught.value, WorkerLost)
