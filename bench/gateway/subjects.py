"""What is measured: our gateway and the routers, each with its mock back end, pinned to cores.

Nothing here measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.compiler import compile_c
from bench.peers import installed
from bench.record import PROJECT
from bench.servers import process, shown_log, wait_until
from shared.address import Address
from shared.home import Role
from shared.ids import Incarnation
from shared.kv.journal import Journal
from shared.kv.layout import KvLayout
from shared.membership.join import Announcement, Registration
from shared.messages.codec import PROTOCOL_VERSION
from shared.model_folder import ModelFolder, resolve_model
from shared.model_spec import ModelSpec
from shared.rpc.tcp import TcpNetwork
from shared.worker_status import WorkerStatus
from tests.support.service_process import free_port

HERE = Path(__file__).parent
STEP_MS = 50
MODEL = "m"


@dataclass(frozen=True, slots=True)
class Cores:
    """Who may run where: the process under test on one core, back ends and client on another."""

    tested: frozenset[int]
    others: frozenset[int]

    @classmethod
    def of_this_machine(cls) -> Cores:
        """The first two of those we may use; the same one twice where there is one."""
        mine = sorted(os.sched_getaffinity(0))
        return cls(frozenset(mine[:1]), frozenset(mine[1:2] or mine[:1]))


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing to measure. pids: its processes, whose CPU counts. backends: of its mocks."""

    name: str
    port: int
    pids: tuple[int, ...]
    backends: tuple[int, ...]
    ready_s: float = 0.0

    def set_pace(self, *, is_paced: bool) -> None:
        """Have the mocks send one token a step, or as fast as they are read."""
        for pid in self.backends:
            os.kill(pid, signal.SIGUSR1 if is_paced else signal.SIGUSR2)

    def cpu_s(self) -> float:
        """Time on a core of all threads of its processes."""
        folders = [it for pid in self.pids for it in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((it / "schedstat").read_text().split()[0]) for it in folders) / 1e9

    def memory_mib(self) -> float:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids)
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass(frozen=True, slots=True)
class Tools:
    """What subjects are made with. programs: the C files beside this one, compiled. words: a file
    of the tokens that answers are made of. log: of all processes."""

    programs: dict[str, Path]
    words: Path
    log: Path
    cores: Cores


@contextlib.contextmanager
def tools() -> Iterator[Tools]:
    """Make them for the length of the block; exits with a sentence if there is no compiler."""
    with shown_log() as log:
        protocol = f"-DPROTOCOL_VERSION={PROTOCOL_VERSION}"
        programs = {
            name: compile_c(HERE / f"{name}.c", log.parent / name, protocol)
            for name in ("backend", "mesh", "client")
        }
        write_words(log.parent / "words")
        yield Tools(programs, log.parent / "words", log, Cores.of_this_machine())


def write_words(path: Path) -> None:
    """Write words of the bundled tokenizer that are one token each, whatever stands before them,
    and need no escape in JSON."""
    from tokenizers import Tokenizer

    folder = ModelFolder(resolve_model("demo"))
    tokenizer: Any = Tokenizer.from_file(str(folder.tokenizer_path))
    with path.open("w") as file:
        for token_id in range(folder.vocab_size):
            text = tokenizer.decode([token_id])
            is_word = text.startswith(" ") and text[1:].isascii() and text[1:].isalpha()
            if is_word:
                file.write(f"{token_id}\t{text}\n")


# --- our gateway ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def our_gateway(
    kit: Tools,
    *,
    step_ms: int = STEP_MS,
    num_pairs: int = 1,
    name: str = "pdmesh",
    settings: Mapping[str, str] = MappingProxyType({}),
    tree: Path = PROJECT,
) -> AsyncGenerator[Subject]:
    """Start a gateway with mock pairs of workers, all paired with all. settings: variables more.
    tree: whose gateway. ``ready_s``: from exec until ``/ready`` says that a pair is usable, the
    pair's joining included."""
    http_port, mesh_port = free_port(), free_port()
    environ = {
        "PDMESH_HTTP_PORT": str(http_port),
        "PDMESH_GRPC_PORT": str(free_port()),
        "PDMESH_MESH_PORT": str(mesh_port),
        "PDMESH_MODEL_NAME": MODEL,
        "PDMESH_MAX_RUNNING": "16384",
        "PDMESH_REQUEST_TIMEOUT_S": "0",
        "PYTHONPATH": str(tree),
        **settings,
    }
    scheme = "https" if "PDMESH_TLS_CERT" in settings else "http"
    async with contextlib.AsyncExitStack() as stack:
        workers: list[MockWorker] = []
        mocks: list[int] = []
        for _ in range(num_pairs):
            first = len(workers) + 11
            pair = [
                MockWorker(role, Incarnation(first + idx), free_port())
                for idx, role in enumerate(Role)
            ]
            mesh = [
                kit.programs["mesh"],
                *(str(worker.port) for worker in pair),
                *(str(worker.incarnation) for worker in pair),
                *(kit.words, str(step_ms)),
            ]
            mock = process(mesh, kit.log, cores=kit.cores.others)
            mocks.append((await stack.enter_async_context(mock)).pid)
            workers += pair
        began_at = time.monotonic()
        command = [sys.executable, "-P", "-m", "services.gateway"]
        async with (
            process(command, kit.log, environ, folder=tree, cores=kit.cores.tested) as gateway,
            joined(Address("127.0.0.1", mesh_port), workers),
        ):
            await wait_until(f"{scheme}://127.0.0.1:{http_port}/ready", gateway, poll_s=0.01)
            ready_s = time.monotonic() - began_at
            yield Subject(name, http_port, (gateway.pid,), tuple(mocks), ready_s)


