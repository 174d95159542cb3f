"""Paged attention in Triton: the device code and its launch sizes. ``triton.py`` is its one user.

FlashAttention's online softmax (Dao et al. 2022) over a block table (Kwon et al. 2023,
PagedAttention): keys and values are read where they lie. One kernel serves single tokens and
chunks:

    a program   one tile of queries x one KV head, and of a single token one split of its keys
    a tile      tile_queries tokens of one row x the query heads that read this KV head, as the rows
                of one matrix: what a KV head holds is read once for all of them
    a split     SPLIT_KEYS positions of a row (``batch.py``); what those of a row found is summed up
                by a second kernel (Flash-Decoding, Dao et al. 2023), but by number, not by share:
                so a long row has more programs, and where sums are cut depends on positions alone

Sums are float32. Scores are in units of log2, because the hardware's exponential is 2^x. Loads are
masked, so no program reads a slot that its own row has not written.

``is_exact``: a token's result has the same bits however the step is laid out. Then single tokens
take a chunk's tile, because the matrix units add up in an order of their own for each shape, and
chunks are summed up split by split, as single tokens are. What lies beyond a query's own positions
adds exact zeros.
"""

# What triton says of the types of its language changes with its version.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from shared.engine.batch import SPLIT_KEYS, PagedRows

IS_INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run in Python, on any device's tensors: triton was imported so."""


class Tiles(NamedTuple):
    """Which queries each program takes: int64 ``[num_tiles]`` each.

    rows: a tile's row. offsets: its first token, counted from the row's first.
    """

    rows: torch.Tensor
    offsets: torch.Tensor


class TileShape(NamedTuple):
    """Sizes of one program's matrices. queries: tokens a tile. rows: tokens x heads, filled up to
    what the matrix units take. keys: positions at once. warps, stages: threads a program by the
    warp, and tiles of keys under way at once."""

    queries: int
    rows: int
    keys: int
    warps: int
    stages: int


