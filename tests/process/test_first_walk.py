"""README's walk as a newcomer sees it: its commands on a terminal of 80 columns and 24 lines, and
its program."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.support.house import ROOT
from tests.support.pages import blocks_of
from tests.support.terminal import on_a_terminal

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.timeout(400)]

SIZE = (80, 24)
SHOWN = {
    "generate": r"17 \+ 25 = 42\.(?s:.*)first token",
    "top": r"● ready(?s:.*)\nprefill .* 0%\ndecode .* 0%\ndecode .* 0%\n(?s:.*) [GM]B/s",
    "tour": r"acts +(services|shared)/",
    "doctor": r"\S",
}
"""What stands on the screen when a command has ended."""


async def test_readmes_walk_fits_a_small_terminal() -> None:
    """Each command ends well, its lines are whole, and the address that stands there is a page."""
    first, *rest = [b for b in blocks_of(Path(ROOT) / "README.md") if b.mark == "run"]
    (program,) = (b for b in rest if b.language == "python")
    rest.remove(program)
    assert first.detail == "stays"
    (up_command,) = first.commands
    async with on_a_terminal(*up_command, size=SIZE, PDMESH_PORT="0") as up:
        await up.shows(r"or: +pdmesh chat(?s:.*)decode-1 .*ready")
        found = re.search(r"^ready: (http://\S+)/ \(a page, in a browser\)$", up.shown, re.M)
        assert found, up.shown
        url = found[1]
        async with aiohttp.ClientSession() as session, session.get(f"{url}/") as page:
            assert (page.status, page.content_type) == (200, "text/html")
        walked = [command for block in rest for command in block.commands]
        assert {command[0] for command in walked} == set(SHOWN)
        # Of 100 answers that are sampled one may be wrong.
        variables = {"PDMESH_URL": url, "PDMESH_TEMPERATURE": "0"}
        for command in walked:
            async with on_a_terminal(*command, size=SIZE, **variables) as terminal:
                code = await terminal.ended()
                if command == ["doctor"] and "✗ port" in terminal.shown:
                    code -= 1  # whatever else runs on this machine may have a mesh's usual ports
                assert code == 0, terminal.shown
                assert re.search(SHOWN[command[0]], terminal.shown), terminal.shown
                assert "Traceback" not in terminal.shown
                if command[0] == "top":
                    assert "…" not in terminal.shown
        code = program.code.replace("http://127.0.0.1:8000", url)
        said = await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", code])
        assert program.detail.removeprefix("says ").encode() in said
        up.type("\x03")
        assert await up.ended() == 130