class MockWorker(NamedTuple):
    """One worker of a mock pair; ``Role`` has prefill first, as ``mesh.c`` wants its ports."""

    role: Role
    incarnation: Incarnation
    port: int


@contextlib.asynccontextmanager
async def joined(gateway: Address, workers: Sequence[MockWorker]) -> AsyncGenerator[None]:
    """Join the mock workers with production's registration for the length of the block."""
    folder = ModelFolder(resolve_model("demo"))
    spec = ModelSpec(
        name=MODEL,
        fingerprint=bytes(range(32)),
        vocab_size=folder.vocab_size,
        max_model_len=4096,
        eos_token_ids=frozenset(),
        dtype="float32",
    )
    # Only prefill names decode: a decode worker that names itself would prefill, too.
    decodes = frozenset(it.incarnation for it in workers if it.role is Role.DECODE)
    loads = {
        Role.PREFILL: WorkerStatus(paired=decodes),
        Role.DECODE: WorkerStatus(free_blocks=1 << 20),
    }

    def registration(worker: MockWorker) -> Registration:
        announcement = Announcement(
            role=worker.role,
            incarnation=worker.incarnation,
            spec=spec,
            layout=KvLayout(dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8),
            address=Address("127.0.0.1", worker.port),
            num_blocks=1 << 20,
            block_size=16,
        )
        return Registration(
            network=TcpNetwork(),
            gateways=[gateway],
            announcement=announcement,
            load=lambda: loads[worker.role],
            journal=Journal(16),
        )

    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(registration(worker).run()) for worker in workers]
        yield
        for run in runs:
            run.cancel()


# --- the routers ----------------------------------------------------------------------------------


def _vllm(program: Path) -> list[str]:
    return [str(program), "--disable-retries", "--worker-startup-check-interval", "1"]


def _launch(program: Path) -> list[str]:
    return [str(program), "launch", "--worker-startup-check-interval", "1"]


ROUTERS: dict[str, tuple[str, str, Callable[[Path], list[str]]]] = {
    "vllm-router": ("routers", "vllm-router", _vllm),
    "sglang-router": ("routers", "sglang-router", _launch),
    "smg": ("smg", "smg", _launch),
}
"""Name -> environment in ``bench/peers.py``, program in it, beginning of its command line."""


@contextlib.asynccontextmanager
async def router(name: str, backends: dict[int, int], kit: Tools) -> AsyncGenerator[Subject | None]:
    """Start a router before these back ends (port -> pid), round robin; None if it is not
    installed."""
    environment, program, command = ROUTERS[name]
    peer = installed(environment)
    if peer is None:
        yield None
        return
    port = free_port()
    urls = [f"http://127.0.0.1:{backend}" for backend in backends]
    arguments = [
        *command(peer.program(program)),
        *("--worker-urls", *urls, "--policy", "round_robin"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--log-level", "error"),
    ]
    began_at, url = time.monotonic(), f"http://127.0.0.1:{port}"
    async with process(arguments, kit.log, cores=kit.cores.tested) as child:
        await wait_until(f"{url}/health", child)
        # Routers are healthy before they have met their workers.
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        await wait_until(f"{url}/v1/completions", child, poll_s=0.2, body=body)
        ready_s = time.monotonic() - began_at
        yield Subject(name, port, (child.pid,), tuple(backends.values()), ready_s)


@contextlib.asynccontextmanager
async def http_backends(kit: Tools) -> AsyncGenerator[dict[int, int]]:
    """Start two mock back ends; yields port -> pid."""
    async with contextlib.AsyncExitStack() as stack:
        backends: dict[int, int] = {}
        for _ in range(2):
            port = free_port()
            command = [kit.programs["backend"], str(port), kit.words, str(STEP_MS)]
            started = process(command, kit.log, cores=kit.cores.others)
            child = await stack.enter_async_context(started)
            await wait_until(f"http://127.0.0.1:{port}/health", child)
            backends[port] = child.pid
        yield backends
