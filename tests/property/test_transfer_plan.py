"""Frames: every cell once, nothing too large, and the same on both ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import IncompatiblePeer, TransferFailed
from shared.ids import TransferId
from shared.kv.layout import KvLayout
from shared.transfer.frames import (
    HEADER_BYTES,
    Header,
    check_digest,
    check_header,
    pack_header,
    unpack_header,
)
from shared.transfer.plan import (
    FrameRule,
    LinkCost,
    PushMode,
    TransferMode,
    choose_mode,
    plan_frames,
)


def a_layout(num_layers: int = 4, head_dim: int = 4) -> KvLayout:
    return KvLayout(dtype="uint8", num_layers=num_layers, num_kv_heads=1, head_dim=head_dim)


@given(
    num_layers=st.integers(1, 12),
    head_dim=st.integers(1, 16),
    group_bytes=st.integers(1, 400),
    max_payload=st.integers(32, 300),
    start=st.integers(0, 50),
    length=st.integers(1, 50),
    skip=st.integers(0, 110),
    first_idx=st.integers(0, 1000),
)
def test_frames_cover_the_span_once_and_fit(
    num_layers: int,
    head_dim: int,
    group_bytes: int,
    max_payload: int,
    start: int,
    length: int,
    skip: int,
    first_idx: int,
):
    """Each (token, layer) beyond skip is in one frame; sizes, order and indices are right."""
    layout = a_layout(num_layers, head_dim)
    rule = FrameRule(
        layout=layout, group_bytes=group_bytes, max_frame_bytes=HEADER_BYTES + max_payload
    )
    frames = plan_frames(rule, start, start + length, skip=skip, first_idx=first_idx)
    cells = [
        (token, layer)
        for frame in frames
        for layer in range(frame.first_layer, frame.last_layer)
        for token in range(frame.start, frame.stop)
    ]
    tokens = range(max(start, skip), start + length)
    wanted = {(token, layer) for token in tokens for layer in range(num_layers)}
    assert len(cells) == len(set(cells))
    assert set(cells) == wanted
    assert [frame.idx for frame in frames] == list(range(first_idx, first_idx + len(frames)))
    assert [frame.first_layer for frame in frames] == sorted(f.first_layer for f in frames)
    for frame in frames:
        num_layers_here = frame.last_layer - frame.first_layer
        layer_bytes = (frame.stop - frame.start) * layout.token_layer_bytes
        assert frame.payload_bytes == layer_bytes * num_layers_here
        assert frame.num_bytes <= rule.max_frame_bytes
        # No frame is smaller than a group unless it must: the last layers, or a full slot.
        if frame.payload_bytes < group_bytes and frame.last_layer < num_layers:
            assert len(tokens) * layout.token_layer_bytes * (num_layers_here + 1) > max_payload


def test_short_prompts_go_in_one_frame():
    """What is smaller than a group is one message."""
    assert len(plan_frames(FrameRule(layout=a_layout(32, 128)), 0, 10, skip=0, first_idx=0)) == 1


def test_a_slot_that_cannot_hold_one_token_is_refused():
    """Better at the handshake than at the first frame."""
    with pytest.raises(IncompatiblePeer, match="staging slots"):
        FrameRule(layout=a_layout(), max_frame_bytes=HEADER_BYTES + 7)


headers = st.builds(
    Header,
    st.binary(min_size=16, max_size=16).map(TransferId),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.none() | st.integers(0, 2**64 - 1),
)


@given(headers)
def test_a_header_says_what_it_was_told(header: Header):
    """Packing and unpacking are inverse, in 64 bytes."""
    raw = pack_header(header)
    assert len(raw) == HEADER_BYTES
    assert unpack_header(raw) == header


@given(header=headers, bit=st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_is_never_taken_for_the_frame(header: Header, bit: int):
    """Any one bit changes the verdict or the digest, but for the bytes that say nothing."""
    raw = bytearray(pack_header(header))
    raw[bit // 8] ^= 1 << bit % 8
    reserved = 36 <= bit // 8 < 40 or bit // 8 >= 56
    try:
        digest = check_header(
            bytes(raw),
            transfer_id=header.transfer_id,
            epoch=header.epoch,
            frame_idx=header.frame_idx,
            payload_bytes=header.payload_bytes,
        )
    except TransferFailed:
        assert not reserved
    else:
        no_digest = header.digest is None and 48 <= bit // 8 < 56
        assert digest != header.digest or reserved or no_digest


@pytest.mark.parametrize("field", ["transfer_id", "epoch", "frame_idx", "payload_bytes"])
def test_a_frame_of_something_else_is_named(field: str):
    """The error says what differs, and never what was in it."""
    header = Header(TransferId(b"a" * 16), 1, 2, 3, 4)
    wanted = header._asdict() | {field: TransferId(b"b" * 16) if field == "transfer_id" else 9}
    wanted.pop("digest")
    with pytest.raises(TransferFailed, match=field) as caught:
        check_header(pack_header(header), **wanted)
    assert caught.value.code == "frame_header"


def test_digests_are_compared_if_there_is_one():
    """A sender on a device may leave the digest out."""
    check_digest(None, 5)
    check_digest(5, 5)
    with pytest.raises(TransferFailed) as caught:
        check_digest(5, 6)
    assert caught.value.code == "frame_digest"


@pytest.mark.parametrize(
    ("num_bytes", "num_groups", "compute_s", "bytes_per_s", "mode"),
    [
        (64 << 20, 32, 0.3, 2e9, PushMode.LAYERWISE),  # 32 ms of wire hide under 300 ms of compute
        (64 << 10, 32, 0.001, 2e9, PushMode.SERIALIZED),  # 32 messages cost more than the bytes
        (64 << 20, 32, 0.0, 2e9, PushMode.LAYERWISE),  # nothing known of the step
        (64 << 20, 32, 0.3, 0.0, PushMode.LAYERWISE),  # nothing known of the link
        (64 << 20, 1, 0.3, 2e9, PushMode.LAYERWISE),  # one message either way
    ],
)
def test_the_mode_follows_what_is_left_exposed(
    num_bytes: int, num_groups: int, compute_s: float, bytes_per_s: float, mode: PushMode
):
    """Layer-wise where the step hides the wire, serialized where messages cost more than bytes."""
    cost = LinkCost(bytes_per_s=bytes_per_s, message_s=200e-6)
    assert choose_mode(num_bytes, num_groups, compute_s=compute_s, cost=cost) is mode


@given(
    num_bytes=st.integers(0, 1 << 40),
    num_groups=st.integers(0, 1000),
    compute_s=st.floats(0, 1e3),
    bytes_per_s=st.floats(0, 1e12),
)
def test_what_the_operator_wants_is_not_weighed(
    num_bytes: int, num_groups: int, compute_s: float, bytes_per_s: float
):
    """Whatever it costs."""
    for wanted, mode in (
        (TransferMode.LAYERWISE, PushMode.LAYERWISE),
        (TransferMode.SERIALIZED, PushMode.SERIALIZED),
    ):
        cost = LinkCost(bytes_per_s=bytes_per_s)
        chosen = choose_mode(num_bytes, num_groups, compute_s=compute_s, cost=cost, wanted=wanted)
        assert chosen is mode


@given(
    num_bytes=st.integers(1, 1 << 32),
    num_groups=st.integers(2, 100),
    compute_s=st.floats(1e-6, 100),
    bytes_per_s=st.floats(1e6, 1e12),
    message_s=st.floats(0, 1e-2),
    interference=st.floats(0, 1),
)
def test_the_mode_is_the_cheaper_one(
    num_bytes: int,
    num_groups: int,
    compute_s: float,
    bytes_per_s: float,
    message_s: float,
    interference: float,
):
    """Compared with a step-by-step pipeline: send i starts after compute i and after send i - 1,
    and the step is slowed for as long as bytes move beside it."""
    cost = LinkCost(bytes_per_s=bytes_per_s, message_s=message_s, interference=interference)
    send_s = num_bytes / bytes_per_s / num_groups + cost.message_s
    ended_at = 0.0
    for group in range(num_groups):
        ended_at = max(ended_at, compute_s * (group + 1) / num_groups) + send_s
    beside_s = min(num_bytes / bytes_per_s, compute_s * (num_groups - 1) / num_groups)
    layerwise_s = ended_at - compute_s + interference * beside_s
    serialized_s = num_bytes / bytes_per_s + cost.message_s
    mode = choose_mode(num_bytes, num_groups, compute_s=compute_s, cost=cost)
    rounding_s = 1e-9 * (layerwise_s + serialized_s) + 1e-12 * compute_s
    if abs(layerwise_s - serialized_s) > rounding_s:
        cheaper = PushMode.LAYERWISE if layerwise_s < serialized_s else PushMode.SERIALIZED
        assert mode is cheaper
