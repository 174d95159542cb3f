"""How long a machine's steps take with one model, as a file that planners read.

    {"pdmesh_profile": 1, "machine": {...}, "model": "...", "prompts": {...}, "answers": {...}, ...}

Beside the two lines it has every step that was measured, so that a reader may fit another model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shared.errors import InvalidRequest
from shared.predict.fit_steps import FittedPhase
from shared.predict.times import FittedTimes
from shared.whole_file import write_whole

SCHEMA: Final = 1
"""Grows when a field changes its meaning; a reader refuses another one."""

MOST_ERROR: Final = 0.2
"""Mean error of steps that were not fitted, beyond which a line is not written down."""

_Count = Annotated[int, Meta(ge=1)]


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan needs of one machine and model. machine: in words, as the engine says
    it; token_bytes: KV of one token in all layers; kv_tokens: tokens of KV that the pool held."""

    pdmesh_profile: int = SCHEMA
    version: str
    date: str
    machine: dict[str, str]
    model: str
    fingerprint: str
    dtype: str
    max_model_len: _Count
    token_bytes: _Count
    kv_tokens: _Count
    prompts: FittedPhase
    answers: FittedPhase

    def times(self, name: str) -> FittedTimes:
        """Return it as a time model. name: of the file.

        Raises InvalidRequest: a line says that steps take no time.
        """
        for line in (self.prompts, self.answers):
            if not (line.constant_s or line.token_s):
                raise InvalidRequest("a profile whose steps take no time says nothing")
        where = ", ".join(self.machine.values()) or "an unnamed machine"
        return FittedTimes(
            self.prompts,
            self.answers,
            f"{name}: {self.model} on {where}, {self.date}; mean errors {self.prompts.error:.1%} "
            f"with prompts, {self.answers.error:.1%} without",
        )

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        write_whole(path, text + b"\n")


def read_profile(path: Path) -> StepProfile:
    """Return a profile file. Raises InvalidRequest: it is none, or of another version."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {(error.strerror or str(error)).lower()}") from None
    try:
        version = msgspec.json.decode(content, type=_Versioned).pdmesh_profile
        if version != SCHEMA:
            raise InvalidRequest(
                f"{path} is a profile of version {version}, and this pdmesh reads {SCHEMA}: "
                "measure it again with pdmesh profile -o"
            )
        return msgspec.json.decode(content, type=StepProfile)
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"{path} is no profile of pdmesh profile -o ({str(error).rstrip('.').lower()})"
        ) from None


class _Versioned(msgspec.Struct):
    pdmesh_profile: int
