"""Tokens of an answer, as they arrive together."""

from __future__ import annotations

from collections.abc import Sequence

from shared.request import AnswerToken, FinishReason


def answer_tokens(
    ids: Sequence[int], finish: FinishReason = FinishReason.NONE, *, first: int = 0
) -> list[AnswerToken]:
    """Return these ids as the tokens of an answer from position ``first`` on; ``finish`` is the
    last one's."""
    last = len(ids) - 1
    return [
        AnswerToken(first + index, token_id, finish if index == last else FinishReason.NONE)
        for index, token_id in enumerate(ids)
    ]
