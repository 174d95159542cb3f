"""The numbers of a gateway's answers, in Prometheus' terms: fed by every answer's timeline while it
runs.

All is counted in plain numbers, which become metrics when somebody scrapes (``tallies.py``). Names
follow vLLM's and SGLang's where they have the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from services.gateway.core.routing.routing import RouteDecision
from services.gateway.workers.timeline import AnswerWatcher, Transfer
from shared.telemetry.lifetime import TTFT_PHASES, Receipt
from shared.telemetry.tallies import Counts, Tallies

PHASE_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0,
)  # fmt: skip
TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
GAP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
ANSWER_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
)  # fmt: skip
TOKENS_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000
)  # fmt: skip


class AnswerMetrics(AnswerWatcher):
    def __init__(self, registry: CollectorRegistry) -> None:
        def tallies(name: str, text: str, buckets: Sequence[float], label: str = "") -> Tallies:
            name = f"pdmesh_gateway_{name}"
            return Tallies(name, text, buckets=buckets, label=label, registry=registry)

        def counts(name: str, text: str, *labels: str) -> Counts:
            return Counts(f"pdmesh_gateway_{name}", text, labels, registry=registry)

        self._time_to_first_token = tallies(
            "time_to_first_token_seconds",
            "Arrival of the request to its first token leaving the gateway",
            TTFT_BUCKETS,
        )
        self._predicted_ttft = tallies(
            "predicted_time_to_first_token_seconds",
            "The same as it was predicted when the answer was dispatched",
            TTFT_BUCKETS,
        )
        self._prediction_error = tallies(
            "time_to_first_token_prediction_error_ratio",
            "By what share the prediction was off, of the real one",
            ERROR_BUCKETS,
        )
        phase_seconds = tallies(
            "time_to_first_token_phase_seconds",
            "What the time to the first token was spent on; the phases add up to it",
            PHASE_BUCKETS,
            "phase",
        )
        self._phases = [phase_seconds.labels(name.removesuffix("_s")) for name in TTFT_PHASES]
        self._first_step = tallies(
            "first_step_seconds",
            "First token to second token: the rest of the transfer, and decode's first step",
            PHASE_BUCKETS,
        )
        self._time_per_output_token = tallies(
            "request_time_per_output_token_seconds",
            "Mean gap between an answer's tokens after the first",
            GAP_BUCKETS,
        )
        self._latency = tallies(
            "e2e_request_latency_seconds",
            "Arrival of the request to the end of its answer, whole answers only",
            ANSWER_BUCKETS,
        )
        self._prompt_length = tallies(
            "request_prompt_tokens", "Length of the prompts of begun answers", TOKENS_BUCKETS
        )
        self._answer_length = tallies(
            "request_generation_tokens", "Length of whole answers", TOKENS_BUCKETS
        )
        self._prompt_tokens = counts("prompt_tokens", "Prompt tokens of begun answers")
        self._cached_tokens = counts(
            "cached_tokens", "Those of them whose KV prefill found in its prefix cache"
        )
        self._cached_by_tier = counts(
            "cached_tokens_by_tier",
            "Prompt tokens of ended answers that prefill did not compute, by where they lay",
            "tier",
        )
        self._attempts = counts("attempts", "Dispatches to a pair of workers")
        self._reroutes = counts(
            "reroutes",
            "Attempts that failed and were followed by another, by what failed them",
            "error",
        )
        self._transfer_bytes = counts("transfer_bytes", "KV moved for answers", "lane")
        self._transfer_exposed = tallies(
            "transfer_exposed_seconds",
            "Token sampled until all KV was acknowledged: what no compute hid",
            PHASE_BUCKETS,
            "lane",
        )
        self._tokens = counts("generation_tokens", "Tokens sent to clients")
        self._gaps = tallies(
            "inter_token_latency_seconds",
            "Gap between two consecutive tokens of an answer",
            GAP_BUCKETS,
        )

    def first_token(
        self, now: float, *, ttft_s: float, prompt_tokens: int, cached_tokens: int
    ) -> None:
        self._time_to_first_token.observe(ttft_s)
        self._prompt_length.observe(prompt_tokens)
        self._prompt_tokens.add(prompt_tokens)
        self._cached_tokens.add(cached_tokens)
        self._tokens.add(1)

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        self._tokens.add(num_tokens)
        # Tokens that came together share their gap equally.
        self._gaps.observe(gap_s / num_tokens, num_tokens)

    def transferred(self, now: float, decision: RouteDecision, transfer: Transfer) -> None:
        self._transfer_bytes.add(transfer.num_bytes, transfer.lane)
        self._transfer_exposed.labels(transfer.lane).observe(transfer.exposed_s)

    def ended(self, now: float, receipt: Receipt, error: str) -> None:
        self._attempts.add(receipt.attempts)
        for tier, num_tokens in receipt.cached_by_tier.items():
            self._cached_by_tier.add(num_tokens, tier)
        # What failed beyond those was followed by no attempt: it ended the answer.
        for reason in receipt.errors[: max(0, receipt.attempts - 1)]:
            self._reroutes.add(1, reason)
        if receipt.ttft_s is not None:
            for histogram, seconds in zip(self._phases, receipt.ttft_phases, strict=True):
                histogram.observe(seconds)
            if receipt.predicted_ttft_s is not None:
                self._predicted_ttft.observe(receipt.predicted_ttft_s)
                error_s = abs(receipt.predicted_ttft_s - receipt.ttft_s)
                self._prediction_error.observe(error_s / max(receipt.ttft_s, 1e-6))
        if receipt.first_step_s is not None:
            self._first_step.observe(receipt.first_step_s)
        if receipt.tpot_s is not None:
            self._time_per_output_token.observe(receipt.tpot_s)
        if not error and receipt.e2e_s is not None:
            self._latency.observe(receipt.e2e_s)
            self._answer_length.observe(receipt.output_tokens)
