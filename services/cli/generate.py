"""``pdmesh generate``: a prompt to a running gateway, its answer as it streams, and the receipt."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

import orjson
from cyclopts import Group, Parameter

from services.cli.client import LOCAL_GATEWAY, GatewayRefused, RunningGateway, refusal, unreachable
from services.cli.flags import CannotRun, require
from services.cli.interrupts import run_interruptible
from services.cli.receipt import receipt_table
from services.cli.sources import OUTPUT
from services.cli.spoken import ONLY_THOUGHT, SpokenAnswer
from services.cli.words import plain_console
from shared.errors import InvalidRequest, WorkerLost

MAX_EVENT_BYTES = 4 << 20

_SAMPLING = Parameter(group=Group("Sampling", sort_key=1))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a request says of its answer's tokens, under the names of OpenAI's fields."""

    max_tokens: Annotated[int | None, _SAMPLING] = None
    """Longest answer; default: what the gateway allows."""

    temperature: Annotated[float | None, _SAMPLING] = None
    """0 = always the likeliest token; default: the model's."""

    seed: Annotated[int | None, _SAMPLING] = None
    """Makes sampling repeatable."""


USUAL: Final = Sampling()


@dataclass(slots=True)
class Answer:
    """What has come so far."""

    text: str = ""
    thought: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    receipt: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_only_thought(self) -> bool:
        """Whether it ended before there was a text."""
        return bool(self.thought) and not self.text.strip() and self.finish_reason == "length"


def generate(
    prompt: Annotated[str | None, Parameter(show_env_var=False, show_default=False)] = None,
    /,
    *,
    chat: Annotated[bool, Parameter(negative="--raw", group=_SAMPLING.group)] = True,
    sampling: Sampling = USUAL,
    gateway: RunningGateway = LOCAL_GATEWAY,
    receipt: Annotated[bool, Parameter(group=OUTPUT)] = True,
) -> int:
    """Send a prompt to a running gateway and print the answer as it comes.

    The text goes to stdout, the receipt (where the time went) to stderr.

    Parameters
    ----------
    prompt
        The prompt; default: all of stdin.
    chat
        Ask as a chat message, or with --raw continue the text.
    receipt
        Show where the time went.
    """
    if prompt is None:
        require(not sys.stdin.isatty(), "give a PROMPT, or pipe one in")
    text = sys.stdin.read() if prompt is None else prompt
    require(bool(text.strip()), "the prompt is empty: say something")
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {**asdict(sampling), **asked}

    async def main() -> None:
        answer = Answer()
        with SpokenAnswer() as spoken:
            await stream_answer(gateway, body, answer, spoken.say, spoken.think)
        err = plain_console(stderr=True)
        if answer.is_only_thought:
            err.print(ONLY_THOUGHT, soft_wrap=True)
        if receipt and answer.receipt:
            err.print(receipt_table(answer.receipt, answer.usage))

    return run_interruptible(main)


async def stream_answer(
    gateway: RunningGateway,
    body: Mapping[str, Any],
    answer: Answer,
    show: Callable[[str], None] = lambda piece: None,
    think: Callable[[str], None] = lambda piece: None,
) -> None:
    """Fill ``answer`` in as it arrives; show each piece of its text, and of the thinking before.

    body: a chat body if it has messages, else one of completions.
    Raises CannotRun: nothing listens there, or it is no gateway. GatewayRefused: its own words.
    WorkerLost: the stream broke off. InvalidRequest: the body is no JSON.
    """
    import aiohttp

    path = "chat/completions" if "messages" in body else "completions"
    request = {key: value for key, value in body.items() if value is not None}
    options = {"include_usage": True, "include_receipt": True}
    request |= {"stream": True, "stream_options": options}
    try:
        content = json.dumps(request, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # bytes of another encoding, which came as surrogates, or a NaN
        raise InvalidRequest(f"a prompt must be UTF-8, and a number a number ({error})") from None
    headers = {"Content-Type": "application/json"}
    has_begun = False
    try:
        async with (
            # An event is a line, and aiohttp refuses one that is much longer than its buffer.
            gateway.access.session(read_bufsize=MAX_EVENT_BYTES) as session,
            session.post(gateway.address(f"/v1/{path}"), data=content, headers=headers) as response,
        ):
            if response.status != 200 or response.content_type != "text/event-stream":
                raise refusal(gateway.url, response.status, await response.content.read(1 << 16))
            async for line in response.content:
                event = line.strip().removeprefix(b"data:").strip()
                if event == b"[DONE]":
                    return
                if event and line.startswith(b"data:"):  # proxies send comments to keep it open
                    has_begun = True
                    _read(gateway.url, orjson.loads(event), answer, show, think)
        raise WorkerLost("the answer broke off: the gateway has gone")
    except orjson.JSONDecodeError:
        raise CannotRun(f"{gateway.url} is no pdmesh gateway: its events are not JSON") from None
    except aiohttp.ClientError as error:
        if has_begun:
            raise WorkerLost("the answer broke off: the gateway has gone") from None
        raise unreachable(gateway.url, error) from None


def _read(
    url: str,
    event: Any,
    answer: Answer,
    show: Callable[[str], None],
    think: Callable[[str], None],
) -> None:
    try:
        pieces = _pieces(event, answer)
    except (AttributeError, LookupError, TypeError):
        raise CannotRun(f"{url} answers in events that are not OpenAI's") from None
    for thought, text in pieces:
        if thought:
            answer.thought += thought
            think(thought)
        if text:
            answer.text += text
            show(text)


def _pieces(event: Any, answer: Answer) -> list[tuple[str, str]]:
    """Return the event's pieces of thinking and text; all else that it says is in ``answer``."""
    if error := event.get("error"):
        if isinstance(error, str):  # as other servers say it
            raise GatewayRefused(error)
        raise GatewayRefused(str(error.get("message", error)), code=str(error.get("code") or ""))
    answer.usage = {**(event.get("usage") or answer.usage)}
    answer.receipt = {**(event.get("receipt") or answer.receipt)}
    pieces: list[tuple[str, str]] = []
    for choice in event.get("choices") or ():
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        of = choice.get("delta") or {} if "delta" in choice else {"content": choice.get("text")}
        thought = of.get("reasoning_content") or of.get("reasoning")  # the latter vLLM's
        pieces.append((str(thought or ""), str(of.get("content") or "")))
    return pieces
