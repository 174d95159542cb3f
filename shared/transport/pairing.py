"""What both ends of a pair agree on about its endpoint besides the bytes: how long pairing may
take, what is sent to try it, which partners and lanes are refused, and how it is closed."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from shared.config import WorkerConfig
from shared.errors import IncompatiblePeer, MeshError
from shared.lanes import read_requirement, require_lane
from shared.transport.base import Endpoint

_log = structlog.get_logger(__name__)

HANDSHAKE_S = 10.0
"""Longest that one of two workers that pair up waits for the other's next word."""

CANARY_BYTES = 4 << 20
"""Size of the last test frames, if frames may be as large and the link is quick enough."""

FIRST_CANARY_BYTES = 64 << 10
"""Size of the first one: on a link of 0.1 MB/s, or with a hundred round trips a second, it crosses
in time."""

CLOSE_S = 5.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> bytes:
    """16 bytes that all containers of a running kernel share, and no other host; b"" if it does not
    tell."""
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRules:
    """Which pairs this worker enters.

    required_lanes: see ``shared.lanes.require_lane``. allow_unencrypted: partners on other hosts
    are taken, too. allow_mixed_engines: and those that compute with another engine. host:
    ``host_id`` of this worker.
    """

    required_lanes: tuple[str, ...] = ()
    allow_unencrypted: bool = False
    allow_mixed_engines: bool = False
    host: bytes = field(default_factory=host_id)

    @classmethod
    def of(cls, config: WorkerConfig) -> PairRules:
        """What a worker was told. Raises InvalidRequest."""
        return cls(
            required_lanes=read_requirement(config.require_lane),
            allow_unencrypted=config.allow_unencrypted_kv,
            allow_mixed_engines=config.allow_mixed_engines,
        )

    def check_host(self, peer: bytes) -> None:
        """Raise IncompatiblePeer: KV would leave this host, and nobody said that it may.

        Bytes between processes of one host stay in it, whatever their lane. peer: its ``host_id``.
        """
        if self.allow_unencrypted or (self.host and peer == self.host):
            return
        raise IncompatiblePeer(
            "the partner is on another host, and UCX does not encrypt: KV, from which prompts can "
            "be read, would cross the network in the clear. If that network is private (its own "
            "subnet, an RDMA fabric, a VPN), say --allow-unencrypted-kv on both workers",
            code="unencrypted",
        )

    def check_engine(self, own: str, peer: str) -> None:
        """Raise IncompatiblePeer: another engine would continue what this one has begun, or the
        reverse, and nobody said that it may."""
        if self.allow_mixed_engines or own == peer:
            return
        raise IncompatiblePeer(
            f"the partner computes with {peer or 'an engine without a name'}, this worker with "
            f"{own}: they round differently, so that answers in 16 bits depend on who computes "
            "them. Start both with one --engine of one release (and without AMX here or there: "
            "--kernels avx512, or of vllm --dtype float32), or say --allow-mixed-engines on the "
            "gateway and on all workers",
            code="mixed_engines",
        )

    def check_lane(self, lane: str) -> None:
        """Raise IncompatiblePeer: the lane that was found is none that this worker requires."""
        require_lane(lane, self.required_lanes)


def is_refusal(error: MeshError) -> bool:
    """Whether ``PairRules`` refused, here or at the other end: trying again will not help."""
    return error.code in ("lane", "unencrypted", "mixed_engines")


async def close_endpoint(endpoint: Endpoint) -> None:
    """Close; one that does not is said in the log, and left."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await endpoint.close()
    except TimeoutError:
        _log.error("an endpoint did not close", limit_s=CLOSE_S)
