"""``pdmesh plan verify``: what a live mesh did, beside what the simulator says of the same
requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from cyclopts import Parameter

from services.cli.bench.report import report_of, write_report
from services.cli.bench.view import time_text
from services.cli.bench.workload import Ask
from services.cli.client import LOCAL_GATEWAY, RunningGateway
from services.cli.plan.seen import SeenTraffic, ask_gateway, read_seen, seen_by_gateway
from services.cli.plan.sim_flags import GATEWAY, require_policy
from services.cli.plan.sim_report import begin_report, seen_run, simulated_run
from services.cli.plan.tier_flags import TierFlags, cached_line
from services.cli.plan.times_flags import TimesFlags
from services.cli.plan.view import progress, require_ranges, require_writable, write_output
from services.cli.quantities import LinkRate, Seconds, StepSeconds, TpotFlag, TtftFlag
from services.cli.sources import OUTPUT, JsonFlag
from services.cli.words import plain_console, plain_table, print_json, print_lines
from services.gateway.core.routing.routing import POLICIES
from services.planner.core.kv_size import kv_of_bytes
from services.planner.core.mesh_text import MeshPart, MeshShape, Unit, read_mesh
from services.planner.core.replay import (
    MEANING,
    Comparison,
    SeenRequest,
    are_unequal,
    compare,
    fitted_times,
    replay_of,
    terms_of,
)
from services.planner.mesh_run import (
    EVERYBODY,
    GatewayLimits,
    MeshSetting,
    UnitModel,
    cached_tokens,
    run_mesh,
)
from services.sim.clock import WIRE_S
from services.sim.open_loop import SimAnswer, SimRequest
from services.sim.orders import WorkerSize
from shared.errors import InvalidRequest
from shared.predict.step_time import StepFit
from shared.predict.times import TimeModel
from shared.runtime.service import EXIT_FAILED, EXIT_OK
from shared.telemetry.definitions import Slo, percentile

_FILES: Final = Parameter(group=OUTPUT)

LETTERS: Final = {"prefill": "P", "decode": "D", "colocated": "M"}
QUICKEST: Final = 10
"""Per cent of the requests, of which nobody waited at the gateway."""

SEED_S: Final = 1.0
"""Between two prompts from which others have their beginning, beside what they compute."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """What is replayed, on what.

    Parameters
    ----------
    last
        Only what came in the last 60s, 5min; default: all that the gateway remembers.
    run
        Of a folder of pdmesh bench: which run; default the last.
    mesh
        Workers, as 1P+1D; default: those of the gateway.
    policy
        Routing policy; default: the gateway's.
    wire
        How long a message is under way; default: half of the hand-over that the gateway learned.
    link
        What each worker sends KV with; default: what workers measured.
    batch_tokens
        Prompts share a step up to so many tokens, 0 = as many as a step holds; default: what
        workers report.
    """

    last: Seconds | None = None
    run: int | None = None
    mesh: str | None = None
    policy: str | None = None
    wire: StepSeconds | None = None
    link: LinkRate | None = None
    batch_tokens: int | None = None
    slo_ttft: TtftFlag = 1.0
    slo_tpot: TpotFlag = 0.1
    tiers: TierFlags = TierFlags()  # noqa: RUF009  (frozen)
    times: TimesFlags = TimesFlags()  # noqa: RUF009  (frozen)

    def check(self) -> None:
        """Raise InvalidRequest, with what is allowed."""
        self.times.check()
        if self.policy is not None:
            require_policy(self.policy)
        is_some = 0 <= (self.batch_tokens or 0) <= 1 << 24
        require_ranges(
            ("--batch-tokens", is_some, "0 (as many as a step holds) or more"),
            ("--last", self.last != 0, "above 0: nothing would be replayed"),
        )

    def require_use(self, source: Path | None, keep: Path | None) -> None:
        """Raise InvalidRequest for a flag that would say nothing of this source."""
        is_folder = source is not None and source.is_dir()
        for flag, is_unused, whose in (
            ("--run", self.run is not None and not is_folder, "a folder of pdmesh bench --output"),
            ("--last", self.last is not None and is_folder, "a gateway, or of what it told"),
            ("--keep", keep is not None and source is not None, "a gateway that is asked"),
        ):
            if is_unused:
                raise InvalidRequest(f"{flag} is of {whose}: leave it out here")

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft, self.slo_tpot)


class Verified(NamedTuple):
    """A replay: what was seen, what was said, and on which mesh. door_s: what the gateway takes for
    a request by itself. notes: what a reader must know."""

    seen: SeenTraffic
    shape: MeshShape
    setting: MeshSetting
    answers: Sequence[SimAnswer]
    comparison: Comparison
    times: TimeModel
    door_s: float
    notes: list[str]


def verify(
    source: Path | None = None,
    /,
    *,
    flags: VerifyFlags = VerifyFlags(),
    keep: Annotated[Path | None, _FILES] = None,
    output: Annotated[Path | None, _FILES] = None,
    gateway: RunningGateway = LOCAL_GATEWAY,
    as_json: JsonFlag = False,
) -> int:
    """Replay what a live mesh served last in the simulator, and print predicted beside seen.

    Arrivals, lengths and what was cached come from the gateway's receipts, the mesh as it stands
    and its step times from what workers report, unless a time model is given. The exit code is 1 if
    a figure is off by more than its bar.

    Parameters
    ----------
    source
        A folder of pdmesh bench --output, or a file of --keep; default: the gateway at --url.
    keep
        Also write what the gateway told to this file, to replay it later.
    output
        Folder for report.json, requests.csv and report.svg, as of pdmesh bench: run 0 was seen, run
        1 predicted.
    """
    flags.check()
    flags.require_use(source, keep)
    begin_report(output)
    if keep is not None:
        require_writable("--keep", keep)
    if source is None:
        mesh = ask_gateway(gateway)
        if keep is not None:
            write_output("--keep", keep, msgspec.json.format(msgspec.json.encode(mesh), indent=1))
        seen = seen_by_gateway(mesh, gateway.url, flags.last)
    else:
        seen = read_seen(source, flags.run, flags.last)
    with progress("replay", len(seen.requests)) as on_progress:
        found = replay(seen, flags, on_progress)
    facts = facts_of(found)
    if output is not None:
        _write(found, facts, flags, output)
    if as_json:
        print_json(facts)
    else:
        _show(found)
    return EXIT_OK if found.comparison.is_kept else EXIT_FAILED


def replay(
    seen: SeenTraffic, flags: VerifyFlags, on_progress: Callable[[int], None] = lambda num: None
) -> Verified:
    """Simulate what was seen. Raises InvalidRequest: there is no mesh, time model or link to go by,
    or the profile is of another model."""
    shape, setting, notes = _setting(seen, flags)
    model = setting.unit(Unit())
    first_prompts, prompts = replay_of(seen.requests)
    seeds: list[SimRequest] = []
    at_s = 0.0
    for prompt in first_prompts:
        seeds.append(SimRequest(at_s, prompt, 1))
        at_s += SEED_S + model.times.step_s(len(prompt), len(prompt) ** 2 // 2, 0, 0)
    first_s = seen.requests[0].at_s
    requests = [
        SimRequest(at_s + it.at_s - first_s, prompt, it.num_output)
        for it, prompt in zip(seen.requests, prompts, strict=True)
    ]
    longest = max(len(it.prompt) + it.num_output for it in requests)
    if longest > model.kv_tokens:
        raise InvalidRequest(
            f"a request of {longest:,} tokens was served, and a worker holds {model.kv_tokens:,} "
            "here: give --kv-tokens of the workers that served it"
        )
    span_s = max(1e-9, seen.requests[-1].at_s - first_s)
    run = run_mesh(
        setting, shape, [*seeds, *requests], len(requests) / span_s, on_progress=on_progress
    )
    answers = run.answers[len(seeds) :]
    # What the gateway takes to read, tokenize and admit a request that waits for nobody: what the
    # quickest tenth took.
    told = [it.terms.gateway for it in seen.requests if it.terms is not None]
    door_s = percentile(told, QUICKEST) if told else 0.0
    predicted = [_felt(it, was, door_s) for it, was in zip(answers, seen.requests, strict=True)]
    comparison = compare(seen.requests, predicted, setting.slo)
    notes += model.times.warnings()
    return Verified(seen, shape, setting, answers, comparison, model.times, door_s, notes)


def _felt(answer: SimAnswer, was: SeenRequest, door_s: float) -> SeenRequest:
    """Return what a simulated request felt, in the terms of receipts."""
    times, told = answer.token_times, answer.prompt
    num = len(times)
    ttft_s = door_s + times[0] - answer.arrived_at if times else None
    tpot_s = (times[-1] - times[0]) / (num - 1) if num > 1 else 0.0
    terms = None
    if ttft_s is not None and told is not None:
        terms = terms_of(
            ttft_s,
            tpot_s,
            num,
            gateway=door_s + answer.sent_at - answer.arrived_at,
            prefill_queue=told.queue_s,
            prefill=told.compute_s,
            first_gap_s=times[1] - times[0] if num > 1 else 0.0,
        )
    return SeenRequest(
        was.at_s, was.num_prompt, num, ttft_s, tpot_s, answer.is_complete, terms=terms
    )


def _setting(seen: SeenTraffic, flags: VerifyFlags) -> tuple[MeshShape, MeshSetting, list[str]]:
    """The mesh as it stands, or as the flags say; and what is to be said of it."""
    mesh, notes = seen.mesh, _notes(seen, has_tiers=bool(flags.tiers.sizes))
    policy = flags.policy or (mesh.policy if mesh is not None else GATEWAY.policy)
    if policy not in POLICIES:  # a name that a gateway tells imports nothing
        raise InvalidRequest(f"the mesh routes by {policy}: say so with --policy {policy}")
    workers = [] if mesh is None else [it for it in mesh.workers if not it.draining]
    borrowed = "M" if flags.mesh else ""
    if flags.mesh is not None:
        shape = read_mesh(flags.mesh)
        if any(part.unit != Unit() for part in shape.parts):
            raise InvalidRequest("--mesh of a replay has equal workers: 1P+1D, no brackets")
    elif workers:
        shape = MeshShape.of(*(MeshPart(1, LETTERS[it.kind]) for it in workers))
        # Those that may be either, which are at home with what their letter says.
        borrowed = "".join({LETTERS[it.kind] for it in workers if it.moves})
        if not shape.can_serve and not (borrowed and POLICIES[policy]().moves_roles):
            raise InvalidRequest(
                f"the mesh has {shape} now, which can serve nothing: say what served with --mesh"
            )
    else:
        raise InvalidRequest(f"{seen.source} tells of no worker: say what served with --mesh 1P+1D")
    answering = [it for it in workers if it.moves or it.kind != "prefill"]
    computing = [it for it in workers if it.moves or it.kind != "decode"]
    # These two say how much a worker holds and of what, not how long a step takes.
    is_given = flags.times != TimesFlags(kv_tokens=flags.times.kv_tokens, model=flags.times.model)
    if is_given:
        _require_same_model(seen, flags.times)
        times = flags.times.unit(Unit()).times
    else:
        fits = [StepFit(**it.prompt_steps) for it in computing]  # type: ignore[arg-type]
        own = [StepFit(**it.answer_steps) for it in answering]  # type: ignore[arg-type]
        times = fitted_times(fits, own)
        if times is None:
            raise InvalidRequest(
                f"{seen.source} tells of no step times: give a time model, such as --profile FILE "
                "of pdmesh profile -o"
            )
        for name, several, rows in (("prompts", fits, 256), ("answers", own, 8)):
            if are_unequal(several, rows, 256 * rows):
                notes.append(
                    f"workers' steps with {name} differ by more than a fifth: they are replayed as "
                    "equal ones"
                )
    if answering and (flags.times.model is None or not is_given):
        # Whatever times are given: how large its KV is, and how much it holds, a worker reports.
        held = min(it.blocks * it.block_size for it in answering)
        model = UnitModel(times, flags.times.kv_tokens or held)
        kv = kv_of_bytes(seen.model, answering[0].token_bytes)
    else:
        model, kv = flags.times.unit(Unit()), flags.times.kv
    colocated = shape.num_of("M") == shape.num_workers
    learned_s = 0.0 if mesh is None else mesh.handover_s["colocated" if colocated else "pair"]
    # In the simulator a hand-over is two messages' ways: the order there, token 1 back.
    wire_s = learned_s / 2 or WIRE_S if flags.wire is None else flags.wire
    batch_tokens = flags.batch_tokens
    if batch_tokens is None:
        batch_tokens = computing[0].batch_tokens if computing else 0
    setting = MeshSetting(
        unit=lambda unit: model,
        kv=kv,
        slo=flags.slo,
        target=1.0,
        policy=policy,
        size=WorkerSize(
            block_size=answering[0].block_size if answering else 16,
            max_running=min(set(map(attrgetter("max_running"), answering)) - {0}, default=256),
            batch_tokens=batch_tokens,
            link_bytes_s=flags.link or (mesh.link_bytes_s if mesh is not None else 0.0),
            tiers=flags.tiers.sizes,
            cache_policy=flags.tiers.cache_policy,
        ),
        # A number would stand for the time that mixed workers keep a step to.
        token_budget=0
        if any(map(shape.num_of, {"M", *borrowed})) or not computing
        else computing[0].step_tokens,
        wire_s=wire_s,
        borrowed=borrowed,
        # Not its ``overload``: whom it refused is not replayed, and would be refused once more.
        gateway=EVERYBODY
        if mesh is None or not mesh.max_running
        else GatewayLimits(
            mesh.max_running, mesh.max_waiting, mesh.max_wait_s, mesh.max_pending_tokens
        ),
    )
    return shape, setting, notes


def _require_same_model(seen: SeenTraffic, times: TimesFlags) -> None:
    if times.profile is None or times.model is not None or not seen.model:
        return
    if times.kv.name.lower() != seen.model.lower():
        raise InvalidRequest(
            f"{times.profile} is a profile of {times.kv.name}, and {seen.source} served "
            f"{seen.model}: profile that model (pdmesh profile -o), or if it is one model under "
            f"two names, say so with --model {times.kv.name}"
        )


def _notes(seen: SeenTraffic, *, has_tiers: bool) -> list[str]:
    notes: list[str] = []
    if seen.left_out:
        notes.append(f"left out, for they brought no token: {seen.left_out}")
    going_on = sum(not it.is_over for it in seen.requests)
    if going_on:
        notes.append(f"replayed and not judged, for they go on: {going_on}")
    if seen.num_retried:
        notes.append(
            f"took more than one attempt: {seen.num_retried}; the simulator's workers do not fail"
        )
    if seen.mesh is not None and not seen.is_client:
        here = {it.incarnation for it in seen.mesh.workers}
        gone = sum(bool(it.worker) and it.worker not in here for it in seen.requests)
        if gone:
            notes.append(
                f"served by workers that are here no longer: {gone}; the mesh is replayed as it "
                "stands"
            )
    asked = () if seen.mesh is None or has_tiers else seen.mesh.requests
    below = sum(any(it.receipt.get(f"{tier}_tokens") for tier in ("dram", "ssd")) for it in asked)
    if below:
        notes.append(
            f"had KV from below the pools, of which the replay knows none: {below}; give the "
            "workers' --dram-cache, and as --ssd-cache their --ssd-cache-size"
        )
    if seen.is_client:
        notes.append(
            "times are a client's: HTTP and the way to the gateway are in TTFT, and not simulated"
        )
    return notes


def facts_of(found: Verified) -> dict[str, Any]:
    comparison = found.comparison
    return {
        "source": found.seen.source,
        "mesh": str(found.shape),
        "num_requests": len(found.seen.requests),
        "policy": found.setting.policy,
        "times": found.times.source,
        "wire_s": found.setting.wire_s,
        "door_s": found.door_s,
        "is_kept": comparison.is_kept,
        "figures": [it._asdict() | {"is_kept": it.is_kept} for it in comparison.figures],
        "terms": [it._asdict() for it in comparison.terms],
        "worst": {
            of: None if (term := comparison.worst(of)) is None else term.name
            for of in ("TTFT", "TPOT")
        },
        "cached_tokens": cached_tokens(found.answers)._asdict(),
        "notes": found.notes,
    }


def _show(found: Verified) -> None:
    console, seen, comparison = plain_console(), found.seen, found.comparison
    span_s = seen.requests[-1].at_s - seen.requests[0].at_s
    console.print(
        f"{len(seen.requests)} requests in {span_s:.1f} s of {seen.source}, replayed on "
        f"{found.shape}, {found.setting.policy}",
        soft_wrap=True,
    )
    table = plain_table("", "seen", "predicted", "off by", "bar", "")
    for it in comparison.figures:
        is_share = it.name == "attainment"
        show = "{:.1%}".format if is_share else time_text
        off = f"{it.error * 100:+.1f} points" if is_share else f"{it.error:+.1%}"
        bar = f"{it.bar * 100:g} points" if is_share else f"{it.bar:.0%}"
        mark = "✓" if it.is_kept else "✗"
        table.add_row(it.name, show(it.seen), show(it.predicted), off, bar, mark)
    console.print(table)
    if comparison.terms:
        table = plain_table("mean of", "seen", "predicted", "off by")
        for term in comparison.terms:
            off = (term.predicted - term.seen) * 1e3
            name = f"{term.of} {term.name.replace('_', ' ')}"
            table.add_row(name, time_text(term.seen), time_text(term.predicted), f"{off:+.2f} ms")
        console.print(table)
    for of in ("TTFT", "TPOT"):
        if (worst := comparison.worst(of)) is not None:
            name = worst.name.replace("_", " ")
            console.print(f"{of} is off most in {name}: {MEANING[worst.name]}", soft_wrap=True)
    print_lines(cached_line(cached_tokens(found.answers)))
    console.print(f"times: {found.times.source}", soft_wrap=True)
    console.print(
        f"a message is under way for {time_text(found.setting.wire_s)}, the gateway itself takes "
        f"{time_text(found.door_s)} for a request"
    )
    print_lines(found.notes)


def _write(found: Verified, facts: dict[str, Any], flags: VerifyFlags, folder: Path) -> None:
    seen = found.seen
    asks = [
        Ask(
            num_input=it.num_prompt, num_output=it.num_output, due_s=it.at_s - seen.requests[0].at_s
        )
        for it in seen.requests
    ]
    label = f"simulated {found.shape}"
    runs = [
        seen_run(seen, asks),
        simulated_run(seen.source, asks, found.answers, label, None),
    ]
    report = report_of(
        runs,
        found.setting.slo,
        flags=asdict(flags),
        endpoints=[
            {"url": name, "model": seen.model, "api": api, "prompts": "", "counts": "in all"}
            for name, api in ((seen.source, "receipts"), (label, "simulated"))
        ],
    )
    report["runs"][0]["itl_s"] = None  # receipts tell the mean of an answer's gaps alone
    write_report({**report, "verify": facts}, runs, folder)
