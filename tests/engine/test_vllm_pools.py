"""KV between vLLM's layouts and the wire's, against a plain loop over tokens and heads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.vllm.pools import DevicePools, HostPools, Pools
from shared.errors import EngineFailed
from shared.kv.layout import KvLayout

pytestmark = pytest.mark.torch

NUM_BLOCKS = 7
NUM_LAYERS = 3
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.uint8}
PLACES = [(5, 3), (5, 0), (1, 2), (6, 3), (0, 0), (1, 1), (5, 1)]
"""(block, offset) of seven tokens, in no order."""


@dataclass(frozen=True)
class Kind:
    """A way to keep KV. layout: of the wire. is_packed: keys are transposed, a block's values
    behind its keys; is_tiled: both as AMX's tiles. has_four_axes: a latent vector has an axis of
    one head."""

    layout: KvLayout
    is_packed: bool
    block_size: int = 4
    has_four_axes: bool = True
    is_tiled: bool = False

    @property
    def places(self) -> list[tuple[int, int]]:
        """PLACES, spread over this block."""
        return [(block, offset * (self.block_size - 1) // 3) for block, offset in PLACES]

    @property
    def slots(self) -> np.ndarray:
        """The same as slots."""
        return np.array([block * self.block_size + offset for block, offset in self.places])

    def shape(self, num_ranks: int) -> tuple[int, ...]:
        heads = max(1, self.layout.num_kv_heads // num_ranks)
        width = self.layout.parts * self.layout.head_dim
        if not self.has_four_axes:
            return NUM_BLOCKS, self.block_size, width
        return NUM_BLOCKS, heads, self.block_size, width

    def empty(self, num_ranks: int) -> list[list[torch.Tensor]]:
        """Pools [rank][layer] of zeros."""
        dtype = TYPES[self.layout.dtype]
        return [
            [torch.zeros(self.shape(num_ranks), dtype=dtype) for _ in range(NUM_LAYERS)]
            for _ in range(num_ranks)
        ]

    def filled(self, num_ranks: int, seed: int = 0) -> list[list[torch.Tensor]]:
        """The same with any bits; ranks that share a head have the same ones."""
        random = np.random.default_rng(seed)
        ranks = self.empty(num_ranks)
        for rank, layer in itertools.product(range(num_ranks), range(NUM_LAYERS)):
            octets = ranks[rank][layer].view(torch.uint8)
            octets.copy_(torch.from_numpy(random.integers(0, 256, octets.shape, dtype=np.uint8)))
        copies = max(1, num_ranks // self.layout.num_kv_heads)
        for rank, layer in itertools.product(range(num_ranks), range(NUM_LAYERS)):
            ranks[rank][layer].copy_(ranks[rank - rank % copies][layer])
        return ranks

    def token(self, pool: torch.Tensor, part: int, head: int, block: int, offset: int) -> bytes:
        """The plain reference: one key or value of one token and one head of a pool."""
        dim = self.layout.head_dim
        item = pool.element_size()
        octets = pool.contiguous().view(torch.uint8).numpy().tobytes()
        num_heads = 1 if pool.dim() == 3 else pool.shape[1]
        begin = (block * num_heads + head) * self.block_size * self.layout.parts * dim
        if self.is_tiled:
            at = [
                begin + part * self.block_size * dim + self._in_tiles(part, offset, idx)
                for idx in range(dim)
            ]
        elif self.is_packed and part == 0:
            at = [begin + idx * self.block_size + offset for idx in range(dim)]
        elif self.is_packed:
            at = [begin + (self.block_size + offset) * dim + idx for idx in range(dim)]
        else:
            at = [begin + (offset * self.layout.parts + part) * dim + idx for idx in range(dim)]
        return b"".join(octets[one * item : (one + 1) * item] for one in at)

    def _in_tiles(self, part: int, offset: int, idx: int) -> int:
        """Keys are pairs of one token's numbers, values pairs of two tokens'; 16 pairs a row."""
        if part == 0:
            row = offset // 16 * (self.layout.head_dim // 2) + idx // 2
            return (row * 16 + offset % 16) * 2 + idx % 2
        row = idx // 16 * (self.block_size // 2) + offset // 2
        return (row * 16 + idx % 16) * 2 + offset % 2

    def frame(self, ranks: Sequence[Sequence[torch.Tensor]], first: int, last: int) -> bytes:
        """The plain reference: the wire's frame of the places."""
        heads = self.layout.num_kv_heads
        found: list[bytes] = []
        for layer, part in itertools.product(range(first, last), range(self.layout.parts)):
            for (block, offset), head in itertools.product(self.places, range(heads)):
                rank = head * len(ranks) // heads
                local = head - rank * heads // len(ranks) if len(ranks) <= heads else 0
                found.append(self.token(ranks[rank][layer], part, local, block, offset))
        return b"".join(found)

    def pools(self, ranks: Sequence[Sequence[torch.Tensor]], *, on_device: bool = False) -> Pools:
        if on_device:
            return DevicePools(ranks[0], self.layout, self.block_size)
        return HostPools(ranks, self.layout, self.block_size, is_tiled=self.is_tiled)


