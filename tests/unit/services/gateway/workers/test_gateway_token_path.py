"""The way of a token: from a step's message to the client's socket, without waking a task where
that is not needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.core.lifecycle import Leg, Lifecycle
from services.gateway.core.routing.routing import RouteDecision
from services.gateway.http.connection import BUFFER_BYTES
from services.gateway.http.sse import EventStream
from services.gateway.text.detokenizer import AnswerText, StreamDetokenizer
from services.gateway.workers.delivery import DELIVERIES_A_TURN, Delivery
from services.gateway.workers.timeline import Transfer
from shared.errors import WorkerLost
from shared.request import AnswerToken, FinishReason, SamplingParams
from shared.telemetry.lifetime import Receipt
from tests.support.answer_tokens import answer_tokens
from tests.support.http_client import gateway, parse_events, post_bytes, raw_connection
from tests.support.scripted_mesh import ScriptedMesh, http_gateway, saying
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.virtual_loop import virtual_time

# --- the core -------------------------------------------------------------------------------------


def running() -> Lifecycle:
    """A request whose first token is out and whose second is next."""
    lifecycle = Lifecycle((1, 2), SamplingParams(max_tokens=8), max_attempts=2)
    assert lifecycle.dispatched() == 0
    lifecycle.granted(0)
    effects = lifecycle.token_arrived(0, Leg.PREFILL, AnswerToken(0, 50))
    assert effects == [AnswerToken(0, 50)]
    return lifecycle


def test_a_token_in_turn_is_the_clients() -> None:
    """The next attempt would begin after it."""
    lifecycle = running()
    for position, token_id in ((1, 51), (2, 52)):
        token = AnswerToken(position, token_id)
        assert lifecycle.token_arrived(0, Leg.DECODE, token) == [token]
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
def test_a_token_out_of_turn_is_not_handed_on(attempt: int, leg: Leg, position: int) -> None:
    """It waits, or nobody wants it."""
    lifecycle = running()
    assert lifecycle.token_arrived(attempt, leg, AnswerToken(position, 51)) == []
    assert lifecycle.num_output_tokens == 1


def test_tokens_that_came_early_keep_their_turn() -> None:
    """Both leave with the one that was missing."""
    lifecycle = running()
    assert lifecycle.token_arrived(0, Leg.DECODE, AnswerToken(2, 52)) == []
    tokens = (AnswerToken(1, 51), AnswerToken(2, 52))
    assert lifecycle.token_arrived(0, Leg.DECODE, tokens[0]) == [*tokens]


def test_a_decode_token_before_the_grant_waits_for_the_first() -> None:
    """It says that there is room; the answer begins with prefill's token all the same."""
    lifecycle = Lifecycle((1,), SamplingParams(max_tokens=8), max_attempts=2)
    lifecycle.dispatched()
    assert lifecycle.token_arrived(0, Leg.DECODE, AnswerToken(1, 51)) == []
    tokens = (AnswerToken(0, 50), AnswerToken(1, 51))
    assert lifecycle.token_arrived(0, Leg.PREFILL, tokens[0]) == [*tokens]


def test_nothing_is_handed_on_after_the_end() -> None:
    """A failed attempt's worker may still speak."""
    lifecycle = running()
    lifecycle.leg_failed(0, Leg.DECODE, WorkerLost("gone"), lost=True)
    assert lifecycle.token_arrived(0, Leg.DECODE, AnswerToken(1, 51)) == []


# --- delivery -------------------------------------------------------------------------------------


class Recipient:
    """Counts its deliveries. last_at: when its token before was there."""

    def __init__(self, last_at: float = 0.0, num_tokens: int = 1) -> None:
        self.count = 0
        self.is_due = False
        self.told = last_at, num_tokens

    def deliver(self, now: float) -> tuple[float, int]:
        self.is_due = False
        self.count += 1
        return self.told