def tile_shape(group_size: int, head_dim: int, item_bytes: int, *, is_single: bool) -> TileShape:
    """Choose sizes that keep a program's tiles well inside 100 KB of shared memory."""
    keys = 32 if item_bytes > 2 or head_dim > 128 else 64
    if is_single:
        return TileShape(1, _power_of_two(group_size), keys, warps=2, stages=3)
    rows = max(keys, _power_of_two(group_size))
    return TileShape(rows // group_size, rows, keys, warps=4, stages=2)


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write ``[num_tokens, num_kv_heads, head_dim]`` to these slots of
    ``[num_slots, num_kv_heads, head_dim]``; only tokens may lie apart."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    width = num_kv_heads * head_dim
    kernel: Any = _store
    kernel[(num_tokens, -(-width // 1024))](
        keys,
        values,
        key_pool,
        value_pool,
        slots,
        keys.stride(0),
        values.stride(0),
        WIDTH=width,
        TILE=min(1024, _power_of_two(width)),
    )


def attend(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: PagedRows,
    *,
    tiles: Tiles | None,
    num_single: int,
    window: int | None,
    block_size: int,
    is_exact: bool,
) -> None:
    """Write softmax(q k / sqrt(head_dim)) v of the tiles' tokens to ``out``.

    queries, out: ``[num_tokens, num_heads, head_dim]``; only tokens of queries may lie apart.
    tiles: None = the first ``num_single`` rows, which have one token each, row i's at flat index i.
    """
    _, num_heads, head_dim = queries.shape
    num_kv_heads = key_pool.shape[1]
    group_size = num_heads // num_kv_heads
    is_single = tiles is None
    shape = tile_shape(
        group_size, head_dim, queries.element_size(), is_single=is_single and not is_exact
    )
    num_programs = len(rows.split_rows if is_single else tiles.rows)
    # Not touched unless a row has several splits.
    sums = tops = totals = out
    is_split = is_single and num_programs > num_single
    if is_split:
        partial = (num_programs, num_heads)
        sums = torch.empty((*partial, head_dim), dtype=torch.float32, device=out.device)
        tops, totals = torch.empty((2, *partial), dtype=torch.float32, device=out.device)
    sizes: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "DIMS": _power_of_two(head_dim),
        "WINDOW": window or 0,
        "SPLIT_KEYS": SPLIT_KEYS,
    }
    kernel: Any = _attend
    kernel[(num_programs, num_kv_heads)](
        out,
        sums,
        tops,
        totals,
        queries,
        queries.stride(0),
        key_pool,
        value_pool,
        *rows,
        *(tiles or (rows.stops, rows.stops)),  # not touched for single tokens
        head_dim**-0.5 * 1.4426950408889634,  # log2(e)
        **sizes,
        NUM_HEADS=num_heads,
        GROUP=group_size,
        BLOCK_SIZE=block_size,
        TILE_QUERIES=shape.queries,
        TILE_ROWS=shape.rows,
        TILE_KEYS=shape.keys,
        IS_SINGLE=is_single,
        IS_SPLIT=is_split,
        IS_EXACT=is_exact,
        WIDENS=IS_INTERPRETED,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if is_split:
        kernel = _sum_splits
        places = (rows.stops, rows.split_at)
        kernel[(num_single, num_heads)](out, sums, tops, totals, *places, **sizes)


def _power_of_two(size: int) -> int:
    """The next one, or 16: matrix units take no less."""
    return max(16, 1 << (size - 1).bit_length())


# A step's numbers lie one behind the other: their addresses are divisible by 16 in one step and not
# in the next, which must not compile kernels anew.
_NUMBERS = ["slots", *PagedRows._fields, "tile_rows", "tile_offsets"]


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def _store(
    keys, values, key_pool, value_pool, slots, key_stride, value_stride,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = place < WIDTH
    at = tl.load(slots + token) * WIDTH + place
    key = tl.load(keys + token * key_stride + place, mask=mask)
    value = tl.load(values + token * value_stride + place, mask=mask)
    tl.store(key_pool + at, key, mask=mask)
    tl.store(value_pool + at, value, mask=mask)


@triton.jit
def _walk(
    q, position, key_pool, value_pool, table, kv_head, begin, end, scale,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Return of positions [begin, end) each query's highest score, the sum of its weights relative
    to that, and its values, weighted so."""
    dim = tl.arange(0, DIMS)
    is_dim = dim < HEAD_DIM
    top = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_ROWS,), tl.float32)
    acc = tl.zeros((TILE_ROWS, DIMS), tl.float32)
    for at in range(begin, end, TILE_KEYS):
        key = at + tl.arange(0, TILE_KEYS)
        is_key = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
        slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        kv = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(
            key_pool + kv[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )
        if WIDENS:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top, decay, level = _rise(top, tl.max(scores, 1))
        part = tl.exp2(scores - level[:, None])
        total = total * decay + tl.sum(part, 1)
        v = tl.load(
            value_pool + kv[:, None] + dim[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        part = part.to(v.dtype)
        if WIDENS:
            part, v = part.to(tl.float32), v.to(tl.float32)
        acc = acc * decay[:, None] + tl.dot(part, v, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _rise(top, other):
    """Return the higher of two, what becomes of weights relative to the first, and the higher one
    again, but 0 where nothing has been seen yet: that avoids -inf - -inf."""
    new_top = tl.maximum(top, other)
    level = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2(top - level), level


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def _attend(
    out, sums, tops, totals, queries, query_stride, key_pool, value_pool,
    stops, firsts, table_at, tables, split_at, split_rows, tile_rows, tile_offsets, scale,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WINDOW: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    IS_SINGLE: tl.constexpr, IS_SPLIT: tl.constexpr, IS_EXACT: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    tl.static_assert(SPLIT_KEYS % TILE_KEYS == 0)
    tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    if IS_SINGLE:
        row = tl.load(split_rows + tile)
        if row < 0:  # a recorded step has room for more splits than this one's rows have
            return
        first = row
        length = 1
        offset = 0
    else:
        row = tl.load(tile_rows + tile)
        offset = tl.load(tile_offsets + tile)
        first = tl.load(firsts + row)
        length = tl.load(firsts + row + 1) - first
    start = tl.load(stops + row) - length
    table = tables + tl.load(table_at + row)

    #   positions   0 ..... begin .......... start + offset ...... end
    #   keys        unseen  seen by the tile's first query ...... its last query sees up to here
    end = start + tl.minimum(offset + TILE_QUERIES, length)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + offset - WINDOW + 1, 0)
    # Tiles of keys begin at the same positions for every query, so that sums are cut alike.
    begin = begin // TILE_KEYS * TILE_KEYS
    is_whole = True
    if IS_SPLIT:
        is_whole = begin // SPLIT_KEYS == (end - 1) // SPLIT_KEYS
        split = (tile - tl.load(split_at + row)) * SPLIT_KEYS
        if split + SPLIT_KEYS <= begin:
            return
        begin = tl.maximum(begin, split)
        end = tl.minimum(end, split + SPLIT_KEYS)

    index = tl.arange(0, TILE_ROWS)
    query = offset + index // GROUP
    head = kv_head * GROUP + index % GROUP
    is_query = (index // GROUP < TILE_QUERIES) & (query < length)
    position = start + query
    dim = tl.arange(0, DIMS)
    is_dim = dim < HEAD_DIM
    place = ((first + query) * NUM_HEADS + head) * HEAD_DIM
    is_item = is_query[:, None] & is_dim[None, :]
    own = (first + query) * query_stride + head * HEAD_DIM
    q = tl.load(queries + own[:, None] + dim[None, :], mask=is_item, other=0.0)
    if WIDENS:
        # The interpreter takes bfloat16 for integers when it multiplies matrices. Products of two
        # such numbers are exact in float32, so the result is that of the matrix units.
        q = q.to(tl.float32)

    if IS_EXACT and not IS_SINGLE:
        top = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_ROWS,), tl.float32)
        acc = tl.zeros((TILE_ROWS, DIMS), tl.float32)
        for at in range(begin // SPLIT_KEYS * SPLIT_KEYS, end, SPLIT_KEYS):
            other_top, other_total, other = _walk(
                q, position, key_pool, value_pool, table, kv_head,
                tl.maximum(at, begin), tl.minimum(at + SPLIT_KEYS, end), scale,
                HEAD_DIM, DIMS, NUM_KV_HEADS, BLOCK_SIZE, WINDOW, TILE_ROWS, TILE_KEYS, WIDENS,
            )  # fmt: skip
            new_top, decay, level = _rise(top, other_top)
            share = tl.exp2(other_top - level)
            # Which of two products is rounded is said here, and in _sum_splits, not left to the
            # compiler.
            total = tl.fma(other_total, share, total * decay)
            acc = tl.fma(other, tl.broadcast_to(share[:, None], other.shape), acc * decay[:, None])
            top = new_top
    else:
        top, total, acc = _walk(
            q, position, key_pool, value_pool, table, kv_head, begin, end, scale,
            HEAD_DIM, DIMS, NUM_KV_HEADS, BLOCK_SIZE, WINDOW, TILE_ROWS, TILE_KEYS, WIDENS,
        )  # fmt: skip

    if is_whole:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=is_item)
    else:
        partial = tile * NUM_HEADS + head
        tl.store(tops + partial, top, mask=is_query)
        tl.store(totals + partial, total, mask=is_query)
        tl.store(sums + partial[:, None] * HEAD_DIM + dim[None, :], acc, mask=is_item)


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def _sum_splits(
    out, sums, tops, totals, stops, split_at,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WINDOW: tl.constexpr, SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    begin = tl.load(split_at + row)
    end = tl.load(split_at + row + 1)
    if WINDOW > 0:
        begin += tl.maximum(tl.load(stops + row) - WINDOW, 0) // SPLIT_KEYS
    # What lies in one split is written already: ``is_whole`` of _attend.
    if end - begin < 2:
        return
    dim = tl.arange(0, DIMS)
    is_dim = dim < HEAD_DIM
    top = float("-inf")
    total = 0.0
    acc = tl.zeros((DIMS,), tl.float32)
    for split in range(begin, end):
        partial = split * num_heads + head
        other_top = tl.load(tops + partial)
        other = tl.load(sums + partial * HEAD_DIM + dim, mask=is_dim, other=0.0)
        new_top, decay, level = _rise(top, other_top)
        share = tl.exp2(other_top - level)
        total = tl.fma(tl.load(totals + partial), share, total * decay)
        acc = tl.fma(other, tl.broadcast_to(share, other.shape), acc * decay)
        top = new_top
    place = row * num_heads + head
    result = acc / total  # the last split holds the token itself
    tl.store(out + place * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=is_dim)
