"""The flags of plans that simulate, and the runs that they ask for."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final, Literal, overload

from cyclopts import Parameter

from services.cli.bench.sources import SHAPES, Source, read_trace
from services.cli.bench.workload import Ask, Fit, Load, Workload, plan
from services.cli.plan.tier_flags import TierFlags
from services.cli.plan.times_flags import TimesFlags
from services.cli.plan.view import require_ranges
from services.cli.quantities import LinkRate, TpotFlag, TtftFlag
from services.gateway.core.routing.routing import POLICIES
from services.gateway.own_policy import load_policy
from services.planner.core.bounds import (
    AskedLengths,
    WorkerBound,
    least_limits,
    mesh_bound,
    unmeetable,
    worker_bound,
)
from services.planner.core.limits import binding_limit
from services.planner.core.mesh_text import MeshShape, Unit
from services.planner.mesh_run import GatewayLimits, MeshRun, MeshSetting, UnitModel, run_mesh
from services.sim.open_loop import SimRequest
from services.sim.orders import WorkerSize
from shared.bounds import OverloadName
from shared.config import STEP_TOKENS, GatewayConfig
from shared.errors import InvalidRequest
from shared.telemetry.definitions import RequestOutcome, Slo, percentiles

WORKLOADS: Final = {"azure-conv": "chat", "azure-code": "code", "mooncake": "mooncake"}
"""By name, the shapes of `pdmesh bench`; or a trace file."""
QS: Final = {"p50": 50.0, "p90": 90.0, "p99": 99.0}

GATEWAY: Final = GatewayConfig()
"""A gateway of which nobody says anything."""

MOST_REQUESTS: Final = 1_000_000

MOST_SPAN_S: Final = 7 * 86400.0
"""An idle mesh reports, too: a day of it takes a minute to simulate."""

MOST_ANSWERS: Final = 20_000
"""Answers whose single gaps are looked at; a million answers have hundreds of millions."""

TRIAL_REQUESTS: Final = 60
"""Of the run that tells how quick this machine simulates."""
TRIAL_STEPS: Final = 1000
"""With prompts, after which it has enough requests: a prompt may be thousands (--token-budget)."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimFlags:
    """Load, workers, time model, limits.

    Parameters
    ----------
    workload
        azure-conv, azure-code, mooncake (drawn lengths and prefixes), or a trace file in Mooncake's
        or Azure's format.
    rate
        Requests a second, by Poisson; of a trace file the pattern of its first --num-requests,
        stretched to this rate.
    num_requests
        How many requests.
    scale_lengths
        Factor of all lengths.
    policy
        Routing policy of the gateway.
    block_size
        Tokens of a block.
    token_budget
        Most tokens of a step; 0 = as workers decide it: 2048, and of mixed ones as many as keep a
        step within 50 ms beside answers, or within twice what those take alone.
    max_running
        Most sequences of a step.
    overload
        When the gateway refuses what would miss --slo-ttft or --slo-tpot: off, stage, early or
        predicted, as a gateway's --overload. All but off have each request name both as its own.
    gateway_max_running
        --max-running of the gateway: requests in progress at once.
    max_pending_tokens
        Prompt tokens that a worker has ahead; other prompts wait at the gateway; 0 = none do.
    max_waiting
        Requests that may wait for a place at the gateway; more are refused at once.
    max_wait_s
        Longest wait for a place, for a worker pair, and for blocks on decode.
    link
        What each worker sends with: GB/s are bytes, Gb/s bits. Frames go one after the other.
    attainment
        Share of requests that must keep both.
    fidelity
        runs: equal decode steps are one event; exact: every step is. Both give the same.
    seed
        Of lengths and arrivals: equal seeds give equal runs.
    """

    workload: str = "azure-conv"
    rate: float = 1.0
    num_requests: int = 500
    scale_lengths: float = 1.0
    policy: str = GATEWAY.policy
    block_size: int = 16
    token_budget: int = 0
    max_running: int = 256
    overload: OverloadName = "off"
    gateway_max_running: int = GATEWAY.max_running
    max_pending_tokens: int = GATEWAY.max_pending_tokens
    max_waiting: int = GATEWAY.max_waiting
    max_wait_s: float = GATEWAY.max_wait_s
    link: LinkRate = 25e9
    slo_ttft: TtftFlag = 1.0
    slo_tpot: TpotFlag = 0.1
    attainment: float = 0.9
    fidelity: Literal["runs", "exact"] = "runs"
    seed: int = 0
    tiers: TierFlags = TierFlags()  # noqa: RUF009  (frozen)
    times: TimesFlags = TimesFlags()  # noqa: RUF009  (frozen)

    def check(self) -> None:
        """Raise InvalidRequest, with what is allowed."""
        require_policy(self.policy)
        require_ranges(
            ("--num-requests", 1 <= self.num_requests <= MOST_REQUESTS, f"1..{MOST_REQUESTS}"),
            ("--block-size", 1 <= self.block_size <= 4096, "1..4096"),
            ("--token-budget", 0 <= self.token_budget <= 1 << 20, f"0..{1 << 20}"),
            ("--max-running", 1 <= self.max_running <= 1 << 16, f"1..{1 << 16}"),
            ("--gateway-max-running", self.gateway_max_running >= 1, "1 or more"),
            ("--max-pending-tokens", self.max_pending_tokens >= 0, "0 or more"),
            ("--max-waiting", self.max_waiting >= 0, "0 or more"),
            ("--max-wait-s", 0 < self.max_wait_s <= 60, "above 0 and at most 60"),
            ("--rate", 0 < self.rate < 1e6, "above 0 and below 1e6"),
            ("--attainment", 0 < self.attainment <= 1, "above 0 and at most 1"),
            ("--scale-lengths", 0.001 <= self.scale_lengths <= 1000, "0.001..1000"),
        )
        if (span_s := self.num_requests / self.rate) > MOST_SPAN_S:
            raise InvalidRequest(
                f"{self.num_requests} requests at --rate {self.rate:g} take {span_s / 86400:.3g} "
                f"days to arrive, and a run is of {MOST_SPAN_S / 86400:.0f} at most"
            )
        self.times.check()
        assert self._source is not None  # read for what it raises

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft, self.slo_tpot)

    @property
    def setting(self) -> MeshSetting:
        """All of a simulated mesh but its workers. Raises InvalidRequest."""
        return MeshSetting(
            unit=self.times.unit,
            kv=self.times.kv,
            slo=self.slo,
            target=self.attainment,
            policy=self.policy,
            size=WorkerSize(
                block_size=self.block_size,
                max_running=self.max_running,
                link_bytes_s=self.link,
                tiers=self.tiers.sizes,
                cache_policy=self.tiers.cache_policy,
            ),
            token_budget=self.token_budget,
            is_exact=self.fidelity == "exact",
            gateway=GatewayLimits(
                self.gateway_max_running,
                self.max_waiting,
                self.max_wait_s,
                self.max_pending_tokens,
            ),
            overload=self.overload,
        )

    def workload_of(self, units: Sequence[Unit]) -> Workload:
        """Return the requests, cut to what each of these workers can hold. Raises InvalidRequest:
        the trace is out of order, or holds too few."""
        load = Load(rate=self.rate, num_requests=self.num_requests, seed=self.seed)
        least_kv = min(self.times.unit(unit).kv_tokens for unit in units)
        fit = Fit(
            scale=self.scale_lengths, max_total=max(2, least_kv * 7 // 8), is_cut_to_context=True
        )
        return plan(self._source, load, fit)

    def requests(self, units: Sequence[Unit]) -> Sequence[SimRequest]:
        """Return the requests with tokens: equal block ids are equal tokens, the rest is each
        one's own. Raises InvalidRequest."""
        return _Requests(self.workload_of(units))

    def requests_told(self, units: Sequence[Unit]) -> Sequence[SimRequest]:
        """Return the requests, and say on stderr if some were cut. Raises InvalidRequest."""
        workload = self.workload_of(units)
        if workload.num_cut:
            longest = max(ask.num_input + ask.num_output for ask in workload.asks)
            print(
                f"pdmesh: {workload.num_cut} of {len(workload.asks)} requests are longer than a "
                f"worker holds, and were cut to {longest:,} tokens: more --kv-tokens, or smaller "
                "--scale-lengths",
                file=sys.stderr,
            )
        return _Requests(workload)

    def lengths(self, units: Sequence[Unit]) -> list[AskedLengths]:
        """Return the lengths of the requests, with what of each prompt came before."""
        workload, seen = self.workload_of(units), set[int]()
        found: list[AskedLengths] = []
        for ask in workload.asks:
            cached = sum(1 for _ in takewhile(seen.__contains__, ask.block_ids))
            seen.update(ask.block_ids)
            num_cached = min(cached * workload.block_tokens, ask.num_input)
            found.append(AskedLengths(ask.num_input, ask.num_output, num_cached))
        return found

    @cached_property
    def _source(self) -> Source:
        if self.workload in WORKLOADS:
            return SHAPES[WORKLOADS[self.workload]]
        if Path(self.workload).suffix or Path(self.workload).exists():
            return read_trace(Path(self.workload), must_be_ordered=True)
        raise InvalidRequest(
            f"--workload must be {', '.join(WORKLOADS)} or a trace file, not {self.workload!r}"
        )

    def _asked(self, unit: Unit) -> UnitModel:
        """What closed forms ask: of steps that no run has, so that no warning tells of them."""
        return deepcopy(self.times.unit(unit))

    def bounds(self, units: Sequence[Unit]) -> dict[Unit, WorkerBound]:
        """Return what one worker of each kind can do at most, for ever."""
        lengths = self.lengths(units)
        found: dict[Unit, WorkerBound] = {}
        for unit in units:
            model = self._asked(unit)
            found[unit] = worker_bound(
                model.times,
                model.kv_tokens,
                lengths,
                token_budget=self.token_budget or STEP_TOKENS,
                max_running=self.max_running,
                pp=unit.pp,
            )
        return found

    def most_rate(self, shape: MeshShape) -> float:
        """Return the rate beyond which this mesh's queues grow for ever, however short a run."""
        return mesh_bound(shape, self.bounds([part.unit for part in shape.parts]))

    def impossible(self, units: Sequence[Unit]) -> list[str]:
        """Return which limits no number of these workers can keep, and what would be kept."""
        workers = [(self._asked(unit).times, unit.pp) for unit in units]
        budget = self.token_budget or STEP_TOKENS
        least = least_limits(workers, self.lengths(units), self.attainment, budget)
        return unmeetable(self.slo, least, self.attainment)

    def variant(self, **changes: Any) -> SimFlags:
        """Return the same with other numbers; slower: of the time model."""
        slower = changes.pop("slower", None)
        if slower is not None:
            changes["times"] = replace(self.times, slower=self.times.slower * slower)
        return replace(self, **changes)

    def run(
        self,
        shape: MeshShape,
        requests: Sequence[SimRequest] | None = None,
        *,
        on_progress: Callable[[int], None] = lambda num_ended: None,
    ) -> MeshRun:
        """Simulate one mesh. requests: None = the flags'."""
        if requests is None:
            requests = self.requests([part.unit for part in shape.parts])
        return run_mesh(self.setting, shape, requests, self.rate, on_progress=on_progress)

    def trial_s(self, shape: MeshShape, requests: Sequence[SimRequest]) -> float:
        """Return how long a run of all requests will take here, from one of a few."""
        few, num_steps = list[SimRequest](), 0.0
        for request in islice(requests, TRIAL_REQUESTS):
            if num_steps > TRIAL_STEPS:
                break
            few.append(request)
            num_steps += len(request.prompt) / (self.token_budget or STEP_TOKENS)
        return self.run(shape, few).took_s * len(requests) / max(1, len(few))

    def warnings(self, shape: MeshShape) -> list[str]:
        """Return what a reader must know of the answers."""
        found = [self.times.unit(part.unit).times.warnings() for part in shape.parts]
        if shape.num_of("D") and not (shape.num_of("P") or POLICIES[self.policy]().moves_roles):
            found.append(["nobody computes prompts for D, which does nothing: add a P"])
        if any(part.unit.pp > 1 for part in shape.parts):
            found.append(["pp is for plans: neither pdmesh's engine nor --engine vllm runs stages"])
        return list(dict.fromkeys(word for words in found for word in words))

    def sources(self, shape: MeshShape) -> list[str]:
        found = [self.times.unit(part.unit).times.source for part in shape.parts]
        return list(dict.fromkeys(found))

    def about_times(self, shapes: Sequence[MeshShape]) -> list[str]:
        """Return in sentences where the times of the first come from, and all warnings."""
        warnings = {word: None for shape in shapes for word in self.warnings(shape)}
        sources = [f"times: {source}" for source in self.sources(shapes[0])]
        return [*sources, *self.tiers.about, *warnings]

    def facts(self, run: MeshRun) -> dict[str, Any]:
        """Return a run for programs; nothing in it depends on this machine."""
        return {
            "mesh": str(run.shape),
            "workload": self.workload,
            "rate": self.rate,
            "num_requests": run.num_requests,
            "policy": self.policy,
            "times": self.sources(run.shape),
            "fidelity": self.fidelity,
            "seed": self.seed,
            "attainment": run.attained,
            "goodput_per_worker": run.goodput,
            "latency_s": latencies(run.answers),
            "limit": asdict(binding_limit(run.felt)),
            "cached_tokens": run.cached._asdict(),
            "errors": run.errors,
            "num_retried": run.num_retried,
            "warnings": self.warnings(run.shape),
        }


def require_policy(name: str) -> None:
    """Load a policy of one's own. Raises InvalidRequest: it is none."""
    load_policy(name)
    known = f"one of {', '.join(POLICIES)} or package.module:Class, not {name!r}"
    require_ranges(("--policy", name in POLICIES, known))


class _Requests(Sequence[SimRequest]):
    """Requests whose tokens are made when they are asked for: a million prompts are 8 GB."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __len__(self) -> int:
        return len(self._workload.asks)

    @overload
    def __getitem__(self, index: int) -> SimRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[SimRequest]: ...
    def __getitem__(self, index: int | slice) -> SimRequest | list[SimRequest]:
        if isinstance(index, slice):
            return [self[idx] for idx in range(*index.indices(len(self)))]
        ask = self._workload.asks[index]
        tokens = _tokens(ask, index % len(self), self._workload.block_tokens)
        return SimRequest(ask.due_s, tokens, ask.num_output)


def _tokens(ask: Ask, idx: int, block_tokens: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for block_id in ask.block_ids[: -(-ask.num_input // block_tokens)]:
        # A token has 32 bits, and is not ANSWER_TOKEN. Ids that are longer are hashes.
        tokens += [block_id % 0xFFFF_FFFF + 1] * block_tokens
    own = random.Random(idx).getrandbits(30) + 1
    tokens = tokens[: ask.num_input]
    return (*tokens, *([own] * (ask.num_input - len(tokens))))


def latencies(outcomes: Sequence[RequestOutcome]) -> dict[str, dict[str, float]]:
    """Return percentiles of complete requests, by figure and percentile. TBT: of so many of them,
    evenly chosen, that the gaps are counted in seconds."""
    served = [outcome for outcome in outcomes if outcome.is_complete]
    columns = {
        "TTFT": [one.ttft_s for one in served if one.ttft_s is not None],
        "TPOT": [one.tpot_s for one in served],
        "TBT": [gap for one in served[:: len(served) // MOST_ANSWERS + 1] for gap in one.tbt_s],
        "E2E": [one.e2e_s for one in served if one.e2e_s is not None],
    }
    return {
        name: dict(zip(QS, percentiles(values, tuple(QS.values())), strict=True))
        for name, values in columns.items()
        if values
    }
