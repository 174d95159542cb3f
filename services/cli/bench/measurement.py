"""One measurement: warm up, then one run, a sweep of runs, or a search for the goodput."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console

from services.cli.bench.endpoints import Description, ServerEndpoint, fit_of, open_endpoints
from services.cli.bench.flags import BenchFlags
from services.cli.bench.open_loop import run_open_loop
from services.cli.bench.records import Run
from services.cli.bench.search import RateSearch
from services.cli.bench.sources import Source
from services.cli.bench.summary import summarize
from services.cli.bench.view import progress_of, rate_text
from services.cli.bench.workload import AS_IT_COMES, Fit, Load, Workload, planning
from services.cli.client import NO_ACCESS, Access
from services.cli.flags import CannotRun
from services.cli.words import plain_console

MOST_VOID: Final = 3
"""Runs of a search at one rate, until it gives up: one hiccup of the machine shall not end it."""


@dataclass(slots=True)
class Measurement:
    """What the flags ask for, and what has been measured so far, whatever ends it. mesh: as the
    gateway told of it at the end; None = several servers, or none of ours."""

    urls: Sequence[str]
    source: Source
    flags: BenchFlags
    access: Access = NO_ACCESS
    runs: list[Run] = field(default_factory=list[Run])
    descriptions: list[Description] = field(default_factory=list[Description])
    search: RateSearch | None = None
    mesh: dict[str, Any] | None = None
    progress: Console = field(default_factory=lambda: plain_console(stderr=True))
    _endpoints: Sequence[ServerEndpoint] = ()
    _fit: Fit = AS_IT_COMES

    async def go(self) -> None:
        """Measure. Raises MeshError: a server cannot be used, or nothing is left to be sent."""
        flags = self.flags
        async with open_endpoints(
            self.urls,
            model=flags.model,
            access=self.access,
            api=flags.api,
            ignore_eos=flags.ignore_eos,
        ) as endpoints:
            self.descriptions = [endpoint.description for endpoint in endpoints]
            self._endpoints, self._fit = endpoints, fit_of(endpoints, flags.fit)
            if flags.warmup:  # what is made once is paid for now: connections, kernels, pools
                load = Load(rate=math.inf, num_requests=flags.warmup, arrivals="poisson")
                await self._send(Run(await self.plan(load)))
            rates = flags.first_rates(self.source)
            if flags.goodput:
                await self._find_goodput(rates[0] or 1.0)
            else:
                for rate in rates:
                    await self._run(flags.load(rate))
            if len(endpoints) == 1:
                self.mesh = await endpoints[0].mesh()

    async def _find_goodput(self, first: float) -> None:
        search = RateSearch(first, self.flags.attainment, self.flags.tolerance)
        self.search = search
        num_void = 0
        while (rate := search.next_rate()) is not None and num_void < MOST_VOID:
            run = await self._run(self.flags.load(rate))
            summary = summarize(run, self.flags.slo)
            if summary["void"]:
                num_void += 1  # once more; what this client cannot send it cannot judge
            else:
                num_void = 0
                search.add(rate, summary["attainment"])

    async def _run(self, load: Load) -> Run:
        workload = await self.plan(load)
        if not workload.asks:
            left_out = f", {workload.num_skipped} do not fit" if workload.num_skipped else ""
            raise CannotRun(
                f"no request of {workload.name} is left to be sent at {rate_text(workload.rate)}"
                f"{left_out}: give a longer --duration, or smaller --scale-lengths"
            )
        run = Run(workload, rate=workload.rate)
        self.runs.append(run)
        async with progress_of(run, self.progress, rate_text(load.rate)):
            await self._send(run)
        return run

    async def plan(self, load: Load) -> Workload:
        """Plan a run; a signal is heard meanwhile."""
        steps = planning(self.source, load, self._fit, is_to_be_sent=True)
        while (workload := next(steps)) is None:  # noqa: ASYNC110  it is made here
            await asyncio.sleep(0)
        return workload

    async def _send(self, run: Run) -> None:
        await run_open_loop(
            self._endpoints,
            run.workload,
            run=run,
            answer_within_s=self.flags.timeout,
            # New tokens in every run: no prefix cache shall know them from the run before.
            prompt_seed=secrets.randbits(32),
        )
