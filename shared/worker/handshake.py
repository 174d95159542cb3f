"""What two workers do before they are a pair: say who they are, and try each way that KV may flow.

A way is tried by its source with its sink: test frames, then the sink's staging windows. A pair is
ready when the frames came back as "right bytes".
"""

from __future__ import annotations

from dataclasses import dataclass

from shared import wire
from shared.engine import staging
from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.errors import RemoteProtocolError, TransferFailed, WorkerLost
from shared.ids import RandomBytes
from shared.lanes import Certainty, LaneFinding, more_certain
from shared.messages.transfer_codec import (
    PairIdentity,
    PairTerms,
    agree,
    finding_of,
    hello_to_wire,
    lane_of,
    windows_from_wire,
    windows_to_wire,
)
from shared.rpc.heartbeat_stream import RawStream
from shared.runtime.loops import loop_time
from shared.transport.base import Outcome, Transport
from shared.transport.pairing import CANARY_BYTES, PairRules
from shared.worker.link import LinkSink, PairLink

NUM_CANARIES = 3
"""The first one pays for wiring up."""

Stream = RawStream[wire.PairMessage, wire.PairMessage]


@dataclass(frozen=True, slots=True)
class Handshake:
    """What one worker pairs up with. rules: pairs to refuse."""

    identity: PairIdentity
    engine: Engine
    compute: ComputeRunner
    transport: Transport
    random_bytes: RandomBytes
    rules: PairRules

    async def say_hello(self, stream: Stream) -> None:
        """Our half."""
        await stream.send(wire.PairMessage(hello=hello_to_wire(self.identity)))

    async def hear_hello(self, stream: Stream) -> PairTerms:
        """Theirs. Raises IncompatiblePeer, RemoteProtocolError, or the peer's reason."""
        terms = agree(self.identity, (await _next(stream)).hello)
        self.rules.check_host(terms.host)
        self.rules.check_engine(self.identity.spec.engine, terms.engine)
        return terms

    async def try_out(self, stream: Stream, link: PairLink) -> None:
        """As the source: send test frames for as long as the sink names tags, then map its windows.

        They lie in memory of KV's kind and are as large as KV's frames, so that UCX treats them
        alike. Raises TransferFailed, IncompatiblePeer (the lane), RemoteProtocolError.
        """
        num_bytes = min(CANARY_BYTES, link.rule.max_frame_bytes)
        buffer = self.engine.new_buffer(num_bytes)
        data = self.random_bytes(num_bytes)

        def fill() -> int:
            staging.write(buffer, data)
            return staging.digest(buffer)

        digest = await self.compute.copy(fill)
        fastest_s = float("inf")
        found = LaneFinding("", Certainty.UNKNOWN)
        result = (await _next(stream)).canary_result
        while result is not None and result.ok and result.tag:
            began_at = loop_time()
            operation = link.endpoint.send(buffer, num_bytes, result.tag)
            canary = wire.Canary(
                tag=result.tag,
                num_bytes=num_bytes,
                digest=digest,
                lane=found.lane,
                certainty=found.certainty,
            )
            await stream.send(wire.PairMessage(canary=canary))
            result = (await _next(stream)).canary_result
            fastest_s = min(fastest_s, loop_time() - began_at)
            if await operation.settled() is not Outcome.DONE:
                raise TransferFailed(f"a canary was not sent: {operation.error}", code="canary")
            found = await link.endpoint.find_lane(buffer, num_bytes, sends=True)
        if result is None:
            raise RemoteProtocolError("the sink did not answer a canary")
        if not result.ok:
            raise TransferFailed("a canary arrived damaged", code="canary")
        link.lane_out = lane_of(result)
        self.rules.check_lane(link.lane_out)
        if 0 < fastest_s < float("inf"):
            link.bytes_per_s = num_bytes / fastest_s
        is_mapped = await link.windows.map_all(windows_from_wire((await _next(stream)).windows))
        mapped = wire.WindowsMapped(mapped=is_mapped)
        await stream.send(wire.PairMessage(windows_mapped=mapped))

    async def try_in(self, stream: Stream, link: PairLink, sink: LinkSink) -> None:
        """As the sink: receive a few test frames and say whether their bytes were right, then offer
        windows. Raises as ``try_out``."""
        num_bytes = min(CANARY_BYTES, link.rule.max_frame_bytes)
        buffer = self.engine.new_buffer(num_bytes)
        first_tag = sink.tags.take()
        result, found = wire.CanaryResult(ok=True), LaneFinding("", Certainty.UNKNOWN)
        for tag in range(first_tag, first_tag + NUM_CANARIES):
            operation = self.transport.receive(link.endpoint, buffer, num_bytes, tag)
            result.tag = tag
            await stream.send(wire.PairMessage(canary_result=result))
            asked_at = loop_time()
            canary = (await _next(stream)).canary
            if canary is None or canary.tag != tag or canary.num_bytes != num_bytes:
                raise RemoteProtocolError("a pair begins with canaries")
            found = finding_of(canary)
            result = wire.CanaryResult(ok=await operation.settled() is Outcome.DONE)
            if result.ok:
                result.ok = await self.compute.copy(lambda: staging.digest(buffer)) == canary.digest
            result.seconds = loop_time() - asked_at
            if not result.ok:
                await stream.send(wire.PairMessage(canary_result=result))
                raise TransferFailed("a canary arrived damaged", code="canary")
        ours = await link.endpoint.find_lane(buffer, num_bytes, sends=False)
        result.lane = link.lane_in = more_certain(ours, found).lane
        self.rules.check_lane(link.lane_in)
        await stream.send(wire.PairMessage(canary_result=result))
        offers, _held = sink.windows  # of a slot that is replaced meanwhile, ``link_up`` tells
        await stream.send(windows_to_wire(offers))
        mapped = (await _next(stream)).windows_mapped
        if mapped is None:
            raise RemoteProtocolError("the source did not say whether it has mapped the windows")
        link.offered = offers if mapped.mapped else []


async def _next(stream: Stream) -> wire.PairMessage:
    """Raises MeshError: the peer's reason, if it refuses the pair."""
    message = await stream.receive()
    if message is None:
        raise WorkerLost("the other worker ended the handshake")
    return message
