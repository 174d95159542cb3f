"""One mesh simulated with one set of requests, and what it tells of the limits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from services.gateway.core.admission.admission import REASONS
from services.gateway.core.admission.overload import OverloadMode
from services.gateway.core.admission.tenants import Terms
from services.planner.core.kv_size import KvShape
from services.planner.core.limits import Felt
from services.planner.core.mesh_text import MeshPart, MeshShape, Unit
from services.sim.clock import WIRE_S
from services.sim.engine import TimedEngine
from services.sim.mesh import CoreMesh
from services.sim.open_loop import (
    SimAnswer,
    SimRequest,
    run_open_loop,
    simulated_model,
)
from services.sim.orders import WorkerSize
from services.sim.worker import CoreWorker
from shared.config import STEP_TOKENS
from shared.errors import InvalidRequest
from shared.kv.journal import Tier
from shared.kv.layout import KvLayout
from shared.predict.times import ScaledTimes, TimeModel
from shared.telemetry.definitions import Slo, attainment, percentile


@dataclass(frozen=True, slots=True)
class UnitModel:
    """What one worker is: how long its steps take, and how many tokens of KV it holds."""

    times: TimeModel
    kv_tokens: int


class GatewayLimits(NamedTuple):
    """Whom a simulated gateway lets in; by default everybody. See ``CoreMesh``."""

    max_running: int = 1 << 20
    max_waiting: int = 0
    max_wait_s: float = 10.0
    max_pending_tokens: int = 0


EVERYBODY: Final = GatewayLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSetting:
    """All of a simulated mesh but its workers. unit: what devices make of one worker; size: what
    else it is, without blocks and budget. token_budget: 0 = as workers decide it. wire_s: how long
    a message is under way. is_exact: every step is an event, equal ones are not skipped. overload:
    the gateway's own; with it each request names the limits as its own. borrowed: kinds of workers
    that serve both roles, if the policy borrows them."""

    unit: Callable[[Unit], UnitModel]
    kv: KvShape
    slo: Slo
    target: float
    policy: str
    size: WorkerSize
    token_budget: int
    wire_s: float = WIRE_S
    is_exact: bool = False
    gateway: GatewayLimits = EVERYBODY
    overload: str = "off"
    borrowed: str = "M"


class CachedTokens(NamedTuple):
    """Tokens of prompts that brought a token, and of them those that were not computed, by where
    they lay: in their worker's pool, below it in memory or on disk, in another worker's pool."""

    prompts: int
    pool: int
    dram: int
    ssd: int
    fetched: int

    @property
    def num_cached(self) -> int:
        return self.pool + self.dram + self.ssd + self.fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRun:
    """What a run says. attained: share of all requests. attains: whether that is the target."""

    shape: MeshShape
    rate: float
    num_requests: int
    attains: bool
    attained: float
    answers: Sequence[SimAnswer]
    felt: Felt
    num_events: int
    took_s: float

    @property
    def goodput(self) -> float:
        """Requests/s within the limits, for each worker."""
        return self.attained * self.rate / self.shape.num_workers

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(answer.error for answer in self.answers if answer.error))

    @property
    def cached(self) -> CachedTokens:
        return cached_tokens(self.answers)

    @property
    def num_retried(self) -> int:
        return sum(answer.num_attempts > 1 for answer in self.answers)

    @property
    def is_served(self) -> bool:
        return any(answer.is_complete for answer in self.answers)


def run_mesh(
    setting: MeshSetting,
    shape: MeshShape,
    requests: Sequence[SimRequest],
    rate: float,
    *,
    on_progress: Callable[[int], None] = lambda num_ended: None,
) -> MeshRun:
    """Simulate one mesh.

    Raises InvalidRequest: the time model does not know one of the workers, or a request fits into
    none.
    """
    began = time.perf_counter()
    mesh, parts = _mesh(setting, shape)
    slo, is_told = setting.slo, setting.overload != "off"
    terms = Terms(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s) if is_told else Terms()
    answers = run_open_loop(mesh, requests, on_progress, terms)
    attained = attainment(answers, setting.slo)
    span_s = max((one.token_times[-1] for one in answers if one.token_times), default=0.0)
    return MeshRun(
        shape=shape,
        rate=rate,
        num_requests=len(requests),
        attains=attained >= setting.target,
        attained=attained,
        answers=answers,
        felt=_felt(answers, parts, setting, span_s),
        num_events=mesh.clock.num_events,
        took_s=time.perf_counter() - began,
    )


def _mesh(
    setting: MeshSetting, shape: MeshShape
) -> tuple[CoreMesh, list[tuple[MeshPart, CoreWorker]]]:
    sizes = [_size(setting, part) for part in shape.parts]
    largest = max(sizes, key=lambda size: size.num_blocks)
    most_kv = max(setting.unit(part.unit).kv_tokens for part in shape.parts)
    spec, layout = simulated_model(setting.kv.name, setting.kv.token_bytes, most_kv)
    _require_room(setting, layout)
    mesh = CoreMesh(
        spec,
        layout,
        lambda _: TimedEngine(setting.unit(Unit()).times),
        largest,
        policy=setting.policy,
        wire_s=setting.wire_s,
        skips=not setting.is_exact,
        **setting.gateway._asdict(),
    )
    mesh.overload.mode = OverloadMode(setting.overload)
    workers: list[tuple[MeshPart, CoreWorker]] = []
    for part, size in zip(shape.parts, sizes, strict=True):
        role = "prefill" if part.kind == "P" else "decode"
        serves_both = mesh.policy.moves_roles and part.kind in setting.borrowed
        times = setting.unit(part.unit).times
        if size.num_stages > 1:
            times = ScaledTimes(times, 1 / size.num_stages)
        engine = TimedEngine(times)
        for _ in range(part.num):
            core = mesh.start(
                role,
                serves_both=serves_both,
                is_colocated=part.kind == "M" and not serves_both,
                engine=engine,
                size=size,
            )
            workers.append((part, core))
    mesh.settle()
    return mesh, workers


def _size(setting: MeshSetting, part: MeshPart) -> WorkerSize:
    kv_tokens = setting.unit(part.unit).kv_tokens
    num_blocks = kv_tokens // setting.size.block_size
    if num_blocks < 8:
        raise InvalidRequest(
            "--kv-tokens must hold 8 blocks of --block-size at least (a worker holds "
            f"{kv_tokens} tokens of KV here)"
        )
    return replace(
        setting.size,
        num_blocks=num_blocks,
        token_budget=setting.token_budget or STEP_TOKENS,
        tbt_target_s=None if setting.token_budget else 0.0,
        frame_bytes=1 << 40,  # a frame is a group of layers, whatever its length
        # Who decodes goes through all stages before its next step.
        num_stages=part.unit.pp if part.kind == "P" else 1,
    )


def _require_room(setting: MeshSetting, layout: KvLayout) -> None:
    """Raise InvalidRequest for a tier that holds nothing."""
    block_bytes = setting.size.block_size * layout.token_bytes
    for tier in setting.size.tiers:
        if tier.num_bytes < block_bytes:
            flag = "--dram-cache" if tier.kind is Tier.DRAM else "--ssd-cache"
            raise InvalidRequest(
                f"{flag} of {tier.num_bytes} bytes holds not one KV block of {block_bytes}: give "
                "more, or leave it out"
            )


def cached_tokens(answers: Sequence[SimAnswer]) -> CachedTokens:
    """Return what was not computed of prompts, by where it lay."""
    prompts = cached = dram = ssd = fetched = 0
    for answer in answers:
        if (told := answer.prompt) is not None:
            prompts += answer.num_prompt
            cached += told.cached_tokens
            dram += told.dram_tokens
            ssd += told.ssd_tokens
            fetched += told.fetched_tokens
    return CachedTokens(prompts, cached - dram - ssd - fetched, dram, ssd, fetched)


def _felt(
    answers: Sequence[SimAnswer],
    workers: Sequence[tuple[MeshPart, CoreWorker]],
    setting: MeshSetting,
    span_s: float,
) -> Felt:
    slo, num = setting.slo, max(1, len(answers))
    served = [one for one in answers if one.is_complete and one.ttft_s is not None]
    ttft = [one.token_times[0] - one.arrived_at for one in served]
    tpot = [one.tpot_s for one in served]
    level = 100 * setting.target

    def busiest(kinds: str) -> float:
        busy_s = max((it.work.busy_s for part, it in workers if part.kind in kinds), default=0.0)
        return busy_s / max(span_s, busy_s) if busy_s else 0.0

    return Felt(
        late=sum(value > slo.ttft_s for value in ttft) / num,
        slow=sum(value > slo.tpot_s for value in tpot) / num,
        unserved=(len(answers) - len(served)) / num,
        refused=sum(one.error in REASONS for one in answers) / num,
        ttft_use=percentile(ttft, level) / slo.ttft_s if ttft else 0.0,
        tpot_use=percentile(tpot, level) / slo.tpot_s if tpot else 0.0,
        prompt_busy=busiest("PM"),
        answer_busy=busiest("DM"),
        kv_use=max(
            (it.work.most_held / it.pool.num_blocks for part, it in workers if part.kind in "DM"),
            default=0.0,
        ),
        is_mixed=all(part.kind == "M" for part, _ in workers),
    )
