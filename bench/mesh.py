"""Meshes of real processes, as questions start them, and answers to prompts of token ids."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from bench.servers import shown_log
from services.local import LocalMesh, local_mesh, plan_services, wait_for_pair
from shared import wire
from shared.address import parse_address
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from shared.messages.columns import pack_u32, unpack_u32
from shared.rpc.methods import GENERATE
from shared.rpc.status import RECEIPT_TRAILER
from shared.rpc.stream import open_stream
from shared.rpc.tcp import TcpNetwork
from shared.runtime.realtime import is_allowed

READY_WITHIN_S = 300.0
RESIDENT_WITHIN_S = 240.0
ORDINARY, REALTIME = "ordinary", "realtime"
"""Priorities of a mesh's loops and of its threads that carry KV."""


def add_priorities(parser: argparse.ArgumentParser) -> None:
    """``--priorities``: both, unless this process may not take the second."""
    here = [ORDINARY, REALTIME] if is_allowed() else [ORDINARY]
    words = "of event loops and threads that carry KV: meshes without --realtime and with it"
    parser.add_argument(
        "--priorities", nargs="+", choices=(ORDINARY, REALTIME), default=here, help=words
    )


@contextlib.asynccontextmanager
async def a_mesh(
    prefills: Sequence[PrefillConfig],
    decodes: Sequence[DecodeConfig],
    *,
    log: Path | None = None,
    is_resident: bool = False,
    **gateway: Any,
) -> AsyncGenerator[LocalMesh]:
    """Start a mesh on free ports, for the length of the block; a pair of workers is ready then.

    log: of all processes; None = one that is shown if the block ends badly. is_resident: wait until
    the memory of all KV pools is there, too. gateway: its settings.
    """
    config = GatewayConfig(**gateway, http_port=0, grpc_port=0, mesh_port=0)
    services = plan_services(config, prefills, decodes)
    with contextlib.ExitStack() as stack:
        log = log or stack.enter_context(shown_log())
        async with local_mesh(services, log=log, restart=False, drain_s=5.0) as mesh:
            await wait_for_pair(mesh.http_url, READY_WITHIN_S)
            async with asyncio.timeout(RESIDENT_WITHIN_S):
                words = "KV pool is resident"
                while is_resident and log.read_text().count(words) < len(services) - 1:
                    await asyncio.sleep(0.2)
            yield mesh


@contextlib.asynccontextmanager
async def channel_to(mesh: LocalMesh) -> AsyncGenerator[Any]:
    address = parse_address(mesh.grpc_target, param="mesh", default_port=0)
    async with TcpNetwork().channel(address) as channel:
        yield channel


async def ask(channel: Any, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Any]:
    """Return the token ids of one greedy answer, and its receipt.

    Raises MeshError: the call failed. RuntimeError: the answer has another length.
    """
    params = wire.GenerateParams(
        max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0, ignore_eos=True
    )
    request = wire.GenerateRequest(token_ids=pack_u32(prompt), params=params)
    ids: list[int] = []
    async with open_stream(channel, GENERATE) as stream:
        await stream.send(request, end=True)
        async for reply in stream:
            ids += unpack_u32(reply.token_ids)
        receipt = json.loads(stream.trailers[RECEIPT_TRAILER])
    if len(ids) != num_tokens:
        raise RuntimeError(f"{len(ids)} tokens instead of {num_tokens}")
    return ids, receipt
