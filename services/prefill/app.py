"""The prefill role: computes prompts for decode workers, several in a step until the device is
busy, and pushes their KV layer by layer. It is ready when a decode worker is its partner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.address import Address
from shared.config import PrefillConfig
from shared.engine.base import Engine
from shared.home import Role
from shared.runtime.platform import Platform
from shared.worker.core.life import Task
from shared.worker.worker import LaunchProfile, MeshWorker


def profile_of(config: PrefillConfig) -> LaunchProfile:
    """Return what this worker does: prompts, and all else if it may be either."""
    tasks = frozenset(Task) if config.movable else frozenset({Task.PROMPT})
    return LaunchProfile(Role.PREFILL, tasks)


async def serve_prefill(
    config: PrefillConfig,
    platform: Platform,
    engine: Engine,
    ready: Callable[[Address], None],
    stop: asyncio.Event | None = None,
) -> bool:
    """Run one prefill worker: see ``MeshWorker.run``."""
    worker = MeshWorker(profile_of(config), config, platform, engine)
    return await worker.run(ready, stop or asyncio.Event())
