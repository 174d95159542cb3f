"""One compose project: what its users type, and what the engine says of its containers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.compose.questions import Door
from tests.support.house import ROOT
from tests.support.service_process import free_port

COMMAND_WITHIN_S = 240.0
HEALTHY_WITHIN_S = 240.0
HELD_WITHIN_S = 60.0
_WORKER_HOLDS = (
    *("requests_running", "requests_waiting", "transfers_open"),
    *('kv_blocks{state="reserved"}', 'kv_blocks{state="quarantined"}'),
)
HELD = {
    "gateway": ("answers_running", "answers_waiting", "legs"),
    "prefill": _WORKER_HOLDS,
    "decode": _WORKER_HOLDS,
}
"""Metrics that are 0 on a service without requests."""

_SAMPLE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it prints; a failure shows all of it."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wait_until(
    is_so: Callable[[], bool],
    what: str,
    within_s: float = HEALTHY_WITHIN_S,
    why_not: Callable[[], object] = lambda: "",
) -> None:
    """Ask every half second, for the engine sends no events that say so. Fails after the limit."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what} {why_not()}"
        time.sleep(0.5)


@dataclass(frozen=True)
class Container:
    """One container."""

    id: str
    name: str
    service: str

    def inspect(self) -> dict[str, Any]:
        """Return what the engine knows of it."""
        return json.loads(run("docker", "inspect", self.id))[0]

    def python(self, code: str) -> str:
        """Run Python in it, as its user."""
        return run("docker", "exec", self.id, "python3", "-Sc", code)

    def logs(self) -> str:
        """Return what it has said on stderr."""
        command = ["docker", "logs", self.id]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    @property
    def is_healthy(self) -> bool:
        """Whether its health check says so."""
        state = self.inspect()["State"]
        return state["Status"] == "running" and (
            state.get("Health", {"Status": "healthy"})["Status"] == "healthy"
        )

    def get(self, port: int, path: str) -> tuple[int, str]:
        """GET from inside: status and body."""
        code = (
            "import http.client, json\n"
            f"c = http.client.HTTPConnection('127.0.0.1', {port}, timeout=30)\n"
            f"c.request('GET', {path!r})\n"
            "r = c.getresponse()\n"
            "print(json.dumps([r.status, r.read().decode()]))"
        )
        status, body = json.loads(self.python(code))
        return status, body

    def metrics(self) -> dict[str, float]:
        """Return its own metrics by name and labels, without ``pdmesh_<service>_``."""
        _, body = self.get(8000 if self.service == "gateway" else 9090, "/metrics")
        prefix = f"pdmesh_{self.service}_"
        return {
            name.removeprefix(prefix): float(value)
            for name, value in _SAMPLE.findall(body)
            if name.startswith(prefix)
        }

    def published(self, port: int) -> str:
        """Where a port is reached from this machine, host:port."""
        (binding,) = self.inspect()["NetworkSettings"]["Ports"][f"{port}/tcp"]
        return f"{binding['HostIp']}:{binding['HostPort']}"

    @property
    def door(self) -> Door:
        """A gateway's APIs."""
        return Door(self.published(8000), self.published(8001))


@dataclass(frozen=True)
class Scale:
    """How many containers of each service."""

    gateway: int
    prefill: int
    decode: int

    @property
    def counts(self) -> dict[str, int]:
        """By the services' names."""
        return asdict(self)


