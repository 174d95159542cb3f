"""What a request can inflate beyond one message costs that request alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shared import wire
from shared.engine.fake import FakeModel
from shared.errors import Retry, TooLarge
from shared.ids import StreamId
from shared.messages import codec
from shared.messages.message_codec import MAX_MESSAGE_BYTES
from shared.request import (
    MAX_SALT_BYTES,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    WorkItem,
)
from shared.schedule.plan import NewToken
from shared.schedule.sequence import Sequence as TokenSequence
from shared.worker.door import EVENT_BYTES, GatewaySession
from tests.support.step_rows import step_tokens_from_wire
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import a_prompt, expected, worker_mesh

MANY = SamplingParams(max_tokens=3, prompt_logprobs=1000)
"""8,008 bytes a prompt token."""


@virtual_time
async def test_prompt_logprobs_beyond_one_message_fail_their_request_alone() -> None:
    """Refused before it is computed, with a typed error that no retry mends; its neighbour on the
    same session goes on."""
    prompt = a_prompt(200)
    async with (
        asyncio.timeout(60),
        worker_mesh(prefill_blocks=128, decode_blocks=128) as mesh,
    ):
        neighbour = mesh.start(prompt, 40)
        await neighbour.until(lambda r: r.token)
        too_long = mesh.start(a_prompt(600), sampling=MANY, request_id=b"t" * 16)
        with pytest.raises(TooLarge, match="600 prompt tokens") as caught:
            await too_long.finished()
        assert caught.value.retry is Retry.NEVER
        assert caught.value.param == "prompt_logprobs"
        assert mesh.prefills[0].worker.requests.num_prompts <= 1
        too_long.cancel_decode()
        assert await neighbour.finished() == expected(prompt, 40)
        assert mesh.gateway.sessions[mesh.prefills[0].incarnation].is_open


@pytest.mark.slow
@virtual_time
async def test_prompt_logprobs_just_below_the_limit_arrive() -> None:
    """Three such messages at once are no gateway that does not read."""
    prompts = [a_prompt(523, seed=i) for i in range(3)]
    async with (
        asyncio.timeout(60),
        worker_mesh(prefill_blocks=128, decode_blocks=128) as mesh,
    ):
        requests = [mesh.start(prompt, sampling=MANY) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            assert await request.finished() == expected(prompt, 3)
            assert request.token is not None
            assert len(bytes(request.token)) > 0.99 * MAX_MESSAGE_BYTES
            rows = codec.prefill_token_from_wire(request.token)[0].prompt_logprobs
            assert rows is not None
            assert len(rows[-1].top) == 1000


@virtual_time
async def test_no_prompt_is_longer_than_its_order_holds() -> None:
    """A model for longer ones is announced as one for just so many, so that the gateway refuses
    what it could not send; the longest order fits with all else that it may say."""
    async with worker_mesh(
        model=FakeModel(max_model_len=1 << 24), prefill_blocks=1 << 17, decode_blocks=1 << 17
    ) as mesh:
        for worker in (mesh.prefills[0], mesh.decodes[0]):
            model = mesh.gateway.workers[worker.incarnation].model
            assert model is not None
            assert model.max_model_len == codec.MAX_TOKENS
    sampling = SamplingParams(
        logit_bias=tuple((i, 1.0) for i in range(1000)), stop_token_ids=tuple(range(1000))
    )
    order = wire.WorkOrder(
        token_ids=bytes(4 * codec.MAX_TOKENS),
        sampling=codec.sampling_to_wire(sampling),
        request_id=bytes(16),
        cache_salt=bytes(MAX_SALT_BYTES),
        lease_token=bytes(16),
    )
    assert len(bytes(wire.WorkerCommand(order=order))) < MAX_MESSAGE_BYTES


class _Outbox(GatewaySession):
    """A session that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[wire.WorkerEvent] = []
        self.sizes: list[int] = []

    def send(self, event: wire.WorkerEvent, num_bytes: int = EVENT_BYTES) -> None:
        self.events.append(event)
        self.sizes.append(num_bytes)


def _say(rows: Sequence[tuple[StreamId, NewToken]]) -> _Outbox:
    outbox = _Outbox()
    outbox.step_tokens(rows)
    return outbox


def _rows(num_rows: int, logprobs: TokenLogprobs | None) -> list[tuple[StreamId, NewToken]]:
    item = WorkItem(token_ids=(1,), num_prompt_tokens=1, sampling=SamplingParams())
    sequence = TokenSequence(item)
    return [
        (StreamId(i), NewToken(sequence, i, i, FinishReason.NONE, logprobs, ()))
        for i in range(num_rows)
    ]


def test_a_step_with_more_logprobs_than_a_message_holds_is_cut() -> None:
    """No message is too large, every row comes once and in order, and sizes are what they say."""
    top = tuple((i, -1.0) for i in range(1024))
    outbox = _say(_rows(1200, TokenLogprobs(-0.5, top)))
    assert len(outbox.events) > 2
    seen: list[int] = []
    for event, num_bytes in zip(outbox.events, outbox.sizes, strict=True):
        assert len(bytes(event)) < MAX_MESSAGE_BYTES
        assert len(bytes(event)) == pytest.approx(num_bytes, rel=0.01)
        assert event.tokens is not None
        seen += [stream_id for stream_id, _ in step_tokens_from_wire(event.tokens)]
    assert seen == list(range(1200))


@pytest.mark.parametrize("logprobs", [None, TokenLogprobs(-0.5, ((1, -1.0),))])
def test_any_other_step_is_one_message(logprobs: TokenLogprobs | None) -> None:
    """Streaming costs a message a step, however many rows there are."""
    outbox = _say(_rows(4096, logprobs))
    (event,) = outbox.events
    assert event.tokens is not None
    assert len(step_tokens_from_wire(event.tokens)) == 4096
