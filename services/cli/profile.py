"""``pdmesh profile``: what this machine can do with a model, as prefill workers will know it; or
what a running mesh has learned of its steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter
from rich.table import Table

from services.cli.client import NO_ACCESS, Access, RunningGateway, require_url
from services.cli.flags import CannotRun, config_flags, require_worker_modules
from services.cli.interrupts import run_interruptible
from services.cli.sources import QUIET, ConfigFlag, JsonFlag
from services.cli.words import plain_console, plain_table, print_json
from shared.config import PrefillConfig
from shared.errors import InvalidRequest
from shared.log import configure_logs
from shared.profile.machine import MachineProfile
from shared.runtime.service import EXIT_OK

if TYPE_CHECKING:
    from shared.profile.kept import KeptProfile  # loads what gateways' machines lack
    from shared.profile.step_profile import StepProfile

_OUTPUT: Final = Parameter(name=("--output", "-o"), show_env_var=False, show_default=False)
_FROM: Final = Parameter(name="--from", show_env_var=False, show_default=False)
_MEASURE: Final = Parameter(show_env_var=False, show_default="30")

DEFAULT_MEASURE_S: Final = 30.0
MOST_MEASURE_S: Final = 3600.0


@config_flags
def profile(
    *,
    config: PrefillConfig = PrefillConfig(),  # noqa: B008  (frozen)
    force: Annotated[bool, QUIET] = False,
    output: Annotated[Path | None, _OUTPUT] = None,
    measure: Annotated[float | None, _MEASURE] = None,
    from_: Annotated[str | None, _FROM] = None,
    access: Access = NO_ACCESS,
    as_json: JsonFlag = False,
    file: ConfigFlag = None,
) -> int:
    """Measure what this machine can do with a model, in a second or two, and keep it in a file.

    Takes the flags of pdmesh prefill and measures what that worker would at its first start, which
    then finds the file. Without --force a file that is there is shown.

    Parameters
    ----------
    force
        Measure also if there is a file.
    output
        Time steps of all sizes instead, with prompts and without, and write the lines through them
        to this file: a time model for pdmesh plan --profile.
    measure
        Seconds that --output may take.
    from_
        URL of a running gateway: measure nothing, and write to --output what its workers have
        learned of their own steps.
    """
    if from_ is not None and (force or measure is not None):
        raise InvalidRequest("--from measures nothing: leave --force and --measure out")
    if output is not None and force:
        raise InvalidRequest("--output measures in any case: leave --force out")
    if from_ is not None:
        return _profile_live(RunningGateway(url=from_, access=access), output, as_json=as_json)
    config.check()
    if config.engine == "fake":
        raise CannotRun("--engine fake computes on no machine: there is nothing to measure")
    require_worker_modules(config)
    limit_s = DEFAULT_MEASURE_S if measure is None else measure
    if output is not None:
        _require_steps(output, limit_s)
    elif measure is not None:
        raise InvalidRequest("--measure is how long --output may take: give that, too")
    configure_logs(service="profile", level="warning", form=config.log_format)
    if output is not None:
        return _profile_steps(config, output, limit_s, as_json=as_json)
    from shared.worker.process import profile_machine

    measured: list[KeptProfile] = []

    async def main() -> None:
        measured.append(await profile_machine(config, is_forced=force))

    if code := run_interruptible(main):
        return code
    (kept,) = measured
    if as_json:
        print_json(kept.profile)
        return EXIT_OK
    console = plain_console()
    console.print(_values(kept.profile))
    console.print(_sweep(kept.profile))
    word = f"measured in {kept.took_s:.1f} s" if kept.took_s else "measured at an earlier start"
    print(f"\n{word}; {f'kept in {kept.path}' if kept.path else 'not kept'}")
    return EXIT_OK


def _require_steps(output: Path, limit_s: float) -> None:
    if not 1 <= limit_s <= MOST_MEASURE_S:
        raise InvalidRequest(f"--measure must be 1..{MOST_MEASURE_S} seconds")
    # With rich's bars, for which no other command shall wait.
    from services.cli.plan.view import require_writable

    require_writable("--output", output)


def _profile_steps(config: PrefillConfig, output: Path, limit_s: float, *, as_json: bool) -> int:
    from shared.worker.process import profile_steps

    measured: list[StepProfile] = []

    async def main() -> None:
        measured.append(await profile_steps(config, limit_s=limit_s))

    if code := run_interruptible(main):
        return code
    return _write(measured[0], output, as_json=as_json)


def _profile_live(gateway: RunningGateway, output: Path | None, *, as_json: bool) -> int:
    require_url(gateway.url, "--from")
    if output is None:
        raise InvalidRequest("--from needs --output: the file that pdmesh plan --profile reads")
    _require_steps(output, DEFAULT_MEASURE_S)
    from services.cli.plan.live_profile import profile_of

    found, notes = profile_of(gateway)
    for note in notes:
        print(note, file=sys.stderr)
    return _write(found, output, as_json=as_json)


def _write(found: StepProfile, output: Path, *, as_json: bool) -> int:
    try:
        found.write(output)
    except OSError as error:
        raise CannotRun(f"cannot write {output}: {error.strerror}") from None
    if as_json:
        print(output.read_text(encoding="utf-8"), end="")
        return EXIT_OK
    table = plain_table(
        "steps", "constant", "a token", "a position", "mean error", "measured", "up to"
    )
    for name, phase in (("with prompts", found.prompts), ("without", found.answers)):
        table.add_row(
            name,
            f"{phase.constant_s * 1e3:.3f} ms",
            f"{phase.token_s * 1e6:.2f} µs",
            f"{phase.attended_s * 1e9:.3f} ns",
            f"{phase.error:.1%}",
            f"{phase.num_steps} steps",
            f"{phase.most_tokens} tokens, {phase.most_attended} positions",
        )
    plain_console().print(table)
    print(f"{found.model} on {', '.join(found.machine.values())}; written to {output}")
    return EXIT_OK


def _values(profile: MachineProfile) -> str:
    values = (
        (
            f"{profile.saturating_tokens} tokens",
            "of prompt keep the device busy: prompts share a step up to here (--batch-tokens)",
        ),
        (f"{profile.tokens_per_s:,.0f} tokens/s", "of prompt, at the best length"),
        (f"{profile.message_s * 1e6:.0f} µs", "for a frame of KV beside its bytes"),
        (f"{profile.interference:.0%}", "of a step's speed is lost while KV is copied beside it"),
    )
    return "\n".join(f"{value:>18}  {meaning}" for value, meaning in values) + "\n"


def _sweep(profile: MachineProfile) -> Table:
    table = plain_table("prompt", "step", "tokens/s", "of the best")
    for num_tokens, seconds in profile.samples:
        rate = num_tokens / seconds
        share = f"{rate / profile.tokens_per_s:.2f}"
        table.add_row(str(num_tokens), f"{seconds * 1e3:.2f} ms", f"{rate:,.0f}", share)
    return table
