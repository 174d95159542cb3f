"""Which frames carry a span, and whether they leave while it is computed or after.

    tokens of the prompt   0 ........ skip ......... start ................ stop
                           the sink has these          |  one span             |
    layers                 [0, g) [g, 2g) ...        one frame each: header + payload

The frame list is a pure function of (span, skip, layout, rule), so both ends know every size and
tag and no frame needs a message of its own. It knows no block: a frame is tokens x layers in the
wire layout of ``kv/layout.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shared.errors import IncompatiblePeer
from shared.kv.layout import KvLayout
from shared.transfer.frames import HEADER_BYTES

MAX_FRAMES = 1 << 20
"""Most frames of one transfer: the size of its range of tags."""

DEFAULT_GROUP_BYTES = 1 << 20
DEFAULT_MAX_FRAME_BYTES = 8 << 20


class Frame(NamedTuple):
    """Tokens [start, stop) of layers [first_layer, last_layer): one message. ``idx`` counts within
    the transfer."""

    idx: int
    start: int
    stop: int
    first_layer: int
    last_layer: int
    payload_bytes: int

    @property
    def num_bytes(self) -> int:
        """Length of the message."""
        return HEADER_BYTES + self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRule:
    """How one pair cuts frames; agreed in the handshake.

    group_bytes: consecutive layers are grouped until a frame's payload is at least this large.
    max_frame_bytes: no message, header included, is larger; the size of a staging slot on both
    ends.
    """

    layout: KvLayout
    group_bytes: int = DEFAULT_GROUP_BYTES
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES

    def __post_init__(self) -> None:
        least = HEADER_BYTES + self.layout.token_layer_bytes
        if self.max_frame_bytes < least:
            raise IncompatiblePeer(
                f"staging slots of {self.max_frame_bytes} bytes cannot hold one token "
                f"of one layer: at least {least} are needed",
                code="max_frame_bytes",
            )

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload of one frame."""
        return self.max_frame_bytes - HEADER_BYTES


def plan_frames(
    rule: FrameRule, start: int, stop: int, *, skip: int, first_idx: int
) -> list[Frame]:
    """Return the frames of tokens [start, stop) without those below ``skip``, in the order they
    are sent.

    Layers outermost, so that a frame can go as soon as its last layer is written. Where even one
    layer of all tokens is too large for a slot, its tokens are cut into equal pieces.
    """
    start = max(start, skip)
    num_tokens = stop - start
    if num_tokens <= 0:
        return []
    layer_bytes = num_tokens * rule.layout.token_layer_bytes
    num_layers = rule.layout.num_layers
    if layer_bytes > rule.max_payload_bytes:
        layers_per_frame = 1
        most_tokens = rule.max_payload_bytes // rule.layout.token_layer_bytes
        num_pieces = -(-num_tokens // most_tokens)
    else:
        wanted = max(1, -(-rule.group_bytes // layer_bytes))
        layers_per_frame = min(wanted, rule.max_payload_bytes // layer_bytes, num_layers)
        num_pieces = 1
    frames: list[Frame] = []
    for first_layer in range(0, num_layers, layers_per_frame):
        last_layer = min(first_layer + layers_per_frame, num_layers)
        for piece in range(num_pieces):
            piece_start = start + num_tokens * piece // num_pieces
            piece_stop = start + num_tokens * (piece + 1) // num_pieces
            payload_bytes = (
                (piece_stop - piece_start)
                * (last_layer - first_layer)
                * rule.layout.token_layer_bytes
            )
            frames.append(
                Frame(
                    first_idx + len(frames),
                    piece_start,
                    piece_stop,
                    first_layer,
                    last_layer,
                    payload_bytes,
                )
            )
    return frames


class PushMode(Enum):
    """When the frames of a span go. The frames are the same."""

    LAYERWISE = "layerwise"  # each as soon as its layers are written
    SERIALIZED = "serialized"  # all when the step is over


class TransferMode(Enum):
    """What the operator wants (``--transfer-mode``)."""

    AUTO = "auto"  # each span as ``choose_mode`` says
    LAYERWISE = "layerwise"
    SERIALIZED = "serialized"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """What a pair costs, as measured; 0 = unknown. message_s: what a frame costs beside its bytes,
    when it goes alone. interference: share of a step's speed that is lost while a push goes on."""

    bytes_per_s: float
    message_s: float = 0.0
    interference: float = 0.0


def choose_mode(
    num_bytes: int,
    num_groups: int,
    *,
    compute_s: float,
    cost: LinkCost,
    wanted: TransferMode = TransferMode.AUTO,
) -> PushMode:
    """Return the wanted mode or, on AUTO, the one that leaves less of the push exposed after the
    step.

    num_bytes: all that a step sends over one link. num_groups: moments at which frames of it may
    leave. compute_s: the step's predicted time. Unknown bandwidth or time: layer-wise, which is
    never far from the best; so is one frame, which goes at the same moment either way.
    Source: Splitwise (ISCA 2024, arXiv 2311.18677), section 4.3: layer-wise transfer costs one
    synchronisation a layer, so prompts below a threshold (512 tokens on their H100s) go serialized.
    Here the threshold follows from the link, with a group of layers in the place of a layer. Frames
    that go one by one pay ``t_msg`` each; a burst pays it once, as its frames overlap:
        t_tx = group / BW + t_msg;  t_c = compute / groups
        layerwise = max(t_tx, groups * t_tx - (groups - 1) * t_c) + interference * beside
        serial    = bytes / BW + t_msg
    beside: how long the push lasts while the step runs. The acknowledgement follows in both.
    """
    if wanted is not TransferMode.AUTO:
        return PushMode(wanted.value)
    if cost.bytes_per_s <= 0 or compute_s <= 0 or num_groups <= 1:
        return PushMode.LAYERWISE
    wire_s = num_bytes / cost.bytes_per_s
    group_s = wire_s / num_groups + cost.message_s
    hidden_s = (num_groups - 1) * compute_s / num_groups
    layerwise_s = max(group_s, num_groups * group_s - hidden_s)
    slowed_s = cost.interference * min(wire_s, hidden_s)
    if layerwise_s + slowed_s < wire_s + cost.message_s:
        return PushMode.LAYERWISE
    return PushMode.SERIALIZED
