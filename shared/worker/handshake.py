"""What two workers do before they are a pair: say who they are, and try each way that KV may flow.

A way is tried by its source with its sink: test frames, then the sink's staging windows. A pair is
ready when the frames came back as "right bytes".
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from shared import wire
from shared.engine.base import Buffer, Engine
from shared.engine.memory import staging
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
from shared.transfer.frames import HEADER_BYTES
from shared.transport.base import Outcome, Transport
from shared.transport.pairing import CANARY_BYTES, FIRST_CANARY_BYTES, HANDSHAKE_S, PairRules
from shared.worker.link import PairLink
from shared.worker.receiver import KvReceiver

NUM_CANARIES = 4
"""Of 64 KiB, 512 KiB and twice 4 MiB where they cross quickly; the first ones pay for wiring up."""

GROWTH = 8
QUICK_S = 0.5
"""A canary that took no longer is followed by one so many times as large. Others share the link."""

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

    async def hear_hello(self, stream: Stream, patience: asyncio.Timeout) -> PairTerms:
        """Theirs. Raises IncompatiblePeer, RemoteProtocolError, or the peer's reason."""
        terms = agree(self.identity, (await _next(stream, patience)).hello)
        self.rules.check_host(terms.host)
        self.rules.check_engine(self.identity.spec.engine, terms.engine)
        return terms

    async def try_out(self, stream: Stream, link: PairLink, patience: asyncio.Timeout) -> None:
        """As the source: send test frames for as long as the sink names tags, then map its windows.

        They lie in memory of KV's kind and get as large as KV's frames, unless the link is slow, so
        that UCX treats them alike. patience: gets ``HANDSHAKE_S`` anew with each word of the sink.
        Raises TransferFailed, IncompatiblePeer (the lane), RemoteProtocolError.
        """
        most = min(CANARY_BYTES, link.rule.max_frame_bytes)
        buffer = self.engine.new_buffer(most)
        data = self.random_bytes(most)
        await self.compute.copy(lambda: staging.write(buffer, data))
        found, num_bytes = LaneFinding("", Certainty.UNKNOWN), 0
        result = (await _next(stream, patience)).canary_result
        while result is not None and result.ok and result.tag:
            num_bytes = result.num_bytes
            if not HEADER_BYTES < num_bytes <= most:
                raise RemoteProtocolError("the sink asks for a canary of no possible size")
            digest = await self.compute.copy(partial(_digest, buffer, num_bytes))
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
            result = (await _next(stream, patience)).canary_result
            # The quickest counts: small ones tell how long the way is, not what the link carries.
            if (took_s := loop_time() - began_at) > 0:
                link.bytes_per_s = max(link.bytes_per_s, num_bytes / took_s)
            if await operation.settled() is not Outcome.DONE:
                raise TransferFailed(f"a canary was not sent: {operation.error}", code="canary")
            found = await link.endpoint.find_lane(buffer, num_bytes, sends=True)
        if result is None:
            raise RemoteProtocolError("the sink did not answer a canary")
        if not result.ok:
            raise TransferFailed("a canary arrived damaged", code="canary")
        link.lane_out = lane_of(result)
        self.rules.check_lane(link.lane_out)
        windows = windows_from_wire((await _next(stream, patience)).windows)
        is_mapped = await link.windows.map_all(windows)
        mapped = wire.WindowsMapped(mapped=is_mapped)
        await stream.send(wire.PairMessage(windows_mapped=mapped))

    async def try_in(
        self, stream: Stream, link: PairLink, sink: KvReceiver, patience: asyncio.Timeout
    ) -> None:
        """As the sink: receive a few test frames and say whether their bytes were right, then offer
        windows. patience, and raises: as ``try_out``."""
        most = min(CANARY_BYTES, link.rule.max_frame_bytes)
        num_bytes = min(FIRST_CANARY_BYTES, most)
        buffer = self.engine.new_buffer(most)
        first_tag = sink.tags.take()
        result, found = wire.CanaryResult(ok=True), LaneFinding("", Certainty.UNKNOWN)
        for tag in range(first_tag, first_tag + NUM_CANARIES):
            operation = self.transport.receive(link.endpoint, buffer, num_bytes, tag)
            result.tag, result.num_bytes = tag, num_bytes
            await stream.send(wire.PairMessage(canary_result=result))
            asked_at = loop_time()
            canary = (await _next(stream, patience)).canary
            if canary is None or canary.tag != tag or canary.num_bytes != num_bytes:
                raise RemoteProtocolError("a pair begins with canaries")
            found = finding_of(canary)
            result = wire.CanaryResult(ok=await operation.settled() is Outcome.DONE)
            if result.ok:
                digest = await self.compute.copy(partial(_digest, buffer, num_bytes))
                result.ok = digest == canary.digest
            took_s = loop_time() - asked_at
            if not result.ok:
                await stream.send(wire.PairMessage(canary_result=result))
                raise TransferFailed("a canary arrived damaged", code="canary")
            if took_s <= QUICK_S:
                num_bytes = min(GROWTH * num_bytes, most)
        ours = await link.endpoint.find_lane(buffer, num_bytes, sends=False)
        result.lane = link.lane_in = more_certain(ours, found).lane
        self.rules.check_lane(link.lane_in)
        await stream.send(wire.PairMessage(canary_result=result))
        offers, _held = sink.windows  # of a slot that is replaced meanwhile, ``link_up`` tells
        await stream.send(windows_to_wire(offers))
        mapped = (await _next(stream, patience)).windows_mapped
        if mapped is None:
            raise RemoteProtocolError("the source did not say whether it has mapped the windows")
        link.offered = offers if mapped.mapped else []


def _digest(buffer: Buffer, num_bytes: int) -> int:
    return staging.digest(staging.payload(buffer, num_bytes - HEADER_BYTES))


async def _next(stream: Stream, patience: asyncio.Timeout) -> wire.PairMessage:
    message = await stream.receive()
    if message is None:
        raise WorkerLost("the other worker ended the handshake")
    patience.reschedule(loop_time() + HANDSHAKE_S)
    return message
