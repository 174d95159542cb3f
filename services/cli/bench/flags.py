"""The flags of ``pdmesh bench``, what they must keep, and the plan that they ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import Group, Parameter, Token

from services.cli.bench.endpoints import Api
from services.cli.bench.sources import SHAPES, Source, Trace, fixed, read_trace
from services.cli.bench.workload import Arrivals, Fit, Load
from services.cli.flags import require
from services.cli.quantities import Seconds, TpotFlag, TtftFlag
from services.cli.sources import flag_of
from shared.errors import InvalidRequest
from shared.telemetry.definitions import Slo

DEFAULT_DURATION_S: Final = 30.0
SEARCH_REQUESTS: Final = 50
"""Fewest requests of a run of a search: attainment of fewer is mostly luck."""

MOST_SCALE: Final = 1000
LEAST_BURSTINESS: Final = 0.001
"""Gaps of a smaller shape are all 0, or no numbers."""


def _numbers(_: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    """'1,2,4'."""
    words = ",".join(token.value for token in tokens).replace(",", " ").split()
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        flag = tokens[0].keyword or "--rates"
        raise InvalidRequest(f"{flag} must be numbers like 1,2,4") from None


_load = Parameter(group=Group("Load", sort_key=1), show_env_var=False)
_work = Parameter(group=Group("Requests", sort_key=2), show_env_var=False)
_slo = Parameter(group=Group("SLO", sort_key=3), show_env_var=False)
_SERVER: Final = Group("Server", sort_key=4)
_server = Parameter(group=_SERVER, show_env_var=False)
_quiet = Parameter(show_default=False)
_ABOVE_0: Final = (
    *("duration", "requests", "scale_lengths", "input_len", "output_len"),
    *("max_input", "max_output", "timeout"),
)

UrlsFlag = Annotated[
    tuple[str, ...],
    Parameter(
        group=_SERVER,
        negative="",
        show_default=lambda urls: " ".join(urls),
        help="The server: http:// or https://. Given several times, they get requests in turn.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """What is sent, when, to whom, and what counts as good."""

    rate: Annotated[float | None, _load, _quiet] = None
    """Requests per second, 'inf' = all at once; default 1, or a trace's own. With a trace it
    stretches the trace's times."""

    rates: Annotated[
        tuple[float, ...], _load, _quiet, Parameter(converter=_numbers, n_tokens=1, negative="")
    ] = ()
    """A sweep: one run for each rate, 1,2,4."""

    goodput: Annotated[bool, _load, _quiet, Parameter(negative="")] = False
    """Find the highest rate that attains the SLO: doubling from --rate, then bisecting."""

    duration: Annotated[Seconds | None, _load, _quiet] = None
    """Arrivals of a run; default 30 s, or all of a trace at its own speed. Answers are waited
    for."""

    requests: Annotated[int | None, _load, _quiet] = None
    """Most requests of a run."""

    warmup: Annotated[int, _load] = 4
    """Requests before the first run, at once, which do not count."""

    burstiness: Annotated[float, _load] = 1.0
    """Shape of gamma-distributed gaps: 1 = Poisson, smaller = burstier, inf = even."""

    arrivals: Annotated[Arrivals, _load] = "auto"
    """Of a trace: its own, or Poisson with its lengths."""

    seed: Annotated[int, _load] = 0
    """Of lengths and arrivals; the same seed sends the same plan."""

    synthetic: Annotated[Literal["chat", "code", "mooncake", "fixed"], _work] = "chat"
    """Built-in lengths: chat and code as in Azure's traces of 2023, mooncake with the long shared
    prefixes of Mooncake's conversations, fixed with all alike."""

    input_len: Annotated[int | None, _work, _quiet] = None
    """Prompt tokens of 'fixed'; default 256."""

    output_len: Annotated[int | None, _work, _quiet] = None
    """Answer tokens of 'fixed'; default 64."""

    trace: Annotated[Path | None, _work, _quiet] = None
    """A trace file instead: Mooncake's JSONL or Azure's CSV."""

    scale_lengths: Annotated[float, _work] = 1.0
    """Factor of all lengths, for small models and machines; shared prefixes shrink with them."""

    max_input: Annotated[int | None, _work, _quiet] = None
    """Cut longer prompts; counted in the report."""

    max_output: Annotated[int | None, _work, _quiet] = None
    """Ask for shorter answers; counted in the report."""

    ignore_eos: Annotated[bool, _work] = True
    """Answers of exactly the planned length, where the server can; with --no-ignore-eos they end
    where the model ends them."""

    slo_ttft: Annotated[TtftFlag, _slo] = 0.5
    slo_tpot: Annotated[TpotFlag, _slo] = 0.05

    attainment: Annotated[float, _slo] = 0.9
    """Share of requests that must keep both, for --goodput."""

    tolerance: Annotated[float, _slo] = 0.1
    """How exact --goodput is, as a share of the rate."""

    model: Annotated[str, _server, _quiet] = ""
    """Name to ask for; default: the first that the server names."""

    api: Annotated[Api, _server] = "auto"
    """Which of OpenAI's; auto takes completions where they are served."""

    timeout: Annotated[Seconds, _server] = 600.0
    """Longest wait for the end of an answer."""

    def check(self) -> None:
        """Raise InvalidRequest, naming the flag."""
        rates = self.rates if self.rate is None else (*self.rates, self.rate)
        is_alone = not self.rates or (self.rate is None and not self.goodput)
        require(is_alone, "give --rates alone, without --rate or --goodput")
        require(all(rate > 0 for rate in rates), "a rate must be above 0/s")
        if any(math.isinf(rate) for rate in rates):
            require(self.requests is not None, "a rate of inf needs --requests")
            require(not self.goodput, "--goodput begins at a finite --rate")
        require(self.warmup >= 0, "--warmup must be 0 or more")
        require(0 < self.attainment <= 1, "--attainment must be in 0..1")
        require(0.001 <= self.tolerance < 1, "--tolerance must be 0.001..1")
        for name in _ABOVE_0:
            value: float | None = getattr(self, name)
            require(value is None or value > 0, f"{flag_of(name)} must be above 0")
        most = f"--scale-lengths must be at most {MOST_SCALE}"
        require(self.scale_lengths <= MOST_SCALE, most)
        least = f"--burstiness must be at least {LEAST_BURSTINESS:g}"
        require(self.burstiness >= LEAST_BURSTINESS, least)
        self._check_effect()

    def _check_effect(self) -> None:
        """Raise InvalidRequest for a flag that would change nothing."""
        is_fixed = self.synthetic == "fixed" and self.trace is None
        has_gaps = self.trace is None or self.arrivals == "poisson"
        is_at_once = all(math.isinf(rate) for rate in self.rates or (self.rate or 1.0,))
        for name, is_of_use, where in (
            ("input_len", is_fixed, "is of --synthetic fixed alone"),
            ("output_len", is_fixed, "is of --synthetic fixed alone"),
            ("synthetic", self.trace is None, "and --trace are two answers to one question"),
            ("burstiness", has_gaps, "is of drawn arrivals: give --arrivals poisson, too"),
            ("burstiness", not is_at_once, "is of gaps, and a rate of inf has none"),
            ("attainment", self.goodput, "is of --goodput alone"),
            ("tolerance", self.goodput, "is of --goodput alone"),
        ):
            is_given = getattr(self, name) != getattr(BenchFlags, name)
            require(is_of_use or not is_given, f"{flag_of(name)} {where}")
        is_there = self.trace is not None or self.arrivals != "trace"
        require(is_there, "--arrivals trace needs a --trace")

    def source(self) -> Source:
        """Return where lengths come from. Raises DataError."""
        if self.trace is not None:
            return read_trace(self.trace)
        if self.synthetic == "fixed":
            return fixed(self.input_len or 256, self.output_len or 64)
        return SHAPES[self.synthetic]

    def first_rates(self, source: Source) -> tuple[float | None, ...]:
        """Return the rate of each run, None for a trace's own; of a search the first."""
        plays_trace = isinstance(source, Trace) and self.arrivals != "poisson" and not self.goodput
        return self.rates or (self.rate or (None if plays_trace else 1.0),)

    def load(self, rate: float | None) -> Load:
        """Return the load of a run at a rate; a search runs long enough to judge."""
        duration_s = self.duration
        if duration_s is None:
            is_bounded = self.requests is not None or rate is None
            duration_s = math.inf if is_bounded else DEFAULT_DURATION_S
        if self.goodput and rate is not None:
            duration_s = max(duration_s, SEARCH_REQUESTS / rate)
        return Load(
            rate=rate,
            duration_s=duration_s,
            num_requests=self.requests,
            burstiness=self.burstiness,
            arrivals=self.arrivals,
            seed=self.seed,
        )

    @property
    def fit(self) -> Fit:
        """Drawn lengths are cut to the model's context, a file's requests left out."""
        return Fit(
            scale=self.scale_lengths,
            max_input=self.max_input,
            max_output=self.max_output,
            is_cut_to_context=self.trace is None,
        )

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft, self.slo_tpot)
