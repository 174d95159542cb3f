"""``pdmesh generate`` against a scripted gateway, its receipt, and what Ctrl-C does to a
command."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from services.cli.client import Access, GatewayRefused, RunningGateway
from services.cli.flags import CannotRun
from services.cli.generate import Answer, stream_answer
from services.cli.receipt import receipt_table
from services.cli.spoken import SpokenAnswer, print_piece
from services.gateway.core.routing.sides import AnswerTerms, PromptTerms
from services.gateway.front.auth import KeyRing, hash_key
from shared.errors import InvalidRequest, MeshError, WorkerLost
from shared.telemetry.lifetime import Receipt
from tests.support.scripted_mesh import ScriptedMesh, failing_after, http_gateway, saying

HI = {"messages": [{"role": "user", "content": "hi"}]}


async def said(url: str, body: dict[str, Any], **options: Any) -> tuple[str, Answer]:
    """Stream one answer to its end."""
    answer, pieces = Answer(), list[str]()
    await stream_answer(RunningGateway(url=url, **options), body, answer, pieces.append)
    assert answer.text == "".join(pieces)
    return answer.text, answer


@pytest.mark.parametrize("body", [HI, {"prompt": "hi"}])
@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
async def test_an_answer_is_text_usage_and_receipt(body: dict[str, Any], suffix: str) -> None:
    """Chat and raw; the URL as ``up`` prints it or as OpenAI's clients want it."""
    async with http_gateway(ScriptedMesh(saying("hello and the end"))) as url:
        text, answer = await said(url + suffix, body)
    assert text == "hello and the end"
    assert answer.finish_reason == "stop"
    assert answer.usage["completion_tokens"] > 0
    assert answer.receipt["ttft_s"] == 0.5


async def test_thinking_is_no_part_of_the_text() -> None:
    """It comes apart, under the name of most servers or under vLLM's own."""
    async with http_gateway(
        ScriptedMesh(saying("<think>hm</think>four")), reasoning_parser="think"
    ) as url:
        text, answer = await said(url, HI)
    assert (answer.thought, text, answer.is_only_thought) == ("hm", "four", False)
    async with http_gateway(ScriptedMesh(saying("<think>hm, hm")), reasoning_parser="think") as url:
        _, answer = await said(url, {**HI, "max_tokens": 9})
    assert (bool(answer.thought), answer.text, answer.is_only_thought) == (True, "", True)
    event = b'data: {"choices": [{"delta": {"reasoning": "hm"}}]}\n\ndata: [DONE]\n\n'

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event)
        return response

    async with serving(stream) as url:
        _, answer = await said(url, HI)
    assert answer.thought == "hm"


async def test_sampling_reaches_the_gateway_and_what_is_not_given_does_not() -> None:
    """None = the gateway's own default."""
    mesh = ScriptedMesh()
    async with http_gateway(mesh) as url:
        await said(url, {**HI, "seed": 5, "max_tokens": 2, "temperature": None})
    (request,) = mesh.requests
    assert (request.sampling.seed, request.sampling.max_tokens) == (5, 2)


async def test_a_refusal_is_the_gateways_own_words(tmp_path: Path) -> None:
    """With the remedy where a key is missing."""
    (tmp_path / "keys").write_text(hash_key("alice", "secret"))
    async with http_gateway(ScriptedMesh(), KeyRing(tmp_path / "keys")) as url:
        with pytest.raises(GatewayRefused, match="PDMESH_API_KEY"):
            await said(url, HI)
        with pytest.raises(GatewayRefused, match="max_tokens"):
            await said(url, {**HI, "max_tokens": -1}, access=Access(api_key="secret"))
        assert (await said(url, HI, access=Access(api_key="secret")))[0]


@pytest.mark.parametrize("wrong", [{"prompt": "Gr\udcfc"}, {**HI, "temperature": float("nan")}])
async def test_what_is_no_json_is_told_before_anybody_is_asked(wrong: dict[str, Any]) -> None:
    """In words of what was given; the gateway could only name a byte of the body."""
    with pytest.raises(InvalidRequest, match="must be UTF-8, and a number a number"):
        await said("http://127.0.0.1:1", wrong)


@pytest.mark.parametrize("key", ["secret\r", "two words", "ключ"])
async def test_a_key_that_no_header_takes_is_told(key: str) -> None:
    """Of a file with Windows' ends of lines, it made the gateway look like none."""
    with pytest.raises(InvalidRequest, match="visible ASCII"):
        await said("http://127.0.0.1:1", HI, access=Access(api_key=key))


async def test_an_error_in_mid_stream_is_told() -> None:
    """The status was 200 by then."""
    async with http_gateway(ScriptedMesh(failing_after("hello", WorkerLost("it died")))) as url:
        with pytest.raises(GatewayRefused, match="it died"):
            await said(url, HI)


