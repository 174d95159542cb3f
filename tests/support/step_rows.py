"""A step's tokens row by row, as tests want to look at them; the gateway reads columns."""

from __future__ import annotations

from shared import wire
from shared.ids import StreamId
from shared.messages import codec
from shared.request import AnswerToken, FinishReason


def step_tokens_from_wire(step: wire.StepTokens) -> list[tuple[StreamId, AnswerToken]]:
    """Unpack and check one step's tokens."""
    ids, indices, token_ids, reasons, logprobs = codec.step_columns_from_wire(step)
    rows = zip(ids, indices, token_ids, reasons, logprobs or [None] * len(ids), strict=True)
    return [
        (StreamId(stream_id), AnswerToken(index, token_id, FinishReason(reason), logprob))
        for stream_id, index, token_id, reason, logprob in rows
    ]
