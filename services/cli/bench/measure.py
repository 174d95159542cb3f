"""One measurement: warm up, then one run, a sweep of runs, or a search for the goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console

from services.cli.bench.endpoints import Description, Endpoint, fit_of, open_endpoints
from services.cli.bench.open_loop import run_open_loop
from services.cli.bench.options import LoadFlags, RequestFlags, ServerFlags, SloFlags
from services.cli.bench.records import Run
from services.cli.bench.search import RateSearch
from services.cli.bench.summary import summarize
from services.cli.bench.view import progress_of, rate_text
from services.cli.bench.workload import Fit, Load, Source, plan
from services.cli.client import NO_ACCESS, Access
from services.cli.flags import CannotRun

MOST_VOID: Final = 3
"""Runs of a search at one rate, until it gives up: one hiccup of the machine shall not end it."""


@dataclass(slots=True)
class Measurement:
    """What the flags ask for, and what has been measured so far, whatever ends it."""

    urls: Sequence[str]
    source: Source
    load: LoadFlags
    requests: RequestFlags
    slo: SloFlags
    server: ServerFlags
    access: Access = NO_ACCESS
    runs: list[Run] = field(default_factory=list[Run])
    descriptions: list[Description] = field(default_factory=list[Description])
    search: RateSearch | None = None

    async def go(self, progress: Console) -> None:
        """Measure. Raises MeshError: a server cannot be used, or nothing is left to be sent."""
        server, requests = self.server, self.requests
        async with open_endpoints(
            self.urls,
            model=server.model,
            access=self.access,
            api=server.api,
            vocab=requests.vocab,
            ignore_eos=requests.ignore_eos,
        ) as endpoints:
            self.descriptions = [endpoint.description for endpoint in endpoints]
            fit = fit_of(
                endpoints,
                scale=requests.scale_lengths,
                max_input=requests.max_input,
                max_output=requests.max_output,
                is_cut_to_context=requests.is_cut_to_context,
            )
            loads = self.load.planned(self.source, requests.speed)
            await self._warm_up(endpoints, fit)
            if self.load.goodput:
                await self._find_goodput(endpoints, fit, loads[0].rate or 1.0, progress)
                return
            for load in loads:
                await self._run(endpoints, fit, load, progress)

    async def _warm_up(self, endpoints: Sequence[Endpoint], fit: Fit) -> None:
        """The first requests pay for what is made once: connections, kernels, pools."""
        if self.load.warmup:
            load = Load(rate=math.inf, num_requests=self.load.warmup, arrivals="poisson")
            await run_open_loop(
                endpoints,
                plan(self.source, load, fit),
                answer_within_s=self.server.timeout,
                prompt_seed=self.requests.seed_of_run(-1),
                vocab=self.requests.vocab,
                spread=self.server.spread,
            )

    async def _find_goodput(
        self, endpoints: Sequence[Endpoint], fit: Fit, first: float, progress: Console
    ) -> None:
        search = RateSearch(first, self.slo.attainment, self.slo.tolerance)
        self.search = search
        num_void = 0
        while (rate := search.next_rate()) is not None and num_void < MOST_VOID:
            run = await self._run(endpoints, fit, self.load.load(rate), progress)
            summary = summarize(run, self.slo.slo)
            if summary["void"]:
                num_void += 1  # once more; what this client cannot send it cannot judge
            else:
                num_void = 0
                search.add(rate, summary["attainment"])

    async def _run(
        self, endpoints: Sequence[Endpoint], fit: Fit, load: Load, progress: Console
    ) -> Run:
        workload = plan(self.source, load, fit)
        if not workload.asks:
            left_out = f", {workload.num_skipped} do not fit" if workload.num_skipped else ""
            raise CannotRun(
                f"no request of {workload.name} is left to be sent at {rate_text(load.rate)}"
                f"{left_out}: give a longer --duration, or smaller --scale-lengths"
            )
        run = Run(workload, rate=workload.rate)
        self.runs.append(run)
        async with progress_of(run, progress, rate_text(load.rate)):
            await run_open_loop(
                endpoints,
                workload,
                run=run,
                limit=self.load.concurrency_limit,
                answer_within_s=self.server.timeout,
                prompt_seed=self.requests.seed_of_run(len(self.runs)),
                vocab=self.requests.vocab,
                spread=self.server.spread,
            )
        return run
