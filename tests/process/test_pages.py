"""The commands that a newcomer is told to type do what the page says, with real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.house import ROOT
from tests.support.pages import Block, blocks_of

pytestmark = [pytest.mark.process, pytest.mark.ucx]

PAGES = ("docs/quickstart.md", "docs/cli.md")
"""README's are typed on a terminal: ``test_first_walk.py``."""
WRITTEN_URL = "http://127.0.0.1:8000"
LIMIT_S = 200.0


class Reader:
    """Somebody who types a page's commands in, one block after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mesh: subprocess.Popen[str] | None = None
        self._url = WRITTEN_URL

    @property
    def _environment(self) -> dict[str, str]:
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
        return {
            **ours,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
            # The usual port may be taken where tests run.
            "PDMESH_PORT": "0",
            "PDMESH_URL": self._url,
        }

    def types(self, block: Block) -> None:
        """Run a block and judge it by its mark."""
        code = block.code.replace(WRITTEN_URL, self._url)
        if block.language == "python":
            commands = [[sys.executable, "-c", code]]
        elif block.commands:  # are forked
            commands = [[sys.executable, "-m", "services.cli", *it] for it in block.commands]
        else:
            commands = [["bash", "-euo", "pipefail", "-c", code]]
        if block.detail == "stays":
            (command,) = commands
            self._start(command)
            return
        said = ""
        for command in commands:
            ended = subprocess.run(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
            said += ended.stdout
        if block.detail:
            assert block.detail.removeprefix("says ") in said, f"{block.code}\n{said}"

    def _start(self, command: list[str]) -> None:
        log = self._folder / "mesh.out"
        with log.open("w") as out:
            self._mesh = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        until = time.monotonic() + LIMIT_S
        while not (found := re.search(r"ready: (http://\S+)/ ", log.read_text())):
            assert self._mesh.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        self._url = found[1]

    def leaves(self) -> None:
        """End the mesh as a reader does, with Ctrl-C."""
        if self._mesh is None:
            return
        os.killpg(self._mesh.pid, signal.SIGINT)
        try:
            self._mesh.wait(LIMIT_S)
        finally:
            if self._mesh.poll() is None:
                os.killpg(self._mesh.pid, signal.SIGKILL)
                self._mesh.wait()
        assert self._mesh.returncode == 130


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A reader in an empty folder."""
    reader = Reader(tmp_path)
    yield reader
    reader.leaves()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(600)
def test_every_command_of_the_page_does_what_it_says(page: str, reader: Reader) -> None:
    """From top to bottom, as a newcomer would; what is not run says why."""
    blocks = [block for block in blocks_of(ROOT / page) if block.mark == "run"]
    assert blocks, "no block of this page is marked to be run"
    if any("curl" in block.code for block in blocks) and shutil.which("curl") is None:
        pytest.skip("no curl here")
    for block in blocks:
        reader.types(block)
