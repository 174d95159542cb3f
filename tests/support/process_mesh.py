"""A mesh of real processes that a test puts together piece by piece: workers join and leave, are
armed with failpoints, killed and stopped, while clients ask over HTTP and gRPC.

``services/local.py`` starts a whole mesh at once; here every process is started alone, because a
fault test must decide who is there when a request comes. No task runs between calls, so one mesh
may serve all tests of a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from shared.address import Address
from shared.engine.fake import FakeModel
from shared.mesh_secret import new_secret
from shared.model_folder import ModelFolder, resolve_model
from shared.request import SamplingParams
from shared.rpc.tcp import TcpNetwork
from shared.runtime.parent import PARENT_FD
from tests.support.fake_reference import fake_continuation
from tests.support.grpc_client import ask
from tests.support.service_process import ServiceProcess, free_port

ANSWERS_WITHIN_S = 60.0
HAPPENS_WITHIN_S = 30.0
LOOK_AGAIN_S = 0.02
"""Metrics and readiness have no event over HTTP."""

KEPT_LINES = 40
ROLES = ("prefill", "decode")
ANY_PORT = {"http_port": 0, "grpc_port": 0, "mesh_port": 0}


@dataclass
class Answer:
    """What one client got over HTTP. error: the body or event of the error. arrived_at, ended_at:
    loop time of every token and of the end."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    num_done: int = 0
    status: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    receipt: dict[str, Any] = field(default_factory=dict)
    ended_at: float = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event; nothing may follow an error, and every token follows the last."""
        assert not self.errors, "an event came after the error"
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.receipt = event.get("receipt", self.receipt)
        for choice in event["choices"]:
            assert not self.finish_reasons, "something came after the finish reason"
            self.text += choice["text"]
            if (columns := choice["logprobs"]) is not None:
                self.tokens += columns["tokens"]
                now = asyncio.get_running_loop().time()
                self.arrived_at += [now] * len(columns["tokens"])
            if choice["finish_reason"] is not None:
                self.finish_reasons.append(choice["finish_reason"])

    def require_whole(self, num_tokens: int) -> None:
        """All tokens, exactly one finish reason, [DONE] once, no error."""
        assert not self.errors, self.errors
        assert self.status == 200
        assert len(self.tokens) == num_tokens
        assert self.finish_reasons == ["length"]
        assert self.num_done == 1

    def require_one_error(self) -> dict[str, Any]:
        """Exactly one typed error, and no finish."""
        assert len(self.errors) == 1, self
        assert self.finish_reasons == []
        assert self.num_done == 0
        (error,) = self.errors
        assert error["type"]
        assert error["code"]
        assert " " in error["message"]
        return error


class ProcessMesh:
    """All processes of a test; made by ``process_mesh``."""

    def __init__(self, engine: str, secret: str) -> None:
        self.engine = engine
        self.secret = secret
        self.processes: list[ServiceProcess] = []
        self.gateway_names: list[str] = []

    # --- processes ------------------------------------------------------------------------------

    async def start_gateway(self, **settings: Any) -> ServiceProcess:
        """Start a gateway; workers started later join it. settings: ``max_wait_s=1.0``."""
        gateway = await self.start("gateway", **{**ANY_PORT, **settings})
        await self.ready(gateway)
        gateway.metrics_url = f"http://127.0.0.1:{gateway.facts['http_port']}/metrics"
        self.gateway_names.append(f"127.0.0.1:{gateway.facts['mesh_port']}")
        return gateway

    async def start(
        self, role: str, *, module: str = "", prefix: Sequence[str] = (), **settings: Any
    ) -> ServiceProcess:
        """Start a process and return at once; its environment is nobody's but ``settings``'.

        module: runs the role in its own way (``odd_worker.py``). prefix: a command that becomes the
        process it is given.
        """
        name = f"{role}-{len(self.processes)}"
        wanted: dict[str, Any] = {"log_format": "json", "mesh_secret": self.secret, **settings}
        metrics_port = 0
        if role != "gateway":
            metrics_port = free_port()
            wanted = {
                "engine": self.engine,
                "device": "cpu",
                "gateway": ",".join(self.gateway_names),
                "metrics_port": metrics_port,
                "staging_mib": 16,
                "num_blocks": 256,
                "threads": 1,
                **wanted,
            }
        variables = {f"PDMESH_{key.upper()}": str(value) for key, value in wanted.items()}
        others = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
        ours, theirs = socket.socketpair()
        with theirs:
            _, process = await asyncio.get_running_loop().subprocess_exec(
                lambda: ServiceProcess(name, metrics_port, ours),
                *(*prefix, sys.executable, "-m"),
                *([module, role] if module else [f"services.{role}"]),
                env={**others, **variables, PARENT_FD: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                stdin=None,
                stdout=None,
                stderr=asyncio.subprocess.PIPE,
            )
        self.processes.append(process)
        return process

    async def ready(self, *processes: ServiceProcess) -> None:
        """Wait until these listen; their ports are in ``facts`` then."""
        for process in processes:
            process.facts = json.loads(await process.said('"event": ?"ready"'))

    async def add(self, role: str, *, failpoints: str = "", **settings: Any) -> ServiceProcess:
        """Start a worker and wait until it listens."""
        worker = await self.start(role, failpoints=failpoints, **settings)
        await self.ready(worker)
        return worker

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Add what all processes said to whatever fails in the block."""
        try:
            yield
        except BaseException as error:
            for process in self.processes:
                state = "alive" if process.is_alive else "ended"
                error.add_note(f"--- {process.name} ({state})")
                lines = [line[:400] for line in process.log if '"route":"/metrics"' not in line]
                error.add_note("\n".join(lines[-KEPT_LINES:]))
            raise

    # --- looking at it --------------------------------------------------------------------------

    async def until(
        self, condition: Callable[[], Awaitable[object]], *, limit_s: float = HAPPENS_WITHIN_S
    ) -> None:
        """Look again and again until a condition holds."""
        async with asyncio.timeout(limit_s):
            while not await condition():
                await asyncio.sleep(LOOK_AGAIN_S)

    async def gauges(self, process: ServiceProcess) -> dict[str, float]:
        """Scrape; the names without the common beginning, e.g. 'legs'."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(process.metrics_url) as response,
        ):
            assert response.status == 200
            return parse_gauges(await response.text())

    async def paired(self, gateway: ServiceProcess, num_pairs: int) -> None:
        """Wait until a gateway counts exactly so many pairs that take work."""

        async def is_so() -> bool:
            return (await self.gauges(gateway))["pairs"] == num_pairs

        await self.until(is_so)

    async def usable(self, gateway: ServiceProcess, num_workers: int) -> None:
        """Wait until a gateway has a session with exactly so many workers."""

        async def is_so() -> bool:
            gauges = await self.gauges(gateway)
            return sum(gauges[f"workers_usable:{role}"] for role in ROLES) == num_workers

        await self.until(is_so)

    async def home(
        self,
        gateways: Sequence[ServiceProcess],
        workers: Sequence[ServiceProcess],
        *,
        limit_s: float = HAPPENS_WITHIN_S,
    ) -> None:
        """Wait until nothing is held for anybody: no block, slot, transfer, leg or request."""
        found: dict[str, dict[str, float]] = {}

        async def is_home() -> bool:
            for worker in workers:
                gauges = found[worker.name] = await self.gauges(worker)
                wanted = {
                    "kv_blocks:free": worker.facts["num_blocks"],
                    "staging_slots_free": 4,  # two each way
                    "sessions": len(gateways),
                }
                idle = ("kv_blocks:reserved", "kv_blocks:quarantined", "transfers_open",
                        "pending_tokens", "requests_waiting", "requests_running")  # fmt: skip
                if any(gauges[name] != value for name, value in wanted.items()):
                    return False
                if any(gauges[name] for name in idle):
                    return False
            for gateway in gateways:
                gauges = found[gateway.name] = await self.gauges(gateway)
                # The scrape itself is a request in progress.
                if gauges["requests_running"] != 1:
                    return False
                if any(gauges[name] for name in ("answers_running", "answers_waiting", "legs")):
                    return False
            return True

        try:
            await self.until(is_home, limit_s=limit_s)
        except TimeoutError:
            raise AssertionError(f"something is held: {found}") from None

    # --- clients --------------------------------------------------------------------------------

    async def ask(
        self,
        gateway: ServiceProcess,
        prompt: Sequence[int] | str,
        max_tokens: int = 16,
        *,
        on_token: Callable[[Answer], object] | None = None,
        leave_after: int | None = None,
        headers: Mapping[str, str] | None = None,
        **params: Any,
    ) -> Answer:
        """Ask over HTTP and read the stream to its end, whatever it is.

        leave_after: hang up after so many tokens.
        """
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": True,
            "include_receipt": True,
            **params,
        }
        answer = Answer()
        url = f"http://127.0.0.1:{gateway.facts['http_port']}/v1/completions"
        async with (
            asyncio.timeout(ANSWERS_WITHIN_S),
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers) as response,
        ):
            answer.status = response.status
            if response.status != 200:
                answer.take(orjson.loads(await response.read()))
            else:
                async for data in _events(response.content):
                    assert not answer.num_done, "something came after [DONE]"
                    if data == b"[DONE]":
                        answer.num_done += 1
                        continue
                    before = len(answer.tokens)
                    answer.take(orjson.loads(data))
                    if len(answer.tokens) > before and on_token is not None:
                        on_token(answer)
                    if leave_after is not None and len(answer.tokens) >= leave_after:
                        break
        answer.ended_at = asyncio.get_running_loop().time()
        return answer

    async def ask_grpc(
        self,
        gateway: ServiceProcess,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        metadata: Mapping[str, str] | None = None,
        **params: Any,
    ) -> tuple[list[int], dict[str, Any]]:
        """Ask over gRPC; token ids, whose indices must be dense, and the receipt.

        Raises MeshError: the call failed.
        """
        address = Address("127.0.0.1", gateway.facts["grpc_port"])
        params = {"ignore_eos": True, **params}
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            answer = await ask(
                TcpNetwork(), address, prompt, max_tokens, metadata=metadata, **params
            )
        if answer.error is not None:
            raise answer.error
        assert answer.finish
        return answer.token_ids, answer.receipt


@contextlib.asynccontextmanager
async def process_mesh(
    engine: str = "fake", *, has_secret: bool = True
) -> AsyncGenerator[ProcessMesh]:
    """Every process started in the block is killed at its end, if it has not ended before.

    has_secret: False = whoever reaches a port may call every method.
    """
    mesh = ProcessMesh(engine, new_secret(random.randbytes) if has_secret else "")
    async with contextlib.AsyncExitStack() as stack:
        try:
            yield mesh
        finally:
            for process in reversed(mesh.processes):  # all, whatever one of them has said
                stack.push_async_callback(process.end_at_once)


def parse_gauges(text: str) -> dict[str, float]:
    """Every number by its name without ``pdmesh_<service>_``; of those with labels the ones by
    role, state or tier, e.g. 'workers:decode'."""
    label = r'\{(?:role|state|tier)="(\w+)"\}'
    pattern = rf"^pdmesh_(?:gateway|prefill|decode)_(\w+)(?:{label})? (\S+)$"
    found: list[tuple[str, str, str]] = re.findall(pattern, text, re.MULTILINE)
    return {f"{name}:{of}" if of else name: float(value) for name, of, value in found}


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of every event of a stream; a stream that ends inside an event is an error."""
    received = b""
    async for chunk in content.iter_any():
        *events, received = (received + chunk).split(b"\n\n")
        for event in events:
            assert event.startswith(b"data: ")
            yield event[6:]
    assert not received


def fake_model(max_model_len: int = 0) -> FakeModel:
    """The fake model that workers run: the bundled model's vocabulary, and context, if 0."""
    folder = ModelFolder(resolve_model("demo"))
    return FakeModel(
        vocab_size=folder.vocab_size,
        max_model_len=max_model_len or folder.max_model_len,
        eos_token_ids=tuple(sorted(folder.eos_token_ids)),
    )


def fake_ids(
    prompt: Sequence[int], num_tokens: int, *, max_model_len: int = 0, **params: Any
) -> list[int]:
    """What the fake engine must answer."""
    sampling = SamplingParams(max_tokens=num_tokens, **{"temperature": 0.0, **params})
    return fake_continuation(prompt, num_tokens, sampling, model=fake_model(max_model_len))


def a_prompt(num_tokens: int, start: int = 5) -> list[int]:
    """Token ids of the bundled vocabulary."""
    return [5 + (start * 131 + i * 37) % 900 for i in range(num_tokens)]
