"""An OpenAI-compatible server under load: completions or chat, streamed over HTTP/1.1.

What a server understands beyond OpenAI's own API is found out by asking, from the richest form to
the plainest (``DIALECTS``): prompts of token ids, answers of a fixed length, counts in every chunk.
All in all a token costs about 19 µs of CPU at 10,000 tokens/s (docs/benchmarking.md), 12 of them in
aiohttp's reader on uvloop; a bare protocol took 7 instead, which is not worth a parser of our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from services.cli.bench.answers import REFUSALS, AnswerReader, EventLines
from services.cli.bench.prompts import DEFAULT_VOCAB, Prompts, one_prompt
from services.cli.bench.records import Ending, Record
from services.cli.bench.workload import AS_IT_COMES, Ask, Fit
from services.cli.client import NO_ACCESS, Access, CannotRun, GatewayRefused, RunningGateway
from shared.errors import MeshError

if TYPE_CHECKING:
    import aiohttp  # a third of a second: only a measurement loads it

Api = Literal["auto", "completions", "chat"]

CHAT_MARGIN: Final = 64
"""Tokens that a chat template may add."""

KEEPALIVE_S: Final = 2.0
"""Idle connections are closed by us before any server does, whose close could cross a request."""

PROBE_WITHIN_S: Final = 60.0
PROBE_INPUT: Final = 24
PROBE_OUTPUT: Final = 4

RECENT: Final = "/cluster/requests"
"""What a gateway tells of its last requests and its workers."""

OUR_LIMITS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_JSON: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What was found out about a server, for the report.

    prompts: 'token ids' or 'words'. counts: how tokens of a message are counted. max_model_len: 0 =
    unknown. is_length_fixed: whether it was asked for answers of exactly the planned length.
    """

    url: str
    api: str
    model: str
    max_model_len: int = 0
    prompts: str = "token ids"
    tokens_per_word: float = 1.0
    counts: str = "in every message"
    is_length_fixed: bool = True


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is asked of a server. usage: 'every' = in every chunk, 'last' = at the end, '' = not.

    takes_ids: prompts of token ids. fixes_length: ignore_eos and min_tokens.
    """

    api: str
    takes_ids: bool
    fixes_length: bool
    usage: str

    @property
    def path(self) -> str:
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"

    def body(self, model: str, prompts: Prompts, index: int, num_output: int) -> bytes:
        body: dict[str, Any] = {"model": model, "stream": True, "temperature": 0.0}
        if self.api == "completions":
            body["prompt"] = prompts.ids(index) if self.takes_ids else prompts.text(index)
        else:
            body["messages"] = [{"role": "user", "content": prompts.text(index)}]
        body["max_tokens"] = num_output
        if self.fixes_length:
            body |= {"ignore_eos": True, "min_tokens": num_output}
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.usage == "every":
            body["stream_options"]["continuous_usage_stats"] = True
        return orjson.dumps(body)


DIALECTS: Final = (
    Dialect("completions", True, True, "every"),
    Dialect("completions", True, False, "last"),
    Dialect("completions", False, True, "every"),
    Dialect("completions", False, False, "last"),
    Dialect("completions", False, False, ""),
    Dialect("chat", False, True, "every"),
    Dialect("chat", False, False, "last"),
    Dialect("chat", False, False, ""),
)
"""Tried in this order; the first that is answered is spoken."""


class ServerEndpoint:
    """One server under load. One task a request; connections are reused and never limited."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: RunningGateway,
        dialect: Dialect,
        description: Description,
    ) -> None:
        self._session = session
        self._server = server
        self._address = server.address(dialect.path)
        self._dialect = dialect
        self.description = description

    async def mesh(self) -> dict[str, Any] | None:
        """Return what a pdmesh gateway tells of its workers; None: it is no gateway of ours."""
        try:
            told = await self._server.call(self._session, RECENT, limit_s=PROBE_WITHIN_S)
            return {**told, "requests": []}
        except (MeshError, TypeError):
            return None

    def prepare(self, prompts: Prompts, index: int) -> bytes:
        """Return request ``index`` ready to be sent; called before the run."""
        ask = prompts.workload.asks[index]
        return self._dialect.body(self.description.model, prompts, index, ask.num_output)

    async def answer(self, request: bytes, record: Record) -> None:
        """Send a request and read its answer into the record, however it ends.

        Raises nothing but CancelledError.
        """
        import aiohttp

        try:
            async with self._session.post(self._address, data=request, headers=_JSON) as response:
                await self._read(response, record)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            is_ours = getattr(error, "errno", None) in OUR_LIMITS
            record.fail(Ending.CLIENT if is_ours else Ending.UNREACHABLE, str(error))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            record.fail(Ending.CUT if record.times else Ending.FAILED, str(error) or repr(error))

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        if response.status != 200:
            body = await response.content.read(1 << 16)
            end = Ending.REFUSED if response.status in REFUSALS else Ending.FAILED
            record.fail(end, f"HTTP {response.status}: {_words(body)}")
            return
        if response.content_type != "text/event-stream":
            record.fail(Ending.FAILED, f"not a stream of events but {response.content_type}")
            return
        lines, answer = EventLines(), AnswerReader(record)
        async for data in response.content.iter_any():
            now = time.perf_counter()
            for payload in lines.feed(data):
                answer.take(payload, now)
        answer.end()


