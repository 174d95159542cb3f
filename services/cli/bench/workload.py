"""What will be sent, when: planned as a whole before the first request, from a source and a seed.

Pure and open-loop: no answer changes an arrival. Lengths are in tokens; prompts.py makes tokens or
words of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Literal

from services.cli.bench.sources import Source, Trace
from services.sim.asks import BLOCK_TOKENS, Ask
from shared.errors import InvalidRequest

MOST_PROMPT_TOKENS: Final = 200_000_000
"""Of all prompts of a run, which are built before it begins: about 1 GB."""

MOST_REQUESTS: Final = 1_000_000
"""Of a run, each with a record of its own: another 1 GB."""

PLANNED_AT_ONCE: Final = 1000

Arrivals = Literal["auto", "poisson", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All requests of one run, in order of arrival. rate: as asked for, None = a trace's own.

    num_cut: requests made shorter by the limits. num_skipped: left out, for they do not fit into
    the model's context.
    """

    name: str
    asks: tuple[Ask, ...]
    rate: float | None = None
    block_tokens: int = BLOCK_TOKENS
    num_cut: int = 0
    num_skipped: int = 0
    arrivals: str = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much, how long, how bursty.

    rate: requests/s; None = the trace's own; infinity = all at once.
    duration_s: no arrivals after it. burstiness: shape of gamma-distributed gaps (1 = Poisson,
    smaller = burstier, infinity = a metronome). arrivals: 'trace' keeps the trace's pattern and
    stretches it to the rate, 'poisson' draws gaps, 'auto' is 'trace' for a source that has times.
    """

    rate: float | None = 1.0
    duration_s: float = math.inf
    num_requests: int | None = None
    burstiness: float = 1.0
    arrivals: Arrivals = "auto"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What lengths are made to fit. scale: factor of all lengths and of block sizes.

    max_input, max_output: longer ones are cut. max_total: context of the model; requests beyond it
    are left out, or cut if ``is_cut_to_context``.
    """

    scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None
    max_total: int | None = None
    is_cut_to_context: bool = False


AS_IT_COMES: Final = Fit()


def plan(source: Source, load: Load, fit: Fit = AS_IT_COMES) -> Workload:
    """Return the requests of one run: see ``planning``."""
    return next(filter(None, planning(source, load, fit)))


def planning(
    source: Source, load: Load, fit: Fit = AS_IT_COMES, *, is_to_be_sent: bool = False
) -> Iterator[Workload | None]:
    """Yield the requests of one run at last, and None now and then before: a million of them take a
    quarter of a minute. The same arguments give the same requests.

    Lengths and arrivals have generators of their own, so that one length stays what it is when the
    rate changes. Raises InvalidRequest: what is to be stretched to a rate comes at one instant, or
    what ``is_to_be_sent`` is more than a client's memory should hold.
    """
    keeps_times = isinstance(source, Trace) and load.arrivals != "poisson"
    factor = 1.0
    if keeps_times and load.rate is not None:
        factor = 0.0 if math.isinf(load.rate) else _rate_of(source, load, fit) / load.rate
    times = _times(load, random.Random(f"arrivals {load.seed}"))
    asks: list[Ask] = []
    num_cut = num_skipped = num_tokens = 0
    for num_read, ask in enumerate(source.asks(random.Random(f"lengths {load.seed}"))):
        if len(asks) == load.num_requests:
            break
        if num_read % PLANNED_AT_ONCE == PLANNED_AT_ONCE - 1:
            yield None
        fitted = _fitted(ask, fit)
        if fitted is None:
            num_skipped += 1
            continue
        due_s = ask.due_s * factor if keeps_times else next(times)
        if due_s >= load.duration_s:
            break
        asks.append(replace(fitted, due_s=due_s))
        num_tokens += fitted.num_input
        if is_to_be_sent:
            _require_room(source.name, len(asks), num_tokens)
        wanted = (_scaled(ask.num_input, fit), _scaled(ask.num_output, fit))
        num_cut += (fitted.num_input, fitted.num_output) != wanted
    yield Workload(
        name=source.name,
        asks=tuple(asks),
        rate=load.rate,
        block_tokens=max(1, round(BLOCK_TOKENS * fit.scale)),
        num_cut=num_cut,
        num_skipped=num_skipped,
        arrivals="trace" if keeps_times else _gap_name(load),
    )


def _require_room(name: str, num_requests: int, num_tokens: int) -> None:
    """Raise InvalidRequest if these are more requests, or prompt tokens, than a client's memory
    should hold."""
    if num_requests > MOST_REQUESTS or num_tokens > MOST_PROMPT_TOKENS:
        raise InvalidRequest(
            f"{name}: one run has more than {MOST_REQUESTS:,} requests, or more than "
            f"{MOST_PROMPT_TOKENS:,} prompt tokens: send fewer (--rate, --requests, --duration) or "
            "shorter ones (--scale-lengths)"
        )


def _rate_of(source: Source, load: Load, fit: Fit) -> float:
    """Return the mean rate of those requests of a trace that are sent, in requests/s."""
    asks = source.asks(random.Random(f"lengths {load.seed}"))
    sent = (ask.due_s for ask in asks if _fitted(ask, fit) is not None)
    times = list(islice(sent, load.num_requests))
    if len(times) > 1 and not times[-1]:
        raise InvalidRequest(
            f"{source.name}: its first {len(times)} requests come at one instant: there is no rate "
            "that --rate could stretch"
        )
    return len(times) / times[-1] if times and times[-1] else 1.0


def _scaled(num_tokens: int, fit: Fit) -> int:
    return max(1, round(num_tokens * fit.scale))


def _fitted(ask: Ask, fit: Fit) -> Ask | None:
    """The request as it can be sent, None if it cannot."""
    num_input, num_output = _scaled(ask.num_input, fit), _scaled(ask.num_output, fit)
    num_input = min(num_input, fit.max_input or num_input)
    num_output = min(num_output, fit.max_output or num_output)
    if fit.max_total is not None and num_input + num_output > fit.max_total:
        if not fit.is_cut_to_context:
            return None
        # The answer keeps at most half of the context, the prompt gets the rest.
        num_output = max(1, min(num_output, fit.max_total // 2))
        num_input = max(1, fit.max_total - num_output)
    return replace(ask, num_input=num_input, num_output=num_output)


def _times(load: Load, rng: random.Random) -> Iterator[float]:
    rate = 1.0 if load.rate is None else load.rate
    at = 0.0
    while True:
        if not math.isinf(rate):
            is_even = math.isinf(load.burstiness)
            scale = 1 / rate if is_even else 1 / (rate * load.burstiness)
            at += scale if is_even else rng.gammavariate(load.burstiness, scale)
        yield at


def _gap_name(load: Load) -> str:
    if load.rate is not None and math.isinf(load.rate):
        return "all at once"
    if load.burstiness == 1:
        return "poisson"
    return "even" if math.isinf(load.burstiness) else f"gamma, shape {load.burstiness:g}"