def dense(dtype: str, *, is_packed: bool, num_heads: int = 4) -> Kind:
    layout = KvLayout(dtype=dtype, num_layers=NUM_LAYERS, num_kv_heads=num_heads, head_dim=8)
    return Kind(layout, is_packed)


def tiled(dtype: str) -> Kind:
    layout = KvLayout(dtype=dtype, num_layers=NUM_LAYERS, num_kv_heads=4, head_dim=32)
    return Kind(layout, is_packed=True, block_size=32, is_tiled=True)


def latent(dtype: str, *, has_four_axes: bool) -> Kind:
    layout = KvLayout(dtype=dtype, num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=12, parts=1)
    return Kind(layout, is_packed=False, has_four_axes=has_four_axes)


def name_of(kind: Any) -> str:
    if not isinstance(kind, Kind):
        return ""
    how = "tiled" if kind.is_tiled else "packed" if kind.is_packed else "beside"
    if kind.layout.parts == 1:
        how = "latent4" if kind.has_four_axes else "latent3"
    return f"{kind.layout.dtype}-{how}"


DENSE = [dense(dtype, is_packed=packed) for dtype in TYPES for packed in (True, False)]
PACKED = [
    *(kind for kind in DENSE if kind.is_packed),
    *(tiled(dtype) for dtype in ("bfloat16", "fp8_e4m3")),
]
"""In memory of the host keys and values are packed, on a device a key is beside its value."""
LATENT = [latent(dtype, has_four_axes=four) for dtype in TYPES for four in (True, False)]


def gathered(
    kind: Kind, pools: Pools, num_bytes: int, first: int = 0, last: int = NUM_LAYERS
) -> bytes:
    out = bytearray(b"\xee" * num_bytes)
    pools.gather(kind.slots, first, last, out)
    return bytes(out)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", [*PACKED, *LATENT], ids=name_of)
def test_a_frame_is_that_of_a_plain_loop(kind: Kind, num_ranks: int) -> None:
    """All heads of a token side by side, however many ranks have them; any layers of it."""
    ranks = kind.filled(num_ranks)
    pools = kind.pools(ranks)
    for first, last in ((0, NUM_LAYERS), (1, 2)):
        wanted = kind.frame(ranks, first, last)
        assert len(wanted) == kind.layout.token_layer_bytes * len(PLACES) * (last - first)
        assert gathered(kind, pools, len(wanted), first, last) == wanted


@pytest.mark.parametrize("kind", [k for k in (*DENSE, *LATENT) if not k.is_packed], ids=name_of)
def test_a_devices_pools_make_the_same_frame(kind: Kind) -> None:
    """On tensors of the CPU, with the code that copies on a device."""
    ranks = kind.filled(1)
    pools = kind.pools(ranks, on_device=True)
    wanted = kind.frame(ranks, 0, NUM_LAYERS)
    assert gathered(kind, pools, len(wanted)) == wanted
    others = kind.empty(1)
    kind.pools(others, on_device=True).scatter(kind.slots, 0, NUM_LAYERS, bytearray(wanted))
    assert kind.frame(others, 0, NUM_LAYERS) == wanted
    assert pools.arrays() == []


