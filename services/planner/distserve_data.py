"""The files of DistServe's simulator: requests with what they felt, coefficients, KV capacities."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from services.planner.rows import DataError, first_of, read_json, read_rows
from services.sim.baselines.distserve import DECODE_CAP_TOKENS, Arrival, Instance, Latency
from services.sim.baselines.distserve_times import Coefficients, Degree
from shared.errors import InvalidRequest

System = Literal["distserve", "vllm"]

LATENCY_COLUMNS: Final = Latency._fields
DECIMALS: Final = (4, 4, 6)
"""Of the latency columns, as printed."""

MOST_TOKENS: Final = 10_000_000
MOST_SPAN_S: Final = 1e8
"""From the first arrival to the last: later, a float has no room for the printed decimals."""


class RequestRow(msgspec.Struct):
    """One line of a requests file; the last three are of an earlier run. arrival_s: as written."""

    req_id: str
    arrival_s: str
    prompt_len: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    output_len: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    ttft_ms: float | None = None
    decode_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError: it arrives at no time."""
        if not 0 <= float(self.arrival_s) < math.inf:
            raise ValueError(f"arrival_s must be at least 0, not {self.arrival_s!r}")


@dataclass(frozen=True, slots=True)
class GivenRequest(Arrival):
    line: int
    row: RequestRow

    @property
    def felt(self) -> Latency | None:
        """What it felt in an earlier run, if the file says so."""
        felt = (self.row.ttft_ms, self.row.decode_ms, self.row.tpot_ms)
        # Their time an output token is nan where there is none.
        is_said = all(it is not None and math.isfinite(it) for it in felt)
        return Latency(*felt) if is_said else None  # type: ignore[arg-type]


class _CapacityRow(msgspec.Struct):
    model: str
    tp: int
    pp: int
    max_num_tokens: Annotated[int, msgspec.Meta(ge=1)]


def read_degree(flag: str, text: str) -> Degree:
    """Return what ``TP,PP`` says. Raises InvalidRequest."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*", text)
    if match is None:
        raise InvalidRequest(
            f"{flag} must be TP,PP (tensor and pipeline parallelism, such as 2,1), not {text!r}"
        )
    return Degree(int(match[1]), int(match[2]))


class DistServeData:
    """Coefficients and capacities of one system. Raises DataError, InvalidRequest."""

    def __init__(self, folder: Path, system: System) -> None:
        self.system: System = system
        self._profile = first_of(
            folder,
            f"ref_distserve_profile_a100_80g_{system}.json",
            f"profiler-a100-80g.{system}.json",
        )
        found = read_json(self._profile, dict[str, dict[int, Coefficients]])
        self._fits = {_short(name): fits for name, fits in found.items()}
        self._capacity_path = first_of(
            folder, "ref_distserve_max_num_tokens.csv", "max_num_tokens.csv"
        )
        self._capacities: dict[str, dict[Degree, int]] = {}
        for _, row in read_rows(self._capacity_path, _CapacityRow):
            of_model = self._capacities.setdefault(_short(row.model), {})
            of_model[Degree(row.tp, row.pp)] = row.max_num_tokens

    @property
    def models(self) -> list[str]:
        """Names of the models that have both coefficients and capacities."""
        return sorted(self._fits.keys() & self._capacities.keys())

    def degrees(self, model: str) -> list[Degree]:
        """What ``model`` can run at here."""
        fits = self._fits_of(model)
        degrees = self._capacities[model]
        return sorted((d for d in degrees if d.tp in fits), key=lambda d: (d.tp, d.pp))

    def phase(self, model: str, degree: Degree) -> Instance:
        """Return an instance. Raises InvalidRequest: not among ``models``, ``degrees``."""
        fits = self._fits_of(model)
        if degree not in self._capacities[model]:
            raise InvalidRequest(
                f"{model} does not run at {degree}: {self._capacity_path.name} has no such row; "
                f"known: {', '.join(f'{d.tp},{d.pp}' for d in self.degrees(model))}"
            )
        if degree.tp not in fits:
            raise InvalidRequest(
                f"{self._profile.name} has no coefficients of {model} at tp {degree.tp}; "
                f"it has tp {', '.join(map(str, sorted(fits)))}"
            )
        return Instance(degree, fits[degree.tp], self._capacities[model][degree])

    def _fits_of(self, model: str) -> dict[int, Coefficients]:
        if not self.models:
            raise DataError(
                f"{self._profile} and {self._capacity_path.name} have no model in common"
            )
        if model not in self.models:
            raise InvalidRequest(f"--model must be {' or '.join(self.models)}, not {model!r}")
        return self._fits[model]


def _short(name: str) -> str:
    """Without whose model it is."""
    return name.rpartition("/")[2].lower()


def read_requests(path: Path) -> list[GivenRequest]:
    """Return the requests of a file, by arrival; the first arrives at 0.

    Raises DataError: a damaged line, or one that arrives before its predecessor.
    """
    requests: list[GivenRequest] = []
    last_s, at_ms = 0.0, 0.0
    for line, row in read_rows(path, RequestRow):
        where, arrival_s = f"{path}:{line}", float(row.arrival_s)
        if requests:
            if arrival_s < last_s:
                raise DataError(f"{where}: arrives at {arrival_s:g} s, before the line above")
            # Added up from gaps, as theirs: equal times stay equal, bit for bit.
            at_ms += (arrival_s - last_s) * 1000
        last_s = arrival_s
        if at_ms > MOST_SPAN_S * 1000:
            raise DataError(f"{where}: arrives more than {MOST_SPAN_S:g} s after the first")
        requests.append(GivenRequest(at_ms, row.prompt_len, row.output_len, line, row))
    if not requests:
        raise DataError(f"{path} holds no request")
    return requests


def check_sizes(path: Path, requests: Sequence[GivenRequest], prefill: Instance) -> None:
    """Raises DataError: a request that no batch can take, and that would wait for ever."""
    for request in requests:
        num_prompt, num_output = request.prompt_len, request.output_len
        if num_prompt > prefill.capacity:
            raise DataError(
                f"{path}:{request.line}: a prompt of {num_prompt} tokens is more than the "
                f"{prefill.capacity} that {prefill.degree} holds: it would wait for ever"
            )
        if num_output and num_prompt + num_output > DECODE_CAP_TOKENS:
            raise DataError(
                f"{path}:{request.line}: {num_prompt} + {num_output} tokens are "
                f"more than the {DECODE_CAP_TOKENS} of one decode batch: it would wait for ever"
            )


def printed(latency: Latency) -> Latency:
    """Return a latency as the files have it, rounded."""
    return Latency(*map(round, latency, DECIMALS))


def results_text(requests: Sequence[GivenRequest], latencies: Sequence[Latency]) -> str:
    """Return the CSV of a run: the columns of the requests, and what each felt."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(RequestRow.__struct_fields__)
    for it, latency in zip(requests, latencies, strict=True):
        asked = (it.row.req_id, it.row.arrival_s, it.prompt_len, it.output_len)
        writer.writerow((*asked, *printed(latency)))
    return out.getvalue()
