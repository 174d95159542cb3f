"""A service as a process: signals, drain, limits and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson
import pytest

from shared.runtime.parent import PARENT_FD
from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_DRAIN_LIMIT, EXIT_FAILED, EXIT_OK

pytestmark = [pytest.mark.process, pytest.mark.quick]

LIMIT_S = 60.0

PRELUDE = """
import asyncio, sys
from shared import errors
from shared.log import configure_logs
from shared.runtime import service
configure_logs(service="test", form="json")
"""


@dataclass
class Child:
    """A process and our end of its cord."""

    process: asyncio.subprocess.Process
    link: socket.socket

    async def facts(self) -> dict[str, object]:
        """Return the next line that it tells."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LIMIT_S):
            return orjson.loads(await loop.sock_recv(self.link, 4096))

    async def ended(self) -> tuple[int, str]:
        """Return its exit code and all it wrote to stderr."""
        async with asyncio.timeout(LIMIT_S):
            _, stderr = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, stderr.decode()


@contextlib.asynccontextmanager
async def child(body: str, *, drain_s: float = 30.0, patch: str = "") -> AsyncIterator[Child]:
    """Run ``async def main(process)`` with this body as a service."""
    program = (
        f"{PRELUDE}\n{patch}\n"
        f"async def main(process):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        "    return True\n"
        f"sys.exit(service.run_service('test', main, drain_s={drain_s}))\n"
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env={**os.environ, PARENT_FD: str(theirs.fileno())},
        pass_fds=(theirs.fileno(),),
        stderr=asyncio.subprocess.PIPE,
    )
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        ours.close()
        if process.returncode is None:
            process.kill()
            await process.communicate()