class _OnOneDevice(TorchDispatchMode):
    """Refuses what a device refuses and ``meta`` does not: numbers of the host, put by index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.index_put_.default:
            assert args[2].device == args[0].device
        return func(*args, **(kwargs or {}))


def test_a_frame_in_the_hosts_memory_goes_into_a_devices_pools() -> None:
    """As one from a tier below the pool does: its numbers are brought to the device first."""
    kind = DENSE[1]
    pools = [torch.empty(kind.shape(1), dtype=torch.float32, device="meta")] * NUM_LAYERS
    frame = bytearray(kind.layout.token_bytes * len(PLACES))
    with _OnOneDevice():
        DevicePools(pools, kind.layout, kind.block_size).scatter(kind.slots, 0, NUM_LAYERS, frame)


@pytest.mark.parametrize(("before", "after"), list(itertools.product([1, 2, 4], repeat=2)))
@pytest.mark.parametrize("kind", [*PACKED, *LATENT], ids=name_of)
def test_kv_of_some_ranks_goes_into_any_other_number_of_them(
    kind: Kind, before: int, after: int
) -> None:
    """Unequal tensor parallel: what one end gathered, the other scatters and gathers again, and no
    byte is another; tokens beside them stay as they were."""
    ranks, others = kind.filled(before), kind.filled(after, seed=1)
    kept = [[pool.clone() for pool in pools] for pools in others]
    sent = gathered(kind, kind.pools(ranks), kind.layout.token_bytes * len(PLACES))
    target = kind.pools(others)
    target.scatter(kind.slots, 0, NUM_LAYERS, sent)
    assert gathered(kind, target, len(sent)) == sent == kind.frame(others, 0, NUM_LAYERS)
    everywhere = itertools.product(range(NUM_BLOCKS), range(kind.block_size))
    untouched = [place for place in everywhere if place not in kind.places]
    heads = 1 if not kind.has_four_axes else kind.shape(after)[1]
    for pools, olds in zip(others, kept, strict=True):
        for (block, offset), head in itertools.product(untouched[::5], range(heads)):
            for part in range(kind.layout.parts):
                place = (part, head, block, offset)
                assert kind.token(pools[1], *place) == kind.token(olds[1], *place)


@pytest.mark.parametrize(
    ("kind", "on_device"),
    [(DENSE[0], False), (LATENT[0], False), (DENSE[1], True), (LATENT[0], True)],
    ids=name_of,
)
def test_a_buffer_may_be_longer_than_its_frame(kind: Kind, on_device: bool) -> None:
    """Staging slots are as long as the longest: what is behind the frame is neither read nor
    written."""
    ranks = kind.filled(1)
    pools = kind.pools(ranks, on_device=on_device)
    wanted = kind.frame(ranks, 0, NUM_LAYERS)
    out = gathered(kind, pools, len(wanted) + 1000)
    assert out[: len(wanted)] == wanted
    assert out[len(wanted) :] == b"\xee" * 1000
    others = kind.empty(1)
    kind.pools(others, on_device=on_device).scatter(
        kind.slots, 0, NUM_LAYERS, bytearray(wanted + b"\xee" * 1000)
    )
    assert kind.frame(others, 0, NUM_LAYERS) == wanted
    changed = sum(int(pool.view(torch.uint8).count_nonzero()) for pool in others[0])
    assert changed == len(wanted) - wanted.count(0)


def test_a_frame_cut_by_tokens_or_layers_is_the_same_kv() -> None:
    """A span may be one frame or many."""
    kind = DENSE[0]
    ranks, others = kind.filled(2), kind.empty(1)
    source, target = kind.pools(ranks), kind.pools(others)
    for layer, token in itertools.product(range(NUM_LAYERS), range(len(PLACES))):
        part = bytearray(kind.layout.token_layer_bytes)
        at = kind.slots[token : token + 1]
        source.gather(at, layer, layer + 1, part)
        target.scatter(at, layer, layer + 1, part)
    assert kind.frame(others, 0, NUM_LAYERS) == kind.frame(ranks, 0, NUM_LAYERS)


def test_more_ranks_than_heads_have_copies_of_them() -> None:
    """Four ranks, two heads: ranks 0 and 1 have the first one, and a scatter writes both copies."""
    kind = dense("bfloat16", is_packed=True, num_heads=2)
    ranks, others = kind.filled(4), kind.empty(4)
    sent = gathered(kind, kind.pools(ranks), kind.layout.token_bytes * len(PLACES))
    kind.pools(others).scatter(kind.slots, 0, NUM_LAYERS, sent)
    for layer in range(NUM_LAYERS):
        bits = [pools[layer].view(torch.int16) for pools in others]
        assert torch.equal(bits[0], bits[1])
        assert torch.equal(bits[2], bits[3])
        assert not torch.equal(bits[0], bits[2])


def test_the_pools_of_all_ranks_are_told_as_bytes() -> None:
    """They are made resident at start."""
    ranks = DENSE[2].filled(2)
    arrays = DENSE[2].pools(ranks).arrays()
    assert len(arrays) == 2 * NUM_LAYERS
    assert sum(one.nbytes for one in arrays) == sum(p.nbytes for r in ranks for p in r)
    assert all(one.dtype == np.uint8 for one in arrays)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_pool_of_another_width_is_refused(on_device: bool) -> None:
    """A release that keeps KV otherwise, or a model whose values are smaller than its keys, must
    not be read as if it did not."""
    kind = DENSE[0]
    ranks = [[pool[..., :-2].contiguous() for pool in pools] for pools in kind.empty(1)]
    with pytest.raises(EngineFailed, match="14 numbers a token and head"):
        kind.pools(ranks, on_device=on_device)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_layer_of_fewer_heads_is_refused(on_device: bool) -> None:
    """One head would be taken for all of them without a word."""
    kind = DENSE[0]
    (pools,) = kind.empty(1)
    pools[1] = pools[1][:, :1].contiguous()
    with pytest.raises(EngineFailed, match="1 heads in a layer"):
        kind.pools([pools], on_device=on_device)


@pytest.mark.parametrize("on_device", [False, True])
def test_kv_beside_that_of_the_layers_is_refused(on_device: bool) -> None:
    """A pool more than there are layers, or one of other numbers: frames have no place for it."""
    kind = DENSE[0]
    (more,) = kind.empty(1)
    more.append(more[0])
    (other,) = kind.empty(1)
    other[1] = other[1].to(torch.uint8)
    for pools in (more, other):
        with pytest.raises(EngineFailed, match="one kind a layer"):
            kind.pools([pools], on_device=on_device)


def test_packed_pools_that_are_no_whole_blocks_are_refused() -> None:
    """Keys and values would be views of copies, and writes would be lost."""
    kind = DENSE[0]
    ranks = [[pool.transpose(1, 2) for pool in pools] for pools in kind.empty(1)]
    with pytest.raises(EngineFailed):
        kind.pools(ranks)
