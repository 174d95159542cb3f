"""What libraries below an engine raise, as the typed errors that the rest of the house knows."""

from __future__ import annotations

import traceback

import torch

from shared.errors import EngineFailed

MEMORY_REMEDY = (
    "leave more beside KV (smaller --gpu-memory-share, --kv-gib or --num-blocks), or compute less "
    "in a step (--token-budget, --max-running)"
)


def words_of(error: BaseException) -> str:
    """Return what an error says, or else which line has raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({frames[-1].line})" if frames else ""
    text = str(error).strip()
    if isinstance(error, KeyError):  # whose words are the key alone
        return f"KeyError: {text}{line}"
    return text or f"{type(error).__name__}{line}"


class DeviceFailures:
    """Turns whatever torch raises into EngineFailed; our own typed errors pass."""

    def __init__(self, doing: str, remedy: str = MEMORY_REMEDY) -> None:
        """remedy: what helps where memory is too small."""
        self._doing = doing
        self._remedy = remedy

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # RuntimeError is what torch raises for nearly everything, out of memory and lost devices
        # included; the others come from missing builds and from the host's memory.
        if not isinstance(error, (RuntimeError, MemoryError, AssertionError, NotImplementedError)):
            return
        text = words_of(error).splitlines()[0]
        # Libraries and graphs take memory beside torch's allocator, and fail in their own words.
        is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_memory and "out of memory" not in text:
            raise EngineFailed(f"{self._doing} failed: {text}") from error
        # What was asked for, and what the device has; then torch advises what we refuse.
        text = ". ".join(text.split(". ")[:3]).removesuffix(".")
        raise EngineFailed(
            f"{self._doing} failed: {text}; {self._remedy}", code="out_of_memory"
        ) from error
