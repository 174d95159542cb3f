"""``pdmesh generate``: a prompt to a running gateway, its answer as it streams, and the receipt."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import orjson
from cyclopts import Group, Parameter
from rich.console import Console

from services.cli.flags import CannotRun, require
from services.cli.interrupts import Interrupts
from services.cli.receipt import receipt_table
from shared.errors import MeshError, WorkerLost
from shared.runtime.service import EXIT_OK

MAX_EVENT_BYTES = 4 << 20
CONNECT_WITHIN_S = 10.0

_SAMPLING = Parameter(group=Group("Sampling", sort_key=1))
_GATEWAY = Parameter(group=Group("Gateway", sort_key=2))
_OUTPUT = Parameter(group=Group("Output", sort_key=3))


class Refused(MeshError):
    """The gateway answered with an error."""

    type = "refused"


@dataclass(slots=True)
class Answer:
    """What came beside the text."""

    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    receipt: dict[str, Any] = field(default_factory=dict[str, Any])


def generate(
    prompt: Annotated[str, Parameter(show_env_var=False, show_default=False)] = "",
    /,
    *,
    chat: Annotated[bool, Parameter(negative="--raw", group=_SAMPLING.group)] = True,
    max_tokens: Annotated[int | None, _SAMPLING] = None,
    temperature: Annotated[float | None, _SAMPLING] = None,
    seed: Annotated[int | None, _SAMPLING] = None,
    url: Annotated[str, _GATEWAY] = "http://127.0.0.1:8000",
    api_key: Annotated[str, _GATEWAY] = "",
    receipt: Annotated[bool, _OUTPUT] = True,
) -> int:
    """Send a prompt to a running gateway and print the answer as it comes.

    The text goes to stdout, the receipt (where the time went) to stderr.

    Parameters
    ----------
    prompt
        The prompt; default: all of stdin.
    chat
        Ask as a chat message, or with --raw continue the text.
    max_tokens
        Longest answer; default: what the gateway allows.
    temperature
        0 = always the likeliest token; default: the model's.
    seed
        Makes sampling repeatable.
    url
        The gateway; of a mesh that pdmesh up started, the URL that it printed.
    api_key
        API key of the gateway; better in PDMESH_API_KEY, where other users cannot see it.
    receipt
        Show where the time went.
    """
    require(
        urlsplit(url).scheme in ("http", "https"), "--url must be http://host:port", param="url"
    )
    if not prompt:
        require(not sys.stdin.isatty(), "give a PROMPT, or pipe one in", param="prompt")
    text = prompt or sys.stdin.read()
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}

    async def main() -> int:
        answer = Answer()
        has_begun = False
        try:
            async with aclosing(stream_answer(url, body, answer, api_key=api_key)) as pieces:
                async for piece in pieces:
                    has_begun = True
                    print(piece, end="", flush=True)
        finally:
            if has_begun:
                print(flush=True)
        if receipt and answer.receipt:
            console = Console(stderr=True)
            console.print(receipt_table(answer.receipt, answer.usage))
        return EXIT_OK

    interrupts = Interrupts()
    interrupts.at_once = lambda: os._exit(130)
    return interrupts.run(main)


async def stream_answer(
    url: str, body: Mapping[str, Any], answer: Answer, *, api_key: str = ""
) -> AsyncGenerator[str]:
    """Yield the text of one generation as it arrives and fill ``answer`` in.

    body: a chat body if it has messages, else one of completions.
    Raises CannotRun: nothing listens there, or it is no gateway. Refused: the gateway's own words.
    WorkerLost: the stream broke off.
    """
    import aiohttp

    path = "chat/completions" if "messages" in body else "completions"
    request = {key: value for key, value in body.items() if value is not None}
    options = {"include_usage": True, "include_receipt": True}
    request |= {"stream": True, "stream_options": options}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S)
    has_begun = False
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_EVENT_BYTES) as session,
            session.post(
                f"{url.rstrip('/').removesuffix('/v1')}/v1/{path}", json=request, headers=headers
            ) as response,
        ):
            if response.status != 200 or response.content_type != "text/event-stream":
                raise _refusal(url, response.status, await response.content.read(1 << 16))
            async for line in response.content:
                event = line.strip().removeprefix(b"data: ")
                if event == b"[DONE]":
                    return
                if event:
                    has_begun = True
                    for piece in _read(orjson.loads(event), answer):
                        yield piece
        raise WorkerLost("the answer broke off: the gateway has gone")
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        raise CannotRun(
            f"nothing answers at {url} ({_reason(error)}): start a mesh with `pdmesh up`, or say "
            "where one runs with --url"
        ) from None
    except aiohttp.ClientError as error:
        if has_begun:
            raise WorkerLost("the answer broke off: the gateway has gone") from None
        raise CannotRun(f"{url} does not answer as a gateway does ({_reason(error)})") from None


def _read(event: Any, answer: Answer) -> list[str]:
    if "error" in event:
        raise Refused(str(event["error"].get("message", event["error"])))
    answer.usage = event.get("usage") or answer.usage
    answer.receipt = event.get("receipt") or answer.receipt
    pieces: list[str] = []
    for choice in event.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        piece = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        if piece:
            pieces.append(piece)
    return pieces


def _refusal(url: str, status: int, body: bytes) -> MeshError:
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return CannotRun(f"{url} is no pdmesh gateway: it answered with HTTP status {status}")
    if status == 401:
        message += "; give it with --api-key or PDMESH_API_KEY"
    return Refused(message)


def _reason(error: BaseException) -> str:
    cause = getattr(error, "os_error", None)
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return str(error) or type(error).__name__
