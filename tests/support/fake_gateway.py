"""A gateway for worker tests: joins workers and speaks the session streams, and does only what the
test says.

It never retries, never cancels and never chooses; every event that a worker sends is kept. Virtual
time or real.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared import wire
from shared.address import Address
from shared.errors import MeshError
from shared.ids import Incarnation, StreamId
from shared.messages import codec
from shared.messages.columns import pack_u32, unpack_u64
from shared.request import FinishReason, SamplingParams
from shared.rpc.methods import REGISTRY_JOIN, WORKER_SESSION
from shared.rpc.network import Network
from shared.rpc.service import Servicer, bind
from shared.rpc.stream import ClientStream, open_stream
from tests.support.step_rows import step_tokens_from_wire


@dataclass
class FakeRequest:
    """One attempt on one pair; every event of both legs, in order of arrival."""

    gateway: FakeGateway
    stream_id: StreamId
    prefill: Incarnation
    decode: Incarnation
    num_prompt_tokens: int
    events: list[Any] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    finish: FinishReason = FinishReason.NONE
    token: wire.PrefillToken | None = None
    done: wire.PrefillDone | None = None
    granted: wire.Granted | None = None
    joined: wire.Joined | None = None
    errors: list[MeshError] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        """Token ids by index; indices must be dense."""
        first = min(self.tokens)
        assert sorted(self.tokens) == list(range(first, first + len(self.tokens)))
        return [self.tokens[index] for index in sorted(self.tokens)]

    async def until(self, condition: Callable[[FakeRequest], object]) -> None:
        """Wait until the condition holds; raises the first error that a worker reports before."""
        async with self.gateway.changed:
            await self.gateway.changed.wait_for(lambda: condition(self) or self.errors)
        if not condition(self):
            raise self.errors[0]

    async def finished(self) -> list[int]:
        """Wait for the finish reason and for prefill's last word; return the answer."""
        await self.until(lambda r: r.finish is not FinishReason.NONE and r.done is not None)
        return self.answer

    def cancel(self) -> None:
        """Cancel both legs."""
        self.cancel_prefill()
        self.cancel_decode()

    def cancel_prefill(self) -> None:
        """Cancel the prefill leg."""
        cancel = wire.CancelOrder(stream_id=self.stream_id)
        self.gateway.sessions[self.prefill].send(wire.WorkerCommand(cancel=cancel))

    def cancel_decode(self) -> None:
        """Cancel the decode leg."""
        cancel = wire.CancelOrder(stream_id=self.stream_id)
        self.gateway.sessions[self.decode].send(wire.WorkerCommand(cancel=cancel))

    def add_tokens(self, step: wire.StepTokens) -> None:
        for stream_id, token in step_tokens_from_wire(step):
            if stream_id == self.stream_id:
                self._add(token.index, token.token_id, token.finish_reason)

    def add_first(self, event: wire.PrefillToken) -> None:
        self.token = event
        token, _ = codec.prefill_token_from_wire(event)
        self._add(token.index, token.token_id, token.finish_reason)

    def _add(self, index: int, token_id: int, finish: FinishReason) -> None:
        assert index not in self.tokens, "an index came twice"
        assert self.finish is FinishReason.NONE, "a token came after the finish"
        self.tokens[index] = token_id
        self.finish = finish


