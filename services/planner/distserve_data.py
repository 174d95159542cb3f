"""The files of DistServe's simulator: requests with what they felt, coefficients, KV capacities."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from services.planner.rows import DataError, count, first_of, number, read_json, read_rows
from services.sim.baselines.distserve import DECODE_CAP_TOKENS, Arrival, Instance, Latency
from services.sim.baselines.distserve_times import Coefficients, Degree
from shared.errors import InvalidRequest

System = Literal["distserve", "vllm"]

REQUEST_COLUMNS: Final = ("req_id", "arrival_s", "prompt_len", "output_len")
LATENCY_COLUMNS: Final = Latency._fields
DECIMALS: Final = (4, 4, 6)
"""Of the latency columns, as printed."""

MOST_TOKENS: Final = 10_000_000
MOST_SPAN_S: Final = 1e8
"""From the first arrival to the last: later, a float has no room for the printed decimals."""


@dataclass(frozen=True, slots=True)
class GivenRequest(Arrival):
    """One line of a requests file; ``felt`` if it has the columns of an earlier run."""

    line: int
    req_id: str
    arrival_s: str
    felt: Latency | None


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
        profile = first_of(
            folder,
            f"ref_distserve_profile_a100_80g_{system}.json",
            f"profiler-a100-80g.{system}.json",
        )
        self._profile_path = profile
        self._profile = {
            name.rpartition("/")[2].lower(): v for name, v in read_json(profile).items()
        }
        self._capacity_path = first_of(
            folder, "ref_distserve_max_num_tokens.csv", "max_num_tokens.csv"
        )
        self._capacities: dict[str, dict[Degree, int]] = {}
        columns = ("model", "tp", "pp", "max_num_tokens")
        for line, row in read_rows(self._capacity_path, columns):
            where = f"{self._capacity_path}:{line}"
            degree = Degree(count(where, row, "tp"), count(where, row, "pp"))
            name = row["model"].strip().rpartition("/")[2].lower()
            capacity = count(where, row, "max_num_tokens")
            self._capacities.setdefault(name, {})[degree] = capacity

    @property
    def models(self) -> list[str]:
        """Names of the models that have both coefficients and capacities."""
        return sorted(self._profile.keys() & self._capacities.keys())

    def degrees(self, model: str) -> list[Degree]:
        """What ``model`` can run at here."""
        fits = self._fits(model)
        degrees = self._capacities[model]
        return sorted((d for d in degrees if str(d.tp) in fits), key=lambda d: (d.tp, d.pp))

    def phase(self, model: str, degree: Degree) -> Instance:
        """Return an instance. Raises InvalidRequest: not among ``models``, ``degrees``."""
        fits = self._fits(model)
        if degree not in self._capacities[model]:
            raise InvalidRequest(
                f"{model} does not run at {degree}: {self._capacity_path.name} has no such row; "
                f"known: {', '.join(f'{d.tp},{d.pp}' for d in self.degrees(model))}"
            )
        if str(degree.tp) not in fits:
            raise InvalidRequest(
                f"{self._profile_path.name} has no coefficients of {model} at tp {degree.tp}; "
                f"it has tp {', '.join(sorted(fits, key=int))}"
            )
        fit = fits[str(degree.tp)]
        try:
            coefficients = Coefficients(
                _triple(fit["prefill"]),
                _triple(fit["decoding_smallbs"]),
                _triple(fit["decoding_largebs"]),
                int(fit["decoding_large_small_bs_threshold"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{self._profile_path}: {model} at tp {degree.tp} is damaged: {error!r}"
            ) from None
        return Instance(degree, coefficients, self._capacities[model][degree])

    def _fits(self, model: str) -> dict[str, Any]:
        if model not in self.models:
            raise InvalidRequest(f"--model must be {' or '.join(self.models)}, not {model!r}")
        return cast("dict[str, Any]", self._profile[model])


def _triple(values: Any) -> tuple[float, float, float]:
    a, b, c = map(float, values)
    return a, b, c


def read_requests(path: Path) -> list[GivenRequest]:
    """Return the requests of a file, by arrival; the first arrives at 0.

    Raises DataError: a damaged line, or one that arrives before its predecessor.
    """
    requests: list[GivenRequest] = []
    last_s, at_ms = 0.0, 0.0
    for line, row in read_rows(path, REQUEST_COLUMNS):
        where = f"{path}:{line}"
        arrival_s = number(where, row, "arrival_s")
        if requests:
            if arrival_s < last_s:
                raise DataError(f"{where}: arrives at {arrival_s:g} s, before the line above")
            # Added up from gaps, as theirs: equal times stay equal, bit for bit.
            at_ms += (arrival_s - last_s) * 1000
        last_s = arrival_s
        if at_ms > MOST_SPAN_S * 1000:
            raise DataError(f"{where}: arrives more than {MOST_SPAN_S:g} s after the first")
        prompt, output = (
            count(where, row, name, least=least)
            for name, least in (("prompt_len", 1), ("output_len", 0))
        )
        if max(prompt, output) > MOST_TOKENS:
            raise DataError(f"{where}: more than {MOST_TOKENS} tokens")
        felt = None
        if all(row.get(name, "").strip() for name in LATENCY_COLUMNS):
            felt = Latency(*(number(where, row, name) for name in LATENCY_COLUMNS))
        requests.append(
            GivenRequest(at_ms, prompt, output, line, row["req_id"], row["arrival_s"], felt)
        )
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
    writer.writerow((*REQUEST_COLUMNS, *LATENCY_COLUMNS))
    for it, latency in zip(requests, latencies, strict=True):
        asked = (it.req_id, it.arrival_s, it.prompt_len, it.output_len)
        writer.writerow((*asked, *printed(latency)))
    return out.getvalue()
