"""What carries KV from one worker to another: the names of lanes, and which of them are required.

A lane is named as UCX names it, ``transport`` or ``transport/device``, with ``+`` between parts:
``sysv``, ``tcp/eth0``, ``cuda_ipc``. ``cuda_copy`` before the rest says that device memory is
copied through the host's on its way: ``cuda_copy+tcp/eth0``.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final, NamedTuple

from shared.errors import IncompatiblePeer, InvalidRequest

STAGING: Final = "cuda_copy"
"""Between a device and its own host; not a way to another process."""

_SHARED_MEMORY: Final = frozenset({"sysv", "posix", "cma", "knem", "xpmem", "self", "loopback"})
_RDMA: Final = frozenset(
    {"rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "gga_mlx5", "srd"}
)
GROUPS: Final = {"shm": _SHARED_MEMORY, "rdma": _RDMA}
NAMES: Final = frozenset({"tcp", "cuda_ipc"}) | _SHARED_MEMORY | _RDMA

MAX_NAME_CHARS: Final = 200
_WELL_FORMED: Final = re.compile(rf"[\w/:.+-]{{0,{MAX_NAME_CHARS}}}", re.ASCII)

_REMEDIES: Final = {
    "shm": "run both workers on one host and in one IPC namespace (compose.yaml has it: "
    "ipc: service:ipc), with sysv in UCX_TLS",
    "cuda_ipc": "let both workers see both GPUs, in one PID namespace, with cuda_ipc and cuda_copy "
    "in UCX_TLS and no expandable_segments in PYTORCH_CUDA_ALLOC_CONF",
    "rdma": "UCX must be one with RDMA (the wheels' is not) and UCX_NET_DEVICES name the adapter",
}


class Certainty(IntEnum):
    """What a finding rests on; of two ends' findings the more certain one counts."""

    UNKNOWN = 0
    LISTED = 1  # UCX may use these
    EXPECTED = 2  # an end's estimate of what the other one chooses
    CHOSEN = 3  # the sender's own table: how it moves what the receiver asks it to move
    FETCHED = 4  # the receiver's own table: how it fetches, with the sender standing by
    KNOWN = 5  # there is nothing to choose


class LaneFinding(NamedTuple):
    """What one end has found out about the lane of a message."""

    lane: str
    certainty: Certainty


def more_certain(ours: LaneFinding, theirs: LaneFinding) -> LaneFinding:
    """Return one of two ends' findings about the same message."""
    return max(ours, theirs, key=lambda finding: finding.certainty)


def is_well_formed(lane: str) -> bool:
    """Whether a peer's text may be the name of a lane, and so a label."""
    return _WELL_FORMED.fullmatch(lane) is not None


def is_within_host(lane: str) -> bool:
    """Whether bytes on this lane reach no network; '' does not."""
    transports = _transports(lane)
    return bool(transports) and transports <= _SHARED_MEMORY | {"cuda_ipc"}


def read_requirement(text: str) -> tuple[str, ...]:
    """Return the names in ``--require-lane``: transports and groups, separated by commas.

    Raises InvalidRequest: a name is none.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in NAMES and name not in GROUPS:
            raise InvalidRequest(
                f"--require-lane: {name!r} is no lane; say shm, cuda_ipc, rdma or tcp, several "
                "with commas, or a transport of UCX as receipts name it (sysv, rc_mlx5, ...)",
                param="require_lane",
            )
    return names


def require_lane(lane: str, required: tuple[str, ...]) -> None:
    """Raise IncompatiblePeer unless every part of the lane is one of those required.

    required: as ``read_requirement`` returns it; empty: any lane will do.
    """
    if not required:
        return
    allowed: set[str] = set()
    for name in required:
        allowed |= GROUPS.get(name, {name})
    transports = _transports(lane)
    if transports and transports <= allowed:
        return
    remedies = [text for name, text in _REMEDIES.items() if allowed & (GROUPS.get(name) or {name})]
    raise IncompatiblePeer(
        f"KV would move over {lane or 'an unknown lane'}, and --require-lane is "
        f"{','.join(required)}: {'; or '.join(remedies) or 'look at UCX_TLS and UCX_NET_DEVICES'}; "
        "or take another --require-lane",
        code="lane",
    )


def _transports(lane: str) -> set[str]:
    return {part.partition("/")[0] for part in lane.split("+") if part} - {STAGING}
