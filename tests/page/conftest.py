"""The web page in a real browser.

Chromium is found by PDMESH_CHROMIUM or by its usual names; without it, or without playwright, these
tests are skipped and say so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.front.auth import KeyRing
from tests.support.command import Command, kept_up
from tests.support.scripted_mesh import ScriptedMesh, http_gateway
from tests.support.service_process import free_port

WITHIN_MS = 30_000
START_WITHIN_S = 120.0
DESKTOP = {"width": 1280, "height": 860}
AUDIT = (Path(__file__).parent / "audit.js").read_text(encoding="utf-8")


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = (shutil.which(name) for name in names)
    return os.environ.get("PDMESH_CHROMIUM") or next(filter(None, found), None)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Where Chromium is."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install playwright")
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or set PDMESH_CHROMIUM")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(chromium_path: str) -> AsyncIterator[Any]:
    """A headless Chromium."""
    from playwright.async_api import async_playwright

    # A browser's sandbox cannot be set up by root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path, args=arguments)
        yield browser
        await browser.close()


@dataclass
class Visit:
    """One visitor's tab. Console errors and requests to elsewhere fail the test at its end, unless
    their text contains one of ``expected``."""

    page: Any
    url: str
    problems: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Note what the page does and complains of."""
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("request", self._requested)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.text} ({message.location.get('url', '')})")

    def _requested(self, request: Any) -> None:
        if request.url.startswith(self.url + "/"):
            self.paths.append(request.url.removeprefix(self.url))
        else:
            self.problems.append(f"a request to elsewhere: {request.url}")

    def require_clean(self) -> None:
        """Raise AssertionError if something went wrong that the test did not expect."""
        left = [p for p in self.problems if not any(text in p for text in self.expected)]
        assert not left

    async def open(self, state: str = "ready") -> None:
        """Load the page and wait for the cluster's state."""
        await self.page.goto(self.url + "/")
        await self.status(state)

    async def status(self, state: str) -> None:
        """Wait for the status in the header."""
        await self.page.locator(f"#status[data-state={state}]").wait_for(timeout=WITHIN_MS)

    async def send(self, text: str) -> Any:
        """Ask; returns the new answer's element at once."""
        number = await self.page.locator(".turn.answer").count()
        await self.page.fill("#question", text)
        await self.page.press("#question", "Enter")
        answer = self.page.locator(".turn.answer").nth(number)
        await answer.wait_for(timeout=WITHIN_MS)
        return answer

    async def ask(self, text: str) -> Any:
        """Ask and wait for the answer's end."""
        answer = await self.send(text)
        await self.ended(answer)
        return answer

    async def ended(self, answer: Any) -> None:
        """Wait until an answer is over, well or not."""
        handle = await answer.element_handle()
        await handle.wait_for_selector(":scope:not([aria-busy])", timeout=WITHIN_MS)

    async def audit(self) -> None:
        """Check names, roles and contrast of what is shown now."""
        found = await self.page.evaluate(AUDIT)
        assert found["looked"] > 20
        assert not found["problems"], "\n".join(found["problems"])


@pytest_asyncio.fixture(loop_scope="module")
async def serve() -> AsyncIterator[Any]:
    """Return a coroutine function that serves a scripted mesh and gives its URL."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(mesh: ScriptedMesh, keys: KeyRing | None = None, **settings: Any) -> str:
            return await stack.enter_async_context(http_gateway(mesh, keys, **settings))

        yield start


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Any, serve: Any) -> AsyncIterator[Any]:
    """Return a coroutine function that opens a tab for a gateway's URL; options are those of a
    browser context. Tabs close before the gateways of ``serve`` do."""
    visits: list[Visit] = []

    async def open_tab(url: str, **options: Any) -> Visit:
        context = await browser.new_context(**{"viewport": DESKTOP, **options})
        context.set_default_timeout(WITHIN_MS)
        found = Visit(await context.new_page(), url)
        found.watch()
        visits.append(found)
        return found

    yield open_tab
    for found in visits:
        await found.page.context.close()
    for found in visits:
        found.require_clean()


@dataclass(frozen=True)
class RunningUp:
    """`pdmesh up`, and where it serves."""

    url: str
    command: Command

    def gateway_pid(self) -> int:
        """The process of the gateway that runs now."""
        return int(re.findall(r"^gateway +ready +pid (\d+)", self.command.out, re.MULTILINE)[-1])


@pytest.fixture(scope="module")
def running_up() -> Iterator[RunningUp]:
    """`pdmesh up` with the bundled model: one prefill and two decode workers."""
    port = free_port()
    small = ("--grpc-port", "0", "--num-blocks", "256", "--device", "cpu", "--threads", "1")
    with kept_up("--port", str(port), "--decode", "2", *small) as up:
        yield RunningUp(f"http://127.0.0.1:{port}", up)