class Project:
    """A project of its own name on ports of its own. settings: variables for compose.yaml."""

    def __init__(self, name: str, *files: Path, **settings: str) -> None:
        self.name = f"{os.environ['PDMESH_IMAGE']}-{name}"
        self._compose = [*shlex.split(os.environ["PDMESH_COMPOSE_TEST"]), "-p", self.name]
        for file in (ROOT / "compose.yaml", *files):
            self._compose += ["-f", str(file)]
        port = free_port(4)
        self._settings = {
            "PDMESH_HTTP_PORT": f"{port}-{port + 1}",
            "PDMESH_GRPC_PORT": f"{port + 2}-{port + 3}",
            "PDMESH_DTYPE": "float32",  # no batch changes a token
            "PDMESH_THREADS": "1",
            "PDMESH_KV_GIB": "0.25",
            **settings,
        }

    def compose(self, *arguments: str, **settings: str) -> str:
        """Run compose."""
        return run(*self._compose, *arguments, env={**self._settings, **settings})

    def up(self, scale: Scale, **settings: str) -> None:
        """Have so many of each; returns before they are healthy."""
        options: list[str] = []
        for name, number in scale.counts.items():
            options += ["--scale", f"{name}={number}"]
        self.compose("up", "--detach", "--no-build", *options, **settings)

    def down(self) -> None:
        """Remove all of it, without a drain."""
        self.compose("kill")
        self.compose("down", "--volumes", "--timeout", "1")

    def containers(self, *services: str) -> list[Container]:
        """Return the containers that run, of these services or of all, in order of their names."""
        label = "com.docker.compose"
        listed = run(
            *("docker", "ps", "--no-trunc", "--filter", f"label={label}.project={self.name}"),
            *("--format", '{{.ID}} {{.Names}} {{.Label "com.docker.compose.service"}}'),
        )
        found = [Container(*line.split()) for line in listed.splitlines()]
        return sorted(
            (one for one in found if not services or one.service in services),
            key=lambda one: one.name,
        )

    @property
    def workers(self) -> list[Container]:
        """Prefill and decode workers."""
        return self.containers("prefill", "decode")

    @property
    def doors(self) -> list[Door]:
        """Every gateway's APIs."""
        return [gateway.door for gateway in self.containers("gateway")]

    def wait_healthy(self, scale: Scale) -> None:
        """Wait until all of them are healthy, and every gateway uses every pair."""
        wanted = Counter({**scale.counts, "ipc": 1})
        wait_until(
            lambda: Counter(one.service for one in self.containers()) == wanted,
            f"{dict(wanted)} containers run",
        )
        for one in self.containers():
            wait_until(
                lambda one=one: one.is_healthy,
                f"{one.name} is healthy",
                why_not=lambda one=one: one.inspect()["State"],
            )
        for one in self.containers("gateway"):
            wait_until(
                lambda one=one: one.metrics()["pairs"] == scale.prefill * scale.decode,
                f"{one.name} uses every pair",
            )

    def wait_idle(self) -> None:
        """Wait until no service holds anything for a request: what it still held would be
        leaked."""

        def held() -> list[str]:
            found: list[str] = []
            for one in self.containers(*HELD):
                metrics = one.metrics()
                found += [f"{one.name}: {name}" for name in HELD[one.service] if metrics[name]]
            return found

        wait_until(lambda: not held(), "nothing is held", HELD_WITHIN_S, held)

    def exit_codes(self, since: float) -> dict[str, list[int]]:
        """Return with which codes containers have ended since then (time.time()), by service."""
        label = "com.docker.compose"
        ended = run(
            *("docker", "events", "--since", f"{since:.3f}", "--until", f"{time.time():.3f}"),
            *("--filter", "event=die", "--filter", f"label={label}.project={self.name}"),
            *("--format", "{{json .Actor.Attributes}}"),
        )
        codes: dict[str, list[int]] = {}
        for about in map(json.loads, ended.splitlines()):
            codes.setdefault(about[f"{label}.service"], []).append(int(about["exitCode"]))
        return codes

    def segments(self) -> list[dict[str, int]]:
        """Return the System V segments in the workers' IPC namespace: their sizes and users."""
        (anchor,) = self.containers("ipc")
        head, *rows = anchor.python("print(open('/proc/sysvipc/shm').read())").splitlines()
        names = head.split()
        return [
            {name: int(row[names.index(name)]) for name in ("size", "nattch", "uid", "rss")}
            for row in map(str.split, filter(None, rows))
        ]


def get(url: str) -> tuple[int, str]:
    """GET from outside: status and body."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
