"""What a worker looks at before it takes a request: the same on prefill and decode. Pure.

Whether there is room in the pool is not asked here: that may be waited for.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.errors import DeadlinePassed, InvalidRequest, Overloaded, ShuttingDown
from shared.model_spec import ModelSpec
from shared.request import WorkItem


class Duty(NamedTuple):
    """How busy a worker is. role: its name in messages. num_held, max_held: requests in hand, and
    the bound on them."""

    role: str
    num_held: int
    max_held: int
    is_draining: bool


def require_admissible(
    item: WorkItem, spec: ModelSpec, duty: Duty, *, deadline_at: float | None, now: float
) -> None:
    """Refuse at once what cannot be taken.

    Raises ShuttingDown, Overloaded, DeadlinePassed, or InvalidRequest: the model cannot read it.
    """
    if duty.is_draining:
        raise ShuttingDown(f"this {duty.role} worker is draining")
    if duty.num_held >= duty.max_held:
        raise Overloaded(
            f"this {duty.role} worker has {duty.max_held} requests in hand already",
            code=f"{duty.role}_requests",
            retry_after_s=1.0,
        )
    if deadline_at is not None and deadline_at <= now:
        raise DeadlinePassed(f"the deadline passed before {duty.role} began")
    num_tokens, limit = len(item.token_ids), spec.max_model_len
    if num_tokens >= limit:
        raise InvalidRequest(
            f"{num_tokens} tokens leave no room for an answer: the model takes {limit}",
            param="prompt",
            code="context_length_exceeded",
        )
    if max(item.token_ids) >= spec.vocab_size:
        raise InvalidRequest(
            f"a token id is not below the vocabulary size {spec.vocab_size}", param="prompt"
        )
