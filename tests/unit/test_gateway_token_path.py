"""The fast path of a token: from a step's message to the client's socket without waking a task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.core.lifecycle import ArrivedToken, Emit, Leg, Lifecycle
from services.gateway.http.sse import BUFFER_BYTES, EventStream
from services.gateway.text.detokenizer import AnswerText, StreamDetokenizer
from services.gateway.workers.delivery import DELIVERIES_A_TURN, Delivery
from shared.errors import WorkerLost
from shared.request import FinishReason, SamplingParams
from shared.telemetry.lifetime import Receipt
from tests.support.http_client import gateway, parse_events, post_bytes, raw_connection
from tests.support.scripted_mesh import ScriptedMesh, http_gateway, saying
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.worker_mesh import virtual_time

# --- the core -------------------------------------------------------------------------------------


def running() -> Lifecycle:
    """A request whose first token is out and whose second is next."""
    lifecycle = Lifecycle((1, 2), SamplingParams(max_tokens=8), max_attempts=2)
    assert lifecycle.dispatched() == 0
    lifecycle.granted(0)
    effects = lifecycle.tokens_arrived(0, Leg.PREFILL, (ArrivedToken(0, 50),))
    assert effects == [Emit((ArrivedToken(0, 50),))]
    return lifecycle


def test_a_token_in_turn_is_taken_without_effects() -> None:
    """It counts as the client's: the next attempt would begin after it."""
    lifecycle = running()
    assert lifecycle.take_next(0, Leg.DECODE, 1, 51)
    assert lifecycle.take_next(0, Leg.DECODE, 2, 52)
    assert lifecycle.token_ids == (1, 2, 50, 51, 52)


@pytest.mark.parametrize(
    ("attempt", "leg", "position"),
    [
        (0, Leg.DECODE, 2),  # one is missing
        (0, Leg.DECODE, 0),  # it came before
        (1, Leg.DECODE, 1),  # an attempt to come
        (0, Leg.WHOLE, 1),  # a leg that there is not
    ],
)
def test_a_token_out_of_turn_is_not_taken(attempt: int, leg: Leg, position: int) -> None:
    """Nothing changes: ``tokens_arrived`` decides."""
    lifecycle = running()
    assert not lifecycle.take_next(attempt, leg, position, 51)
    assert lifecycle.num_output_tokens == 1


def test_no_token_is_taken_past_one_that_waits() -> None:
    """Tokens that came early keep their turn."""
    lifecycle = running()
    assert lifecycle.tokens_arrived(0, Leg.DECODE, (ArrivedToken(2, 52),)) == []
    assert not lifecycle.take_next(0, Leg.DECODE, 1, 51)
    tokens = (ArrivedToken(1, 51), ArrivedToken(2, 52))
    assert lifecycle.tokens_arrived(0, Leg.DECODE, tokens[:1]) == [Emit(tokens)]


def test_no_token_is_taken_before_decode_has_room() -> None:
    """Nor the very first one, which begins the answer."""
    lifecycle = Lifecycle((1,), SamplingParams(max_tokens=8), max_attempts=2)
    lifecycle.dispatched()
    assert not lifecycle.take_next(0, Leg.DECODE, 0, 50)
    lifecycle.granted(0)
    assert not lifecycle.take_next(0, Leg.DECODE, 0, 50)


def test_no_token_is_taken_after_the_end() -> None:
    """A failed attempt's worker may still speak."""
    lifecycle = running()
    lifecycle.leg_failed(0, Leg.DECODE, WorkerLost("gone"), lost=True)
    assert not lifecycle.take_next(0, Leg.DECODE, 1, 51)


# --- delivery -------------------------------------------------------------------------------------


class Recipient:
    """Counts its deliveries. last_at: when its token before was there."""

    def __init__(self, last_at: float = 0.0) -> None:
        self.count = 0
        self.is_due = False
        self.last_at = last_at
        self.stepped_at: list[float] = []
        self.stepped = self.step

    def step(self, now: float) -> float:
        self.stepped_at.append(now)
        last_at, self.last_at = self.last_at, now
        return last_at

    def deliver(self) -> None:
        self.is_due = False
        self.count += 1


