"""Processes that are asked in lines of JSON and answer each with one: engines, ends of a lane."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bench.record import PROJECT


class End:
    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] = os.environ, name: str = ""
    ) -> None:
        self.name = name
        # Not a pipe: one that nobody reads would fill up. Closed with the process.
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words,
            env=environment, text=True, cwd=PROJECT,
        )  # fmt: skip

    def tell(self, order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer. Raises RuntimeError with its last words if the end is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._words.seek(0)
            words = self._words.read().strip().splitlines()
            raise RuntimeError(f"{self._process.args} ended: {' | '.join(words[-3:])}")
        return json.loads(line)

    def ask(self, do: str, **job: Any) -> Any:
        """Order one piece of an engine's work, and wait for it."""
        self.tell({"do": do, **job})
        return self.answer()

    def close(self) -> None:
        process = self._process
        pipes = [one for one in (process.stdin, process.stdout) if one is not None]
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            pipes[0].close()
            process.wait(timeout=5)
        process.kill()
        process.wait()
        for pipe in (*pipes, self._words):
            with contextlib.suppress(OSError):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineEnd(End):
    """An engine that has loaded its model. about: what it says of itself."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(command, {**os.environ, **(environment or {})}, name)
        try:
            self.about = self.answer()
        except BaseException:
            self.close()
            raise


def our_engine(folder: Path, threads: int, vocab: int) -> EngineEnd:
    """Load a model into ours, in a process of its own."""
    command = [sys.executable, "-m", "bench.engine.our_end", str(folder), "--num-blocks", "1024"]
    command += ["--threads", str(threads), "--vocab", str(vocab)]
    return EngineEnd("pdmesh", command)