def fit_of(endpoints: Sequence[ServerEndpoint], wanted: Fit = AS_IT_COMES) -> Fit:
    """Return what is wanted, bounded by the smallest context of these servers."""
    lengths: list[int] = []
    for endpoint in endpoints:
        found = endpoint.description
        if found.max_model_len:
            # Words are tokens only about, and a chat template adds some.
            share = 1.0 if found.prompts == "token ids" else 0.9
            margin = CHAT_MARGIN if found.api == "chat" else 0
            lengths.append(max(2, int(found.max_model_len * share) - margin))
    return replace(wanted, max_total=min(lengths, default=None))


@contextlib.asynccontextmanager
async def open_endpoints(
    urls: Sequence[str],
    *,
    model: str = "",
    access: Access = NO_ACCESS,
    api: Api = "auto",
    ignore_eos: bool = True,
) -> AsyncGenerator[list[ServerEndpoint]]:
    """Connect to servers and settle with each on the richest dialect that it understands.

    ignore_eos: ask for answers of exactly the planned length, where a server can.
    Raises CannotRun: one cannot be reached. GatewayRefused: its own words, if it answers in no
    dialect.
    """
    connector = {"limit": 0, "keepalive_timeout": KEEPALIVE_S}
    servers = [RunningGateway(url=url) for url in urls]
    async with access.session(connector=connector) as session:
        yield [await _opened(session, server, model, api, ignore_eos) for server in servers]


async def _opened(
    session: aiohttp.ClientSession, server: RunningGateway, model: str, api: Api, ignore_eos: bool
) -> ServerEndpoint:
    url = server.url
    model, max_model_len = await _model_of(session, server, model)
    found = Description(url=url, api="", model=model, max_model_len=max_model_len)
    trouble: MeshError = CannotRun(f"{url} answers no request that OpenAI's API has")
    for offered in DIALECTS:
        if api not in ("auto", offered.api):
            continue
        dialect = offered if ignore_eos else replace(offered, fixes_length=False)
        endpoint = ServerEndpoint(session, server, dialect, found)
        told = await _probe(endpoint, dialect)
        if isinstance(told, Description):
            endpoint.description = told
            return endpoint
        trouble = told
    raise trouble


async def _probe(endpoint: ServerEndpoint, dialect: Dialect) -> Description | MeshError:
    """Ask for a few tokens; what came back says what the server makes of the dialect. Returns the
    error if it does not speak it: it may speak another."""
    prompts = one_prompt(PROBE_INPUT, seed=time.perf_counter_ns(), vocab=DEFAULT_VOCAB)
    known = endpoint.description
    body = dialect.body(known.model, prompts, 0, PROBE_OUTPUT)
    record = Record(Ask(num_input=PROBE_INPUT, num_output=PROBE_OUTPUT), 0, 0.0, known.url)
    try:
        async with asyncio.timeout(PROBE_WITHIN_S):
            await endpoint.answer(body, record)
    except TimeoutError:
        raise CannotRun(f"{known.url} does not answer within {PROBE_WITHIN_S:g} s") from None
    if record.end is Ending.UNREACHABLE or record.end is Ending.CLIENT:
        raise CannotRun(f"nothing answers at {known.url} ({record.error})")
    if record.end is not Ending.COMPLETE:
        trouble = GatewayRefused(f"{known.url} does not answer: {record.error}")
        if record.end is Ending.REFUSED or "HTTP 401" in record.error or "HTTP 403" in record.error:
            raise trouble
        return trouble
    if dialect.takes_ids and record.num_prompt not in (0, PROBE_INPUT, PROBE_INPUT + 1):
        # It took the ids for something else, for several prompts or for text.
        return GatewayRefused(f"{known.url} does not take prompts of token ids")
    counts = "one a message, spread to the sum at the end" if record.num_prompt else "one a message"
    # As the server's tokenizer has it; 1 where the server does not count.
    tokens_per_word = (record.num_prompt or PROBE_INPUT) / PROBE_INPUT
    return replace(
        known,
        api=dialect.api,
        prompts="token ids" if dialect.takes_ids else "words",
        tokens_per_word=1.0 if dialect.takes_ids else tokens_per_word,
        counts="in every message" if record.is_counted else counts,
        is_length_fixed=dialect.fixes_length,
    )


async def _model_of(
    session: aiohttp.ClientSession, server: RunningGateway, model: str
) -> tuple[str, int]:
    """Return the model's name and its context, 0 = not said."""
    try:
        answer = await server.call(session, "/v1/models", limit_s=PROBE_WITHIN_S)
        served = {
            str(entry["id"]): int(entry.get("max_model_len") or 0) for entry in answer["data"]
        }
    except MeshError as error:
        if not model:
            raise CannotRun(f"{error.message} (--model NAME spares this question)") from None
        served = {}
    except (KeyError, TypeError, ValueError):
        served = {}
    if not model and not served:
        raise CannotRun(f"{server.url} does not say what it serves: name the model with --model")
    model = model or next(iter(served))
    return model, served.get(model, 0)


def _words(body: bytes) -> str:
    """The message of an error, or what the body says."""
    try:
        error: Any = orjson.loads(body)
        error = error.get("error", error)
        return str(error.get("message", error))
    except (ValueError, AttributeError):
        return body[:200].decode(errors="replace")
