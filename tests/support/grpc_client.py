"""A client of ``pdmesh.v1.Inference``: what it asks, and all that it gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared import wire
from shared.address import Address
from shared.errors import MeshError, without_frames
from shared.messages.columns import pack_u32, unpack_f32, unpack_u32
from shared.request import TokenLogprobs
from shared.rpc.methods import GENERATE
from shared.rpc.network import Network
from shared.rpc.status import RECEIPT_TRAILER
from tests.support.calls import open_call


@dataclass
class Answer:
    """What one client got. arrived_at: loop time of every token. prompt_logprobs: one per prompt
    token, if asked for. error: how the call failed."""

    token_ids: list[int] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish: int = 0
    usage: wire.Usage = field(default_factory=wire.Usage)
    receipt: dict[str, Any] = field(default_factory=dict)
    error: MeshError | None = None

    def take(self, reply: wire.GenerateResponse, now: float) -> None:
        """Take in one message; indices must be dense, and nothing follows the finish reason."""
        assert reply.first_index == len(self.token_ids), "an index is missing or came twice"
        assert not self.finish, "something came after the finish reason"
        ids = unpack_u32(reply.token_ids)
        self.token_ids += ids
        self.arrived_at += [now] * len(ids)
        self.text += reply.text
        self.finish = reply.finish_reason
        self.usage = reply.usage or self.usage
        if reply.logprobs:
            values = unpack_f32(reply.logprobs, count=len(ids))
            tops = [_pairs(entry) for entry in reply.top_logprobs] or [()] * len(ids)
            self.logprobs += [TokenLogprobs(*row) for row in zip(values, tops, strict=True)]
        for entry in reply.prompt_logprobs:
            (_, own), *top = _pairs(entry)
            self.prompt_logprobs.append(TokenLogprobs(own, tuple(top)))


def _pairs(entry: wire.TopLogprobs) -> tuple[tuple[int, float], ...]:
    ids = unpack_u32(entry.token_ids)
    return tuple(zip(ids, unpack_f32(entry.logprobs, count=len(ids)), strict=True))


async def ask(
    network: Network,
    address: Address,
    prompt: Sequence[int] | str,
    max_tokens: int = 16,
    *,
    timeout_s: float | None = None,
    terms: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    leave_after: int | None = None,
    on_token: Callable[[Answer], object] | None = None,
    **params: Any,
) -> Answer:
    """Ask for one greedy answer; its failure is in ``error``.

    prompt: token ids, or one user's message. terms: fields of the request beside its params.
    leave_after: hang up after so many tokens.
    """
    answer = Answer()
    loop = asyncio.get_running_loop()
    request = wire.GenerateRequest(
        params=wire.GenerateParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}),
        **(terms or {}),
    )
    if isinstance(prompt, str):
        request.messages = [wire.ChatMessage(role="user", content=prompt)]
    else:
        request.token_ids = pack_u32(prompt)
    async with network.channel(address) as channel:
        try:
            async with open_call(
                channel, GENERATE, timeout_s=timeout_s, metadata=metadata
            ) as stream:
                await stream.send(request, end=True)
                async for reply in stream:
                    num_before = len(answer.token_ids)
                    answer.take(reply, loop.time())
                    if on_token is not None and len(answer.token_ids) > num_before:
                        on_token(answer)
                    if leave_after is not None and len(answer.token_ids) >= leave_after:
                        return answer
                answer.receipt = json.loads(stream.trailers[RECEIPT_TRAILER])
        except MeshError as error:
            answer.error = without_frames(error)
    return answer
