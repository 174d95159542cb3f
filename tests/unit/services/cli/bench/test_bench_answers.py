"""Streams of OpenAI's kind are read to the token, however they are cut and whatever they count."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.cli.bench.answers import AnswerReader, EventLines
from services.cli.bench.records import Ending, Record
from services.cli.bench.workload import Ask


def chunk(text: str | None = None, *, finish: str | None = None, **more: Any) -> bytes:
    """One chunk of a completion; without text it has no choice."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return json.dumps({"choices": choices, **more}).encode()


def usage(done: int) -> dict[str, int]:
    return {"prompt_tokens": 9, "completion_tokens": done}


def read(*payloads: bytes, until: bool = True) -> Record:
    """Read one payload a second."""
    record = Record(Ask(num_input=9, num_output=4), 0, 0.0)
    reader = AnswerReader(record)
    for at, payload in enumerate(payloads, 1):
        reader.take(payload, float(at))
    if until:
        reader.end()
    return record


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("prefix", [b"data: ", b"data:"])
def test_events_survive_any_cut(ending: bytes, prefix: bytes) -> None:
    """At every byte; comments and other fields are passed over."""
    wanted = [b'{"a":1}', b"[DONE]"]
    stream = b": ping\n\nevent: x\n" + b"".join(prefix + data + ending for data in wanted)
    for cut in range(len(stream) + 1):
        lines = EventLines()
        assert lines.feed(stream[:cut]) + lines.feed(stream[cut:]) == wanted


def test_counts_in_every_chunk_are_exact() -> None:
    """Several tokens of one chunk share its time; a chunk without new ones is none."""
    record = read(
        chunk("a", usage=usage(1)),
        chunk("bc", usage=usage(3)),
        chunk("", finish="length", usage=usage(4)),
        chunk(usage=usage(4)),
        b"[DONE]",
    )
    assert (record.end, record.num_output, record.num_prompt) == (Ending.COMPLETE, 4, 9)
    assert (list(record.times), record.counts, record.is_counted) == ([1, 2, 3], [1, 2, 1], True)
    assert record.outcome().token_times == [1, 2, 2, 3]
    assert record.outcome().itl_s == [1, 1]
    assert record.outcome().tpot_s == pytest.approx(2 / 3)


def test_a_count_at_the_end_is_spread_over_the_chunks() -> None:
    """Evenly, so that first and last token stay where they were."""
    record = read(
        *(chunk("x") for _ in range(4)), chunk("", finish="stop"), chunk(usage=usage(10)), b"[DONE]"
    )
    assert (record.num_output, record.counts, record.is_counted) == (10, [3, 2, 3, 2], False)
    assert record.outcome().e2e_s == 4.0


def test_a_count_in_the_last_chunk_alone_is_spread_too() -> None:
    """Some servers have it beside the finish reason; of a whole answer in one chunk it is exact."""
    record = read(chunk("x"), chunk("x", finish="stop", usage=usage(6)), b"[DONE]")
    assert (record.num_output, record.counts, record.is_counted) == (6, [3, 3], False)
    whole = read(chunk("xyz", finish="stop", usage=usage(3)), b"[DONE]")
    assert (whole.counts, whole.is_counted) == ([3], True)


def test_without_counts_a_chunk_is_a_token() -> None:
    """Of a chat, too; a chunk that only opens the answer is none."""
    opening = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}).encode()
    text = json.dumps({"choices": [{"delta": {"content": "a"}}]}).encode()
    thought = json.dumps({"choices": [{"delta": {"reasoning_content": "hm"}}]}).encode()
    record = read(opening, thought, text, b"[DONE]")
    assert (record.end, record.num_output, list(record.times)) == (Ending.COMPLETE, 2, [2, 3])


@pytest.mark.parametrize(
    ("payloads", "end"),
    [
        ((), Ending.FAILED),
        ((b"[DONE]",), Ending.FAILED),
        ((chunk("a"),), Ending.CUT),
        ((chunk("a"), b'{"error": {"message": "gone"}}'), Ending.CUT),
        ((b'{"error": {"message": "gone"}}',), Ending.FAILED),
        ((b'{"error": {"message": "busy", "code": 503}}',), Ending.REFUSED),
        ((b'{"error": "words"}',), Ending.FAILED),
        ((chunk("a", finish="stop"),), Ending.COMPLETE),
    ],
)
def test_how_an_answer_ended(payloads: tuple[bytes, ...], end: Ending) -> None:
    """Complete with an end; cut once it had begun, else failed or refused."""
    record = read(*payloads)
    assert record.end is end
    assert bool(record.error) == (end is not Ending.COMPLETE)


def test_what_is_not_json_is_an_error() -> None:
    """Never a token."""
    with pytest.raises(ValueError, match="malformed"):
        read(b"{oops")
    with pytest.raises(ValueError, match="object"):
        read(b"[1]")


def test_a_line_without_end_is_not_collected() -> None:
    """A broken server cannot fill our memory."""
    lines = EventLines()
    for _ in range(8):
        lines.feed(b"x" * (1 << 20))
    with pytest.raises(ValueError, match="does not end"):
        lines.feed(b"x")
