"""What a load generator needs of a server, whatever it speaks; and how to open one by its URL.

``http://`` and ``https://`` are OpenAI-compatible servers (``openai_endpoint.py``), ``grpc://`` and
``grpcs://`` (with TLS) are a pdmesh gateway's gRPC API (``mesh_endpoint.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from services.cli.bench.prompts import DEFAULT_VOCAB, Prompts
from services.cli.bench.records import Record
from services.cli.bench.workload import AS_IT_COMES, Fit
from services.cli.client import NO_ACCESS, Access

Api = Literal["auto", "completions", "chat"]

GRPC_SCHEMES = ("grpc://", "grpcs://")
CHAT_MARGIN = 64
"""Tokens that a chat template may add."""


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


class ServerEndpoint(Protocol):
    """One server under load."""

    @property
    def description(self) -> Description:
        """What is known of it."""
        ...

    def prepare(self, prompts: Prompts, index: int) -> bytes:
        """Return request ``index`` ready to be sent; called before the run."""
        ...

    async def answer(self, request: bytes, record: Record) -> None:
        """Send a request and read its answer into the record, however it ends.

        Raises nothing but CancelledError.
        """
        ...


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
    vocab: int = DEFAULT_VOCAB,
    ignore_eos: bool = True,
) -> AsyncGenerator[list[ServerEndpoint]]:
    """Connect to servers and find out what each understands, with a few small requests.

    ignore_eos: ask for answers of exactly the planned length, where a server can.
    Raises MeshError: one cannot be reached or refuses every form of a request.
    """
    from services.cli.bench.mesh_endpoint import open_mesh_endpoint
    from services.cli.bench.openai_endpoint import open_openai_endpoint

    async with contextlib.AsyncExitStack() as stack:
        endpoints: list[ServerEndpoint] = []
        for url in urls:
            if url.startswith(GRPC_SCHEMES):
                opened = open_mesh_endpoint(url, model=model, access=access, ignore_eos=ignore_eos)
            else:
                opened = open_openai_endpoint(
                    url, model=model, access=access, api=api, vocab=vocab, ignore_eos=ignore_eos
                )
            endpoints.append(await stack.enter_async_context(opened))
        yield endpoints