async def test_something_that_is_no_gateway_is_called_so() -> None:
    """Another server on the port answers 200 with its own page, or cuts the stream."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(page) as url:
        with pytest.raises(CannotRun, match="no pdmesh gateway"):
            await said(url, HI)
    async with serving(cut) as url:
        with pytest.raises(WorkerLost, match="broke off"):
            await said(url, HI)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("[1]", "answers in events that are not OpenAI's"),
        ('{"choices": [5]}', "answers in events that are not OpenAI's"),
        ('{"choices": [], "receipt": [1]}', "answers in events that are not OpenAI's"),
        ('{"error": "out of memory"}', "out of memory"),
        ('{"choices": null, "usage": null, "error": null}', "broke off"),
        ('{"choices": [{"delta": null}]}', "broke off"),
    ],
)
async def test_events_of_another_server_are_told_in_words(event: str, words: str) -> None:
    """What it leaves empty is nothing; what is of another form ends with a line."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {event}\n\n".encode())
        return response

    async with serving(stream) as url:
        with pytest.raises(MeshError, match=words):
            await said(url, HI)


async def test_comments_between_events_are_none() -> None:
    """As proxies send them to keep a stream open; an event that is not JSON is told in words."""
    said_by_proxy = (
        b": keep-alive\n\n",
        b'data:{"choices": [{"text": "a"}]}\n\n',
        b"data: [DONE]\n\n",
    )

    def sending(*lines: bytes) -> Any:
        async def stream(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for line in lines:
                await response.write(line)
            return response

        return stream

    async with serving(sending(*said_by_proxy)) as url:
        assert (await said(url, {"prompt": "hi"}))[0] == "a"
    async with serving(sending(b"data: hello\n\n")) as url:
        with pytest.raises(CannotRun, match="not JSON"):
            await said(url, HI)


class serving:
    """Serve one handler for every path; gives the base URL."""

    def __init__(self, handler: Any) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        self._runner = web.AppRunner(application)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


def test_an_answer_speaks_to_people_and_not_to_their_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control characters are left out on a terminal, and kept for a file; all other spaces, and
    what joins letters, stay."""
    text = "a\x1b[2Jb\tc\nd\x07\x9bé\u00a0\u3000\u200d!"
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    print_piece(text)
    monkeypatch.setattr(out, "isatty", lambda: True)
    print_piece(text)
    assert out.getvalue() == text + "a[2Jb\tc\ndé\u00a0\u3000\u200d!"


def test_thinking_is_dim_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the text, on a line of its own, and as harmless; a file has the text alone."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())

    def speak() -> None:
        with SpokenAnswer() as spoken:
            spoken.think("h\x1b[2Jm")
            spoken.say("four")
            spoken.think("so")

    speak()
    assert (out.getvalue(), err.getvalue()) == ("four\n", "")
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(err, "isatty", lambda: True)
    speak()
    assert out.getvalue() == "four\n" + "\n\nfour\n" + "\n"
    assert "waiting" in err.getvalue()
    assert err.getvalue().endswith("\x1b[2mh[2Jm\x1b[0m\x1b[2mso\x1b[0m")


def test_a_receipt_is_a_table_whose_phases_have_names() -> None:
    """What took no time before the workers is left out; what moved is told in words."""
    receipt = Receipt(
        prefill_s=0.02,
        handover_s=0.005,
        ttft_s=0.025,
        tpot_s=0.01,
        e2e_s=0.1,
        transfer_s=0.002,
        transfer_bytes=3 << 20,
        gb_per_s=1.57,
        lane="sysv",
        mode="layerwise",
        attempts=2,
        prefill="abcdef0123456789",
        decode="0123456789abcdef",
        prefill_pool="prompt",
        decode_pool="mixed",
        decision={
            "policy": "conductor",
            "prefill": {"score": 0.5, "terms": PromptTerms(0.1, 0.4, 8, True)._asdict()},
            "decode": {"score": 0.02, "terms": AnswerTerms(0.015, 0.0, 0.005, True)._asdict()},
        },
        output_tokens=9,
        errors=("worker_lost",),
    )
    out = io.StringIO()
    Console(file=out, width=130).print(receipt_table(receipt.as_dict(), {"prompt_tokens": 126}))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "prefill 20.0 ms computed the prompt and token 1" in lines
    assert "= first token 25.0 ms from arrival" in lines
    assert "KV transfer 2.0 ms 3.0 MiB prefill → decode, 1.6 GB/s (sysv, layerwise)" in lines
    assert "per token 10.0 ms 100 tokens/s" in lines
    assert "= all 100.0 ms 126 tokens in (0 cached), 9 out" in lines
    assert "attempts 2 worker_lost" in lines
    why = "prompt pool, conductor's score 0.5 = wait 0.1 + compute 0.4 s, 8 tokens cached"
    assert f"prefill worker abcdef {why}" in lines
    why = "step 0.015 + hand-over 0.005 s a token, by its load alone"
    assert f"decode worker 012345 mixed pool, conductor's score 0.02 = {why}" in lines
    assert not any(line.startswith("queue") for line in lines)