class FakeSession:
    """One session stream to one worker. ``is_silent`` stops the heartbeats, ``may_read`` cleared
    stops reading.
    """

    def __init__(self, gateway: FakeGateway, incarnation: Incarnation) -> None:
        self._gateway = gateway
        self._incarnation = incarnation
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.is_silent = False
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.is_open = False
        self.error: MeshError | None = None
        self.num_heartbeats = 0
        self._stream: ClientStream[Any, Any] | None = None

    def send(self, command: Any) -> None:
        self._outbox.put_nowait(command)

    def reset(self) -> None:
        """Break the stream."""
        assert self._stream is not None
        self._stream.cancel()

    async def run(self, address: Address) -> None:
        try:
            async with (
                self._gateway.network.channel(address) as channel,
                open_stream(channel, WORKER_SESSION) as stream,
            ):
                self._stream = stream
                await stream.send(wire.WorkerCommand(hello=self._gateway.hello))
                event = await stream.receive()
                assert event is not None
                assert event.hello is not None
                assert event.hello.incarnation == self._incarnation
                self.is_open = True
                await self._gateway.notify()
                async with asyncio.TaskGroup() as tasks:
                    others = [
                        tasks.create_task(self._write(stream)),
                        tasks.create_task(self._beat()),
                    ]
                    try:
                        await self._read(stream)
                    finally:
                        for task in others:
                            task.cancel()
        except* MeshError as group:
            self.error = group.exceptions[0]  # type: ignore[assignment]
        finally:
            self.is_open = False
            await self._gateway.notify()

    async def _write(self, stream: ClientStream[Any, Any]) -> None:
        while True:
            command = await self._outbox.get()
            with contextlib.suppress(MeshError):
                await stream.send(command)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if not self.is_silent:
                self.send(wire.WorkerCommand(heartbeat=wire.Heartbeat()))

    async def _read(self, stream: ClientStream[Any, Any]) -> None:
        while True:
            await self.may_read.wait()
            event = await stream.receive()
            if event is None:
                return
            if event.heartbeat is not None:
                self.num_heartbeats += 1
                continue
            self._gateway.dispatch(self._incarnation, event)
            await self._gateway.notify()


