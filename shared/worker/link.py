"""A pair as those who use it see it: one stream and one endpoint, over which KV may flow both ways.

Who makes pairs is ``pairs.py``; what flows over one is the pusher's (out) and the receiver's (in).
Both hear of it by ``link_up``, ``link_message`` and ``link_lost``, and return at once. After the
last nothing more arrives: the endpoint is closed next, and its operations settle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared import wire
from shared.errors import MeshError, TransferFailed
from shared.ids import Incarnation
from shared.messages.transfer_codec import PairTerms, message_to_wire, windows_to_wire
from shared.rpc.heartbeat_stream import HeartbeatStream
from shared.transfer.messages import LinkId, Pull, SinkMessage, SourceMessage, WindowOffer
from shared.transport.base import Endpoint
from shared.worker.windows import PeerWindows

PairStream = HeartbeatStream[wire.PairMessage, wire.PairMessage]


class PairLink:
    """One life of one pair; a peer that comes back has another link.

    name: the peer's address, if it is known. goes_out, comes_in: which ways KV may flow. lane_out,
    lane_in: what carries it. bytes_per_s: out, from the canaries; the pusher refines it. windows:
    the peer's staging, where we can write it. offered: our own, where the peer has mapped it;
    empty: its frames come as whole messages. used_at: when either end last spoke of a transfer.
    crossed_at: when a frame of ours last crossed.
    """

    def __init__(self, link_id: LinkId, terms: PairTerms, name: str, endpoint: Endpoint) -> None:
        self.id = link_id
        self.peer: Incarnation = terms.peer
        self.name = name
        self.endpoint = endpoint
        self.rule = terms.rule
        self.goes_out = terms.goes_out
        self.comes_in = terms.comes_in
        self.lane_out = self.lane_in = ""
        self.bytes_per_s = 0.0
        self.windows = PeerWindows(endpoint, terms.rule.max_frame_bytes)
        self.offered: list[WindowOffer] = []
        self.control: PairStream | None = None
        self.lost: MeshError | None = None
        self.used_at = asyncio.get_running_loop().time()
        self.crossed_at = self.used_at

    def send(self, message: SourceMessage) -> None:
        """Tell the sink; never waits. On a link that is lost it goes nowhere."""
        if self.control is not None:
            self.control.send(message_to_wire(message))

    def reply(self, message: SinkMessage | Pull) -> None:
        """Tell the source; as ``send``, after what its caller does next: a step that begins goes
        before its KV's receipt."""
        if self.control is not None:
            self.control.send(message_to_wire(message), at_once=False)

    def offer(self, windows: Sequence[WindowOffer]) -> None:
        """Have the source map these, too, before any credit that names them."""
        if self.offered and windows and self.control is not None:
            self.control.send(windows_to_wire(windows), at_once=False)

    def close(self, reason: str) -> None:
        """Declare the link lost; ``link_lost`` of its users follows."""
        self.lose(TransferFailed(reason))

    def lose(self, error: MeshError) -> None:
        """As ``close``, with a typed reason; the first one counts."""
        self.lost = self.lost or error
        if self.control is not None:
            self.control.close(error)
