"""Reads from UCX's own tables what carried a message: pure text in, the name of a lane out.

UCX chooses a protocol and its lanes for each kind of operation, memory and size, once, and prints
what it chose (``ucp_ep_print_info``, ``ucp_worker_print_info``; the same tables as
``UCX_PROTO_INFO``):

    | ucp_context_0 intra-node cfg#0 | rendezvous data send from cuda/GPU0 to cuda/dev[0]      |
    |                         0..inf | zero-copy flushed write to remote | cuda_ipc/cuda       |

That an endpoint *has* a lane says nothing about who uses it: on a GPU's host sysv is among them
while KV goes by cuda_ipc, or through the host by tcp. So the row for the message is looked up:

- a small message is sent at once ("eager"): the sender's row of the message itself;
- of a large one the receiver may fetch the data: its row "rendezvous data fetch";
- or it asks the sender for them, which its row marks as a guess with "(?)": then the sender's row
  "rendezvous data send".

UCX keeps one table for all peers to which it has the same lanes. Should several rows fit that name
different lanes (one peer's device memory could be mapped, another's could not), all of them are
named: who requires a lane is then refused rather than deceived.

Format: ``src/ucp/proto/proto_debug.c`` of UCX 1.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from shared.lanes import STAGING, Certainty, LaneFinding

_MESSAGE: Final = "tagged message by ucp_tag_send*"
_FETCH: Final = "rendezvous data fetch"
_SEND: Final = "rendezvous data send"

_CONFIG: Final = re.compile(r"\bcfg#(\d+)\b")
_OPERATION: Final = re.compile(r"(.+?) (?:into|from) ([a-z-]+)")
_LANE: Final = re.compile(r"\b([a-z][a-z0-9_]*)/([\w:.-]+)")
_SIZE: Final = re.compile(r"(\d+)([KMGT]?)")
_NAMELESS_DEVICES: Final = frozenset({"memory", "cuda"})
_COPIES: Final = ("copy-in", "copy-out", STAGING)
"""Words of a protocol that does not leave device memory where it is."""


class _Row(NamedTuple):
    config: str
    operation: str
    memory: str
    first: float
    last: float
    protocol: str
    lanes: str


def read_lane(
    endpoint: str, worker: str, *, sends: bool, memory: str, num_bytes: int
) -> LaneFinding:
    """Return what this end knows of the lane of messages like one that has crossed.

    endpoint, worker: what UCX prints of them. sends: this end has sent it. memory: UCX's name for
    the kind of memory at this end, 'host' or 'cuda'.
    """
    config = _CONFIG.search(endpoint)
    rows = [
        row
        for row in _rows(f"{endpoint}\n{worker}")
        if config and row.config == config[1]
        if row.memory == memory and row.first <= num_bytes <= row.last
    ]
    if not sends:
        fetched = [row for row in rows if row.operation == _FETCH]
        is_guess = all(row.protocol.startswith("(?)") for row in fetched)
        return _found(fetched, Certainty.EXPECTED if is_guess else Certainty.FETCHED)
    messages = [row for row in rows if row.operation == _MESSAGE]
    if messages and not any("rendezvous" in row.protocol for row in messages):
        return _found(messages, Certainty.KNOWN)
    if sent := [row for row in rows if row.operation == _SEND]:
        return _found(sent, Certainty.CHOSEN)
    return _found(messages, Certainty.EXPECTED)


def name_of(lanes: list[tuple[str, str]]) -> str:
    """Return the name for transports with their devices; '' for none."""
    names = (
        transport if device in _NAMELESS_DEVICES or not device else f"{transport}/{device}"
        for transport, device in lanes
    )
    return "+".join(dict.fromkeys(names))


def _rows(text: str) -> Iterator[_Row]:
    config = operation = memory = ""
    for line in text.splitlines():
        match [cell.strip() for cell in line.split("|")[1:-1]]:
            case [title, description]:
                number, words = _CONFIG.search(title), _OPERATION.match(description)
                config = number[1] if number else ""
                operation, memory = words.groups() if words else ("", "")
            case [sizes, protocol, lanes]:
                first, _, last = sizes.split()[-1].partition("..") if sizes else ("", "", "")
                span = _size(first), _size(last or first)
                yield _Row(config, operation, memory, *span, protocol, lanes)
            case _:
                pass


def _size(text: str) -> float:
    size = _SIZE.fullmatch(text)
    return int(size[1]) << 10 * "_KMGT".index(size[2] or "_") if size else float("inf")


def _found(rows: list[_Row], certainty: Certainty) -> LaneFinding:
    lanes: list[tuple[str, str]] = []
    for row in rows:
        if row.memory != "host" and any(word in row.protocol for word in _COPIES):
            lanes.append((STAGING, ""))
        lanes += _LANE.findall(row.lanes)
    name = name_of(lanes)
    return LaneFinding(name, certainty) if name else LaneFinding("", Certainty.UNKNOWN)