class Watcher:
    """Writes down the gaps that it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[float, int, float]] = []

    def first_token(self, now: float, receipt: Receipt) -> None: ...

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        self.told.append((now, num_tokens, gap_s))

    def transferred(self, now: float, receipt: Receipt) -> None: ...

    def ended(self, now: float, receipt: Receipt, error: str) -> None: ...


async def test_each_is_delivered_once_and_others_have_their_turn_between() -> None:
    """A large batch does not hold the loop: it is delivered in parts."""
    delivery = Delivery()
    recipients = [Recipient() for _ in range(2 * DELIVERIES_A_TURN + 1)]
    for recipient in recipients:
        delivery.took(recipient)
        delivery.took(recipient)
    counts: list[int] = []
    for _ in range(4):
        await asyncio.sleep(0)
        counts.append(sum(recipient.count for recipient in recipients))
    assert counts == [DELIVERIES_A_TURN, 2 * DELIVERIES_A_TURN, len(recipients), len(recipients)]
    assert {recipient.count for recipient in recipients} == {1}


@virtual_time
async def test_gaps_of_a_whole_batch_are_told_together() -> None:
    """Tokens whose predecessors came at the same instant are told once; their gaps add up."""
    watcher = Watcher()
    delivery = Delivery((watcher,))
    await asyncio.sleep(10.0)
    recipients = [Recipient(last_at) for last_at in (9.0, 9.0, 9.5, 9.0)]
    for recipient in recipients:
        delivery.took(recipient)
        assert recipient.stepped_at == [10.0]
    await asyncio.sleep(0)
    assert watcher.told == [(10.0, 3, 3.0), (10.0, 1, 0.5)]


# --- text and HTTP --------------------------------------------------------------------------------


def test_plain_text_is_what_a_batch_would_give() -> None:
    """However the tokens are cut, also within a character."""
    ids = tiny_tokenizer().encode("the \U0001f98a and é the", add_special_tokens=False).ids
    whole = AnswerText(StreamDetokenizer(tiny_tokenizer()))
    cut = AnswerText(StreamDetokenizer(tiny_tokenizer()))
    assert cut.is_plain
    text = whole.feed(ids, FinishReason.NONE).text
    assert cut.feed_plain(ids[:2]) + "".join(cut.feed_plain([one]) for one in ids[2:]) == text
    assert cut.num_tokens == whole.num_tokens
    assert not AnswerText(StreamDetokenizer(tiny_tokenizer()), stop=("and",)).is_plain


TEXT = "the and the and hello the end"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What leaves by the fast path."""
    found: list[bytes] = []
    write_nowait = EventStream.write_nowait

    def looked_at(self: EventStream, data: bytes) -> None:
        found.append(data)
        write_nowait(self, data)

    monkeypatch.setattr(EventStream, "write_nowait", looked_at)
    return found


@pytest.mark.parametrize(
    ("more", "is_fast"),
    [
        ({}, True),
        ({"stop": ["nowhere"]}, False),
        ({"logprobs": 1}, False),
        ({"n": 2}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, False),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_fast_path_says_the_same(
    path: str, more: dict[str, Any], is_fast: bool, written: list[bytes]
) -> None:
    """Whether tokens take it or not, the answer is the one without streaming; it is taken where
    a chunk says nothing but text."""
    body: dict[str, Any] = {"temperature": 0, **more}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "a"}]
        if body.pop("logprobs", None):
            body["logprobs"] = True
    else:
        body["prompt"] = "a"
    async with gateway(ScriptedMesh(saying(TEXT, per_batch=1))) as client:
        response = await client.session.post(client.url + path, json={**body, "stream": True})
        events = parse_events(await response.read())
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice.get("delta")
            texts[choice["index"]] += choice["text"] if delta is None else delta.get("content", "")
    assert texts[0] == TEXT
    assert texts[1] == (TEXT if "n" in more else "")
    assert bool(written) is is_fast
    assert events[-1] == "[DONE]"


async def test_a_client_of_http_1_0_gets_no_chunks(written: list[bytes]) -> None:
    """The fast path frames as the rest of the response does: here not at all."""
    request = post_bytes("/v1/completions", {"prompt": "a", "stream": True, "temperature": 0})
    async with (
        http_gateway(ScriptedMesh(saying(TEXT, per_batch=1))) as url,
        raw_connection(url) as (reader, writer),
    ):
        writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        answer = await reader.read()
    assert written
    events = parse_events(answer.split(b"\r\n\r\n", 1)[1])
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == TEXT


async def test_a_full_stream_has_no_room() -> None:
    """Beyond the buffer's bound nothing goes past the task that waits for the client."""

    class Transport:
        size = 0

        def is_closing(self) -> bool:
            return False

        def get_write_buffer_size(self) -> int:
            return self.size

    class Request:
        version = (1, 1)
        transport = None

    request: Any = Request()
    events = EventStream(request, {})
    assert not events.has_room()
    transport: Any = Transport()
    events._transport = transport
    assert events.has_room()
    transport.size = BUFFER_BYTES
    assert not events.has_room()
