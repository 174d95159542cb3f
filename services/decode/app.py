"""The decode role: takes KV over from prefill workers and generates, one token a step for all.

A colocated one computes prompts as well, in chunks between the tokens of running answers: it tells
gateways that it is paired with itself, and bounds its steps by time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.address import Address
from shared.config import DecodeConfig
from shared.engine.base import Engine
from shared.home import Role
from shared.runtime.platform import Platform
from shared.worker.core.life import Task
from shared.worker.worker import LaunchProfile, MeshWorker


def profile_of(config: DecodeConfig) -> LaunchProfile:
    """Return what this worker does: answers, whole ones if it is colocated, all if it may be
    either."""
    if config.movable:
        tasks = frozenset(Task)
    elif config.colocated:
        tasks = frozenset({Task.ANSWER, Task.WHOLE})
    else:
        tasks = frozenset({Task.ANSWER})
    return LaunchProfile(Role.DECODE, tasks)


async def serve_decode(
    config: DecodeConfig,
    platform: Platform,
    engine: Engine,
    ready: Callable[[Address], None],
    stop: asyncio.Event | None = None,
) -> bool:
    """Run one decode worker: see ``MeshWorker.run``."""
    worker = MeshWorker(profile_of(config), config, platform, engine)
    return await worker.run(ready, stop or asyncio.Event())
