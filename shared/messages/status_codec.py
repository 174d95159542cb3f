"""A worker's report, between its record and the wire."""

from __future__ import annotations

import math
from typing import Any

from shared import wire
from shared.ids import Incarnation, StreamId
from shared.messages.codec import ROLES, fields_of, is_duration, role_to_wire, told_s
from shared.messages.columns import pack_f32, pack_u64, unpack_f32, unpack_u64
from shared.predict.step_time import NO_FIT, StepFit
from shared.worker_status import WorkerStatus

_SAME = (
    *("pending_tokens", "num_waiting", "num_running", "num_prompts", "num_answers", "num_taken"),
    *("free_blocks", "reserved_blocks", "quarantined_blocks", "step_tokens", "batch_tokens"),
    "max_running",
    *("egress_bytes", "home_epoch", "home_order", "first_gateway"),
    "num_gateways",
)
"""What a report and its wire form call and hold alike."""

_TIMES = ("queue_s", "step_s", "dram_token_s", "ssd_token_s")
"""Likewise, but not believed unless something can take so long."""


def status_to_wire(status: WorkerStatus, seen: StreamId) -> wire.WorkerStatus:
    """Pack a report. seen: see ``WorkerStatus``, of the gateway that it is for."""
    # The same bytes as long as the same pairs are there: who reads them need not look again.
    paired = sorted(status.paired)
    return wire.WorkerStatus(
        **fields_of(status, (*_SAME, *_TIMES)),
        draining=status.is_draining,
        paired=pack_u64(paired),
        pair_speeds=pack_f32([status.speeds.get(it, 0.0) for it in paired]),
        seen_id=seen,
        home=wire.Role.UNSPECIFIED if status.home is None else role_to_wire(status.home),
        prompt_steps=_fit_to_wire(status.prompt_steps),
        answer_steps=_fit_to_wire(status.answer_steps),
    )


class StatusReader:
    """Reads one worker's reports; who is paired, and how fast, is unpacked where it has changed."""

    def __init__(self) -> None:
        self._columns = b"", b""
        self._paired: frozenset[Incarnation] = frozenset()
        self._speeds: dict[Incarnation, float] = {}

    def read(self, status: wire.WorkerStatus) -> WorkerStatus:
        """Unpack a report. Raises RemoteProtocolError."""
        columns = status.paired, status.pair_speeds
        if columns != self._columns:
            paired = [*map(Incarnation, unpack_u64(status.paired, name="paired"))]
            num_speeds = len(paired) if status.pair_speeds else 0
            speeds = unpack_f32(status.pair_speeds, count=num_speeds, name="pair_speeds")
            self._speeds = dict(zip(paired, map(_amount, speeds), strict=False))
            if status.paired != self._columns[0]:
                self._paired = frozenset(paired)
            self._columns = columns
        times: dict[str, Any] = {
            name: told_s(value) for name, value in fields_of(status, _TIMES).items()
        }
        return WorkerStatus(
            **fields_of(status, _SAME),
            **times,
            is_draining=status.draining,
            paired=self._paired,
            home=ROLES.get(status.home),
            prompt_steps=_fit_from_wire(status.prompt_steps),
            answer_steps=_fit_from_wire(status.answer_steps),
            speeds=self._speeds,
            seen=StreamId(status.seen_id),
        )


def _amount(value: float) -> float:
    """What is no amount is not believed: whoever reports it knows nothing."""
    return value if 0.0 <= value < math.inf else 0.0


def _fit_to_wire(fit: StepFit) -> wire.StepFit | None:
    return wire.StepFit(**fit._asdict()) if fit.num_steps else None


def _fit_from_wire(fit: wire.StepFit | None) -> StepFit:
    if fit is None:
        return NO_FIT
    coefficients = fit.constant_s, fit.token_s, fit.attended_s
    if not all(map(is_duration, coefficients)):
        return NO_FIT
    errors = _amount(fit.error_p50), _amount(fit.error_p90)
    ratio, largest = _amount(fit.mean_ratio) or 1.0, (fit.most_tokens, fit.most_attended)
    return StepFit(*coefficients, fit.num_steps, *errors, ratio, *largest)
