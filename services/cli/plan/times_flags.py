"""Which time model a plan goes by: the flags, and what they make of one worker's devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from cyclopts import Parameter

from services.cli.plan.view import require_ranges
from services.cli.quantities import StepSeconds
from services.planner.core.kv_size import KvShape, kv_of_bytes
from services.planner.core.mesh_text import Unit
from services.planner.core.roofline import DEVICES, DeviceSheet, RooflineTimes
from services.planner.distserve_data import DistServeData
from services.planner.mesh_run import UnitModel
from services.planner.model_kv import kv_shape
from services.planner.splitwise_data import machine_times, read_perf_model
from services.sim.baselines.distserve_times import Degree, DistServeTimes
from shared.engine.fake import DEFAULT_TIMING
from shared.errors import InvalidRequest
from shared.predict.times import OPT_13B_A100, AffineTimes, ScaledTimes, TimeModel
from shared.profile.step_profile import StepProfile, read_profile

TimesName = Literal["opt-13b-a100", "fake", "distserve", "splitwise"]
DEFAULT_KV_TOKENS: Final = 60_000


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TimesFlags:
    """Time model: one of --times, --profile and --device.

    Parameters
    ----------
    times
        Published times: opt-13b-a100 (affine; DistServe's fit), fake (the fake engine's), distserve
        or splitwise (their files, in --data; --device names Splitwise's hardware).
    profile
        Times measured by pdmesh profile -o FILE.
    device
        Roofline of --model on a100, a800, h100, h800, h200, h20, b200, l40s or l4, by data sheets.
    data
        Folder with the files of DistServe or Splitwise.
    model
        Whose KV moves, and for --device whose weights are read: a folder, demo, a hub name, or a
        published model. Default opt-13b, or the profile's.
    kv_tokens
        Tokens of KV that one worker holds. Default 60000, or what the device or the profile has.
    base
        Time of a step beside its tokens.
    prompt_token
        Time of one prompt token.
    decode_row
        Time of one sequence that decodes.
    context_token
        Time of one token of context that a sequence that decodes reads.
    slower
        Factor of all times: what if the model is wrong by so much?
    """

    times: TimesName | None = None
    profile: Path | None = None
    device: str | None = None
    data: Path | None = None
    model: str | None = None
    kv_tokens: int | None = None
    base: StepSeconds | None = None
    prompt_token: StepSeconds | None = None
    decode_row: StepSeconds | None = None
    context_token: StepSeconds | None = None
    slower: float = 1.0

    def check(self) -> None:
        """Raise InvalidRequest, with what is allowed."""
        given = [
            flag
            for flag, value in (
                ("--times", self.times),
                ("--profile", self.profile),
                ("--device", None if self.times == "splitwise" else self.device),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise InvalidRequest(f"give one time model, not {' and '.join(given)}")
        is_held = self.kv_tokens is None or 1 <= self.kv_tokens <= 1 << 30
        require_ranges(
            ("--slower", 0.01 <= self.slower <= 100, "0.01..100"),
            ("--kv-tokens", is_held, f"1..{1 << 30}"),
        )
        if self._parts and (
            self.profile or self.device or self.times in ("distserve", "splitwise")
        ):
            raise InvalidRequest(
                f"--{self._parts[0].replace('_', '-')} belongs to affine times, not to {given[0]}"
            )
        if self.times in ("distserve", "splitwise") and self.data is None:
            raise InvalidRequest(f"--times {self.times} needs --data: the folder with its files")
        if self.device is not None and self.times != "splitwise":
            _device(self.device)

    @property
    def _parts(self) -> list[str]:
        names = ("base", "prompt_token", "decode_row", "context_token")
        return [name for name in names if getattr(self, name) is not None]

    @cached_property
    def kv(self) -> KvShape:
        """Whose KV moves. Raises ModelError, InvalidRequest: also a profile of another model."""
        found = self._profile
        if self.times == "splitwise":
            return kv_shape((self.model or "llama-2-70b").replace("llama2-", "llama-2-"))
        if found is None:
            return kv_shape(self.model or "opt-13b")
        own, asked = found.model.lower(), (self.model or found.model).lower()
        if asked != own and kv_shape(self.model or "").name.lower() != own:
            raise InvalidRequest(
                f"{self.profile} is a profile of {found.model}, not of {self.model}: leave "
                "--model out, or profile that model (pdmesh profile -o)"
            )
        return kv_of_bytes(found.model, found.token_bytes)

    @cached_property
    def _profile(self) -> StepProfile | None:
        return None if self.profile is None else read_profile(self.profile)

    @cached_property
    def _units(self) -> dict[Unit, UnitModel]:
        return {}

    def unit(self, unit: Unit) -> UnitModel:
        """Return what these devices make of one worker. Raises InvalidRequest: the time model does
        not know them, or the weights do not fit."""
        if unit not in self._units:
            times, most_kv = self._times(unit)
            times = times if self.slower == 1 else ScaledTimes(times, self.slower)
            held = most_kv if self.kv_tokens is None else self.kv_tokens
            self._units[unit] = UnitModel(times, held)
        return self._units[unit]

    def _times(self, unit: Unit) -> tuple[TimeModel, int]:
        device = unit.device or (self.device if self.times != "splitwise" else None)
        if device is not None and self.times is None and self.profile is None and not self._parts:
            roofline = RooflineTimes(self.kv, _device(device), unit.tp, unit.pp)
            if not roofline.kv_tokens and self.kv_tokens is None:
                raise InvalidRequest(
                    f"the weights of {self.kv.name} do not fit into {unit.num_devices} x {device}: "
                    "a higher degree, such as tp4 or tp8, or a larger device"
                )
            return roofline, roofline.kv_tokens
        if self.times == "distserve":
            return self._distserve_times(unit)
        if unit.device:
            raise InvalidRequest(
                f"({unit.device}) in a mesh needs --device, whose times are a roofline's: this "
                "time model knows one device"
            )
        if unit.num_devices > 1:
            raise InvalidRequest(
                f"this time model knows no {str(unit)[1:-1]}: --device (a roofline) and --times "
                "distserve know degrees"
            )
        if (found := self._profile) is not None:
            assert self.profile is not None
            return found.times(self.profile.name), found.kv_tokens
        if self.times == "splitwise":
            assert self.data is not None
            model = self.kv.name.replace("llama-2-", "llama2-")  # as their file calls it
            runs = read_perf_model(self.data)
            times = machine_times(runs, model, self.device or "a100-80gb")
            return times, DEFAULT_KV_TOKENS
        return self._affine(), DEFAULT_KV_TOKENS

    def _distserve_times(self, unit: Unit) -> tuple[TimeModel, int]:
        if unit.device not in ("", "a100"):
            raise InvalidRequest(f"DistServe's fits are of a100, not of {unit.device}")
        assert self.data is not None
        name = self.model or "opt-13b"
        files = DistServeData(self.data, "distserve")
        phase = files.phase(name, Degree(unit.tp, unit.pp))
        stages = f", {unit.pp} stages" if unit.pp > 1 else ""
        source = f"DistServe's fits of {name} on A100-80GB, tp {unit.tp}{stages}"
        return DistServeTimes(phase.coefficients, source, unit.pp), phase.capacity

    def _affine(self) -> TimeModel:
        if self.times == "fake":
            timing = DEFAULT_TIMING
            affine = AffineTimes(
                base_s=timing.base_s,
                prompt_token_s=timing.prefill_token_s,
                decode_row_s=timing.decode_row_s,
                context_token_s=timing.context_token_s,
                source="the fake engine's",
            )
        else:
            affine = OPT_13B_A100
        given = {f"{name}_s": getattr(self, name) for name in self._parts}
        if not given:
            return affine
        asked = replace(affine, source="affine, as given", **given)
        if not (asked.step_s(1, 1, 0, 0) and asked.step_s(0, 0, 1, 1)):
            raise InvalidRequest(
                "a step of one token must take some time: --base, or --prompt-token and one of "
                "--decode-row and --context-token, must be above 0"
            )
        return asked


def _device(name: str) -> DeviceSheet:
    sheet = DEVICES.get(name.lower())
    if sheet is None:
        raise InvalidRequest(f"a device must be one of {', '.join(DEVICES)}, not {name!r}")
    return sheet