class FakeGateway:
    """Made by ``fake_gateway``. ``changed`` is notified after every event, report and session
    change.
    """

    def __init__(self, network: Network, incarnation: Incarnation, dials: bool = True) -> None:
        self.network = network
        self.incarnation = incarnation
        self.hello = wire.Hello(
            protocol_version=codec.PROTOCOL_VERSION,
            role=wire.Role.GATEWAY,
            incarnation=incarnation,
            version="test",
        )
        self.changed = asyncio.Condition()
        self.workers: dict[Incarnation, wire.WorkerAnnounce] = {}
        self.status: dict[Incarnation, wire.WorkerStatus] = {}
        self.sessions: dict[Incarnation, FakeSession] = {}
        self.requests: list[FakeRequest] = []
        self.num_joins = 0
        self.num_statuses = 0
        self._dials = dials
        self.port = 0
        self.refusal: MeshError | None = None
        self.gather_s: float | None = None
        self.drain: asyncio.Event = asyncio.Event()
        self._next_stream_id = 1
        self._tasks: asyncio.TaskGroup | None = None

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds after some event."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def paired(self, prefill: Incarnation, decode: Incarnation) -> None:
        """Wait until the prefill worker reports the pair, and both sessions are open."""
        await self.until(
            lambda: (
                prefill in self.status
                and decode in unpack_u64(self.status[prefill].paired)
                and all(w in self.sessions and self.sessions[w].is_open for w in (prefill, decode))
            )
        )

    def start(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        prefill: Incarnation,
        decode: Incarnation,
        request_id: bytes = b"",
        attempt: int = 0,
        num_prompt_tokens: int | None = None,
        deadline_s: float = 0.0,
        wait_s: float = 2.0,
        salt: bytes = b"",
        lease_token: bytes = b"",
        legs: str = "pd",
        is_pushed: bool = True,
        prefix: wire.PrefixSource | None = None,
    ) -> FakeRequest:
        """Send both legs (or one: legs="p", "d") at this instant."""
        stream_id = StreamId(self._next_stream_id)
        self._next_stream_id += 1
        num_prompt = len(prompt) if num_prompt_tokens is None else num_prompt_tokens
        request_id = request_id or stream_id.to_bytes(16, "little")
        common: dict[str, Any] = {
            "stream_id": stream_id,
            "request_id": request_id,
            "attempt": attempt,
            "token_ids": pack_u32(prompt),
            "num_prompt_tokens": num_prompt,
            "sampling": codec.sampling_to_wire(sampling),
            "deadline_s": deadline_s,
            "cache_salt": salt,
            "lease_token": lease_token or request_id[::-1],
        }
        request = FakeRequest(self, stream_id, prefill, decode, num_prompt)
        self.requests.append(request)
        if "p" in legs:
            sink = decode if is_pushed else 0
            prompt_order = wire.WorkOrder(
                role=wire.Role.PREFILL, **common, peer_incarnation=sink, prefix=prefix
            )
            self.sessions[prefill].send(wire.WorkerCommand(order=prompt_order))
        if "d" in legs:
            whole = prefix if prefill == decode else None
            answer_order = wire.WorkOrder(
                role=wire.Role.DECODE,
                **common,
                wait_s=wait_s,
                peer_incarnation=prefill,
                prefix=whole,
            )
            self.sessions[decode].send(wire.WorkerCommand(order=answer_order))
        return request

    def dispatch(self, worker: Incarnation, event: wire.WorkerEvent) -> None:
        for request in self.requests:
            if worker not in (request.prefill, request.decode):
                continue
            request.events.append(event)
            if event.failed is not None and event.failed.stream_id == request.stream_id:
                request.errors.append(codec.error_from_wire(event.failed.error))
            if event.token is not None and event.token.stream_id == request.stream_id:
                request.add_first(event.token)
            if event.done is not None and event.done.stream_id == request.stream_id:
                request.done = event.done
            if event.tokens is not None:
                request.add_tokens(event.tokens)
            if event.granted is not None and event.granted.stream_id == request.stream_id:
                request.granted = event.granted
            if event.joined is not None and event.joined.stream_id == request.stream_id:
                request.joined = event.joined

    # --- Registry.Join ---------------------------------------------------------------------------

    async def join(self, stream: Any) -> None:
        report = await stream.receive()
        announce = report.announce
        incarnation = Incarnation(announce.hello.incarnation)
        self.num_joins += 1
        if self.refusal is not None:
            await stream.send(wire.GatewayDirective(refused=codec.error_to_wire(self.refusal)))
            await self.notify()
            return
        await stream.send(wire.GatewayDirective(hello=self.hello))
        if self.gather_s is not None:
            await stream.send(wire.GatewayDirective(pace=wire.Pace(gather_s=self.gather_s)))
        announce.host = announce.host or stream.peer.host
        self.workers[incarnation] = announce
        is_prefill = announce.hello.role == wire.Role.PREFILL
        old = self.sessions.get(incarnation)
        if self._dials and (old is None or not old.is_open):
            session = self.sessions[incarnation] = FakeSession(self, incarnation)
            assert self._tasks is not None
            self._tasks.create_task(session.run(Address(announce.host, announce.port)))
        await self.notify()
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self._tell(stream, is_prefill)),
                tasks.create_task(self._drain(stream)),
            ]
            try:
                while (report := await stream.receive()) is not None:
                    self.status[incarnation] = report.status
                    self.num_statuses += 1
                    await self.notify()
            finally:
                for task in others:
                    task.cancel()
                self.workers.pop(incarnation, None)

    async def _drain(self, stream: Any) -> None:
        await self.drain.wait()
        await stream.send(wire.GatewayDirective(drain=wire.Drain()))

    async def _tell(self, stream: Any, is_prefill: bool) -> None:
        told: list[wire.Peer] | None = None
        while is_prefill:
            peers = [
                wire.Peer(incarnation=i, host=w.host, port=w.port)
                for i, w in self.workers.items()
                if w.hello.role == wire.Role.DECODE
            ]
            if peers != told:
                told = peers
                await stream.send(wire.GatewayDirective(peers=wire.PeerList(peers=peers)))
            async with self.changed:
                await self.changed.wait()


@contextlib.asynccontextmanager
async def fake_gateway(
    network: Network, address: Address, *, incarnation: int = 0x6A7E, dials: bool = True
) -> AsyncIterator[FakeGateway]:
    """Serve for the length of the block. dials: open a session to every worker that joins."""
    gateway = FakeGateway(network, Incarnation(incarnation), dials)
    async with asyncio.TaskGroup() as tasks:
        gateway._tasks = tasks
        async with network.serve(address, [Servicer(bind(REGISTRY_JOIN, gateway.join))]) as server:
            gateway.port = server.address.port
            try:
                yield gateway
            finally:
                gateway._tasks = None
                for session in gateway.sessions.values():
                    if session.is_open:
                        session.reset()