class Watcher:
    """Writes down the gaps that it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[float, int, float]] = []

    def first_token(
        self, now: float, *, ttft_s: float, prompt_tokens: int, cached_tokens: int
    ) -> None: ...

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        self.told.append((now, num_tokens, gap_s))

    def transferred(self, now: float, decision: RouteDecision, transfer: Transfer) -> None: ...

    def ended(self, now: float, receipt: Receipt, error: str) -> None: ...


async def test_each_is_delivered_once_and_others_have_their_turn_between() -> None:
    """A large batch does not hold the loop: it is delivered in parts."""
    delivery = Delivery()
    recipients = [Recipient() for _ in range(2 * DELIVERIES_A_TURN + 1)]
    for recipient in recipients:
        delivery.due(recipient)
        delivery.due(recipient)
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
    answers = ((9.0, 1), (9.0, 1), (9.5, 1), (9.0, 1), (9.0, 2), (10.0, 0))
    for last_at, num_tokens in answers:
        delivery.due(Recipient(last_at, num_tokens))
    await asyncio.sleep(0)
    assert watcher.told == [(10.0, 3, 3.0), (10.0, 1, 0.5), (10.0, 2, 1.0)]


@virtual_time
async def test_what_is_over_is_delivered_at_once_and_not_again() -> None:
    """Its last token is told before its end."""
    watcher = Watcher()
    delivery = Delivery((watcher,))
    await asyncio.sleep(10.0)
    recipient = Recipient(9.0)
    delivery.due(recipient)
    delivery.deliver(recipient)
    assert watcher.told == [(10.0, 1, 1.0)]
    await asyncio.sleep(0)
    assert recipient.count == 1


# --- text and HTTP --------------------------------------------------------------------------------


def test_text_does_not_depend_on_how_tokens_are_cut() -> None:
    """Also within a character, and whether or not stop strings are looked for."""
    ids = tiny_tokenizer().encode("the \U0001f98a and é the", add_special_tokens=False).ids
    texts: list[str] = []
    for stop in ((), ("nowhere",)):
        whole = AnswerText(StreamDetokenizer(tiny_tokenizer()), stop=stop)
        cut = AnswerText(StreamDetokenizer(tiny_tokenizer()), stop=stop)
        texts.append(whole.feed(answer_tokens(ids, FinishReason.LENGTH)))
        *pieces, last = [ids[:2], *([one] for one in ids[2:])]
        text = "".join(cut.feed(answer_tokens(piece)) for piece in pieces)
        assert text + cut.feed(answer_tokens(last, FinishReason.LENGTH)) == texts[-1]
        assert cut.num_tokens == whole.num_tokens == len(ids)
        assert cut.has_stop is bool(stop)
    assert texts[0] == texts[1]


TEXT = "the and the and hello the end"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What leaves past the task that waits for the answer."""
    found: list[bytes] = []
    write_nowait = EventStream.write_nowait

    def looked_at(self: EventStream, data: bytes) -> None:
        found.append(data)
        write_nowait(self, data)

    monkeypatch.setattr(EventStream, "write_nowait", looked_at)
    return found


@pytest.mark.parametrize(
    ("more", "is_at_once"),
    [
        ({}, True),
        ({"stop": ["nowhere"]}, True),
        ({"logprobs": 1}, True),
        ({"n": 2}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_leaves_at_once_says_the_same(
    path: str, more: dict[str, Any], is_at_once: bool, written: list[bytes]
) -> None:
    """The answer is the one without streaming, whatever its chunks say; several answers at once
    meet in their task."""
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
    assert bool(written) is is_at_once
    assert events[-1] == "[DONE]"


async def test_a_client_of_http_1_0_gets_no_chunks(written: list[bytes]) -> None:
    """What leaves at once is framed as the rest of the response is: here not at all."""
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
        is_http11 = True

    request: Any = Request()
    events = EventStream(request, {})
    assert not events.has_room()
    transport: Any = Transport()
    events._transport = transport
    assert events.has_room()
    transport.size = BUFFER_BYTES
    assert not events.has_room()