SERVE = """
    process.ready(grpc_port=7)
    await process.stop.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("hears_hangup")
async def test_first_signal_drains(number: signal.Signals) -> None:
    """A signal asks the service to drain; ending well is exit code 0."""
    async with child(SERVE + "    print('drained', file=sys.stderr)") as it:
        assert await it.facts() == {"grpc_port": 7}
        it.process.send_signal(number)
        code, stderr = await it.ended()
    assert code == EXIT_OK
    assert "drained" in stderr
    assert number.name in stderr


async def test_second_signal_ends_at_once() -> None:
    """A service that drains for ever is ended by the second signal."""
    body = SERVE + "    process.ready(draining=1)\n    await asyncio.Event().wait()"
    async with child(body) as it:
        await it.facts()
        it.process.send_signal(signal.SIGTERM)
        assert await it.facts() == {"draining": 1}
        it.process.send_signal(signal.SIGTERM)
        code, _ = await it.ended()
    assert code == 128 + signal.SIGTERM


@pytest.mark.usefixtures("hears_hangup")
async def test_a_terminal_that_goes_away_twice_cuts_no_drain_off() -> None:
    """Its shell and the kernel may both tell of its end."""
    body = SERVE + "    process.ready(draining=1)\n    await asyncio.sleep(1)"
    async with child(body) as it:
        await it.facts()
        it.process.send_signal(signal.SIGHUP)
        assert await it.facts() == {"draining": 1}
        it.process.send_signal(signal.SIGHUP)
        code, _ = await it.ended()
    assert code == EXIT_OK


async def test_a_service_that_cut_its_drain_off_says_so_in_its_exit_code() -> None:
    """A service may end in time and in order, and yet have failed what it could not finish."""
    async with child(SERVE + "    return False") as it:
        await it.facts()
        it.process.send_signal(signal.SIGTERM)
        code, _ = await it.ended()
    assert code == EXIT_DRAIN_LIMIT


async def test_drain_limit_cancels() -> None:
    """What has not drained at the limit is cancelled, cleans up, and the exit code says so."""
    body = SERVE + (
        "    try:\n"
        "        await asyncio.Event().wait()\n"
        "    finally:\n"
        "        print('cleaned', file=sys.stderr)"
    )
    async with child(body, drain_s=0.0, patch="service.GRACE_S = 0.05") as it:
        await it.facts()
        it.process.send_signal(signal.SIGTERM)
        code, stderr = await it.ended()
    assert code == EXIT_DRAIN_LIMIT
    assert "cleaned" in stderr


async def test_service_that_ignores_its_cancellation_is_left_behind() -> None:
    """Even a service that swallows its cancellation cannot keep the process."""
    body = SERVE + (
        "    while True:\n"
        "        try:\n"
        "            await asyncio.Event().wait()\n"
        "        except asyncio.CancelledError:\n"
        "            pass"
    )
    patch = "service.GRACE_S = service.CANCEL_WITHIN_S = 0.05"
    async with child(body, drain_s=0.0, patch=patch) as it:
        await it.facts()
        it.process.send_signal(signal.SIGTERM)
        code, _ = await it.ended()
    assert code == EXIT_DRAIN_LIMIT


async def test_end_of_the_parent_drains() -> None:
    """A child whose parent is gone stops by itself."""
    async with child(SERVE) as it:
        await it.facts()
        it.link.close()
        code, _ = await it.ended()
    assert code == EXIT_OK


@pytest.mark.parametrize("way", ["signal", "parent"])
async def test_what_is_not_ready_ends_at_once(way: str) -> None:
    """A thread that loads a model cannot be cancelled, and nothing is in hand yet."""
    body = """
        import threading
        def load():
            process._parent.tell(loading=1)
            threading.Event().wait()
        await asyncio.to_thread(load)
    """
    async with child(body) as it:
        assert await it.facts() == {"loading": 1}
        if way == "signal":
            it.process.send_signal(signal.SIGTERM)
        else:
            it.link.close()
        code, _ = await it.ended()
    assert code == EXIT_OK


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("errors.InvalidRequest('--port must be a port')", EXIT_BAD_CONFIG),
        ("errors.ModelError('no such folder')", EXIT_FAILED),
        ("OSError(98, 'the port is in use')", EXIT_FAILED),
    ],
)
async def test_failure_is_one_line_without_traceback(error: str, code: int) -> None:
    """What the operator can mend is one sentence, to stderr and to the parent."""
    async with child(f"raise {error}") as it:
        facts = await it.facts()
        found, stderr = await it.ended()
    assert found == code
    assert str(facts["error"]) in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert "Traceback" not in stderr


async def test_bug_is_logged_with_its_traceback() -> None:
    """An unexpected exception, also out of a TaskGroup, is logged where it came from."""
    body = """
    async def fail():
        raise KeyError("bug")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())
    """
    async with child(body) as it:
        code, stderr = await it.ended()
    assert code == EXIT_FAILED
    (line,) = stderr.strip().splitlines()
    assert "in fail" in orjson.loads(line)["exception"]


async def test_stdout_stays_empty_and_lines_are_json() -> None:
    """Logs go to stderr, one JSON object a line."""
    async with child(SERVE) as it:
        await it.facts()
        it.process.terminate()
        code, stderr = await it.ended()
    assert code == EXIT_OK
    events = [orjson.loads(line)["event"] for line in stderr.splitlines()]
    assert events == ["ready", "stopping"]


async def test_a_service_may_open_as_many_files_as_the_system_lets_it() -> None:
    """Not as few as its shell began with."""
    few = "import resource, os\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))"
    async with child("process.tell(opened=len([os.dup(2) for _ in range(200)]))", patch=few) as end:
        assert await end.facts() == {"opened": 200}
        assert (await end.ended())[0] == EXIT_OK


async def test_open_files_that_run_out_are_told_once_with_the_remedy() -> None:
    """A connection past the limit is closed without a word: uvloop tells nobody."""
    few = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    body = """
        from shared.listening import listen_at
        server = await listen_at(asyncio.Protocol, "127.0.0.1", 0)
        process.ready(port=server.sockets[0].getsockname()[1])
        await process.stop.wait()
    """
    async with child(body, patch=few) as it:
        port = (await it.facts())["port"]
        assert isinstance(port, int)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(80):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
        it.process.terminate()
        code, stderr = await it.ended()
    assert code == EXIT_OK
    (told,) = [it for it in map(orjson.loads, stderr.splitlines()) if it["level"] == "warning"]
    assert told["event"] == "open files run out"
    assert (told["limit"], told["address"]) == (64, "127.0.0.1:0")
    assert "LimitNOFILE=" in told["reason"]
