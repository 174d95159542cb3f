"""How long a machine's steps take with one model, as a file that planners read.

    {"pdmesh_profile": 1, "machine": {...}, "model": "...", "prompts": {...}, "answers": {...}, ...}

Beside the two lines it has every step that was measured, so that a reader may fit another model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shared.errors import InvalidRequest
from shared.predict.fit_steps import StepSample
from shared.predict.times import FittedPhase, FittedTimes
from shared.whole_file import write_whole

SCHEMA: Final = 1
"""Grows when a field changes its meaning; a reader refuses another one."""

MOST_ERROR: Final = 0.2
"""Mean error of steps that were not fitted, beyond which a line is not written down."""

_Amount = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]


class ProfiledSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of steps: a line, its mean error on steps held out, and how far it was measured."""

    constant_s: _Amount
    token_s: _Amount
    attended_s: _Amount
    error: _Amount
    num_steps: _Count
    most_tokens: _Count
    most_attended: _Count
    steps: tuple[StepSample, ...] = ()

    @classmethod
    def of(cls, fit: FittedPhase, steps: tuple[StepSample, ...] = ()) -> ProfiledSteps:
        """Return a fit, with the steps that it is through."""
        return cls(**dataclasses.asdict(fit), steps=steps)

    def line(self) -> FittedPhase:
        """Return it without its steps. Raises InvalidRequest: it says that steps take no time."""
        if not (self.constant_s or self.token_s):
            raise InvalidRequest("a profile whose steps take no time says nothing")
        fields = msgspec.structs.asdict(self)
        del fields["steps"]
        return FittedPhase(**fields)


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
    prompts: ProfiledSteps
    answers: ProfiledSteps

    def times(self, name: str) -> FittedTimes:
        """Return it as a time model. name: of the file. Raises InvalidRequest."""
        where = ", ".join(self.machine.values()) or "an unnamed machine"
        return FittedTimes(
            self.prompts.line(),
            self.answers.line(),
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
