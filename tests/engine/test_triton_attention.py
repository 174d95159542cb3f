"""Triton's attention is that of plain torch, for every shape of batch, pool and heads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from shared.engine.attention import triton
from shared.engine.attention.sdpa import SdpaAttention
from shared.engine.attention.triton import TritonAttention
from shared.engine.batch import StepBatch, flatten_rows
from shared.engine.memory.paged_kv import TORCH_DTYPES, PagedKv
from shared.kv.layout import KvLayout
from shared.step import StepRow
from tests.support.interpreted import DEVICE, needs_triton
from tests.support.tiers import few

needs_triton()
pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class Case:
    """rows: (start, number of tokens). is_exact: see ``TritonAttention``."""

    rows: Sequence[tuple[int, int]]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    dtype: str = "float32"
    is_exact: bool = False


# Keys go by 64, or 32 in float32; 16-bit chunks by 64 rows of (token, head), float32 ones by 32.
MIXED = ((0, 1), (31, 1), (32, 1), (63, 1), (64, 1), (150, 1), (0, 7), (20, 45), (63, 3), (0, 33))
# A split is 256 positions.
LONG = ((255, 1), (256, 1), (600, 1), (3, 1), (250, 20))

CASES = {
    "mixed": Case(MIXED),
    "mixed, exact": Case(MIXED, is_exact=True),
    "long": Case(LONG, 1),
    "long, exact": Case(LONG, 1, is_exact=True),
    "long, window": Case(LONG, window=270),
    "long, window within a split": Case(LONG, window=100, dtype="bfloat16"),
    "long, window, exact": Case(LONG, 1, 3, window=270, is_exact=True),
    "one long row, blocks of 7 tokens": Case(((600, 1),), 1, 4, block_size=7, dtype="bfloat16"),
    "window": Case(MIXED, window=24),
    "window of one": Case(((40, 1), (3, 20)), window=1),
    "window beyond all": Case(MIXED[4:8], window=4096),
    "blocks of one token": Case(MIXED[2:7], block_size=1),
    "blocks of 7 tokens": Case(MIXED[2:8], block_size=7),
    "blocks of 100 tokens": Case(MIXED[4:8], block_size=100),
    "head_dim 80, 7 heads a group": Case(MIXED[3:8], 1, 7, 80, 5, 24),
    "head_dim 128, no groups": Case(MIXED[4:7], 3, 1, 128),
    "head_dim 64, 20 heads a group": Case(((40, 1), (10, 4)), 1, 20, 64),
    "head_dim 256": Case(MIXED[5:7], 1, 2, 256),
    "bfloat16": Case(MIXED, 2, 4, 64, dtype="bfloat16"),
    "bfloat16, window": Case(MIXED, 1, 3, 80, window=40, dtype="bfloat16"),
    "float16": Case(MIXED[2:8], 2, 1, 128, window=33, dtype="float16"),
}
QUICK_CASES = (
    "long, exact",
    "window",
    "blocks of 7 tokens",
    "head_dim 80, 7 heads a group",
    "bfloat16",
)

# Both sum in float32 and round weights and result to the dtype once, in another order, and the
# interpreter cuts bfloat16 off where hardware rounds: a few units in the last place of values
# around 1.
TOLERANCE = {"float32": 4e-6, "bfloat16": 3 * 2**-8, "float16": 3 * 2**-11}


def _random_case(seed: int) -> Case:
    rng = random.Random(seed)
    singles = [(rng.choice((rng.randrange(140), 400)), 1) for _ in range(rng.randrange(4))]
    chunks = [(rng.choice((0, rng.randrange(60))), rng.randrange(2, 50)) for _ in range(2)]
    return Case(
        rng.sample([*singles, *chunks], len(singles) + 2),
        kv_heads=rng.choice((1, 2, 3)),
        group=rng.choice((1, 2, 4, 5)),
        head_dim=rng.choice((16, 24, 64, 80)),
        block_size=rng.choice((1, 3, 8, 16, 32)),
        window=rng.choice((None, None, 5, 33)),
        dtype=rng.choice(("float32", "bfloat16")),
        is_exact=rng.choice((False, True)),
    )


class Setting:
    """A pool of noise, rows in it, and this step's queries, keys and values."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self.layout = KvLayout(
            dtype=case.dtype, num_layers=1, num_kv_heads=case.kv_heads, head_dim=case.head_dim
        )
        self.dtype = TORCH_DTYPES[case.dtype]
        self.generator = torch.Generator().manual_seed(seed)
        counts = [-(-(start + length) // case.block_size) for start, length in case.rows]
        num_blocks = sum(counts) + 3
        self.kv = PagedKv(self.layout, num_blocks, case.block_size, DEVICE)
        for pool in (self.kv.keys[0], self.kv.values[0]):
            pool.copy_(self.noise(*pool.shape))
        # Block 0 is nobody's: a load that lacks its mask would go there.
        free = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)
        self.rows: list[StepRow] = []
        for (start, length), count in zip(case.rows, counts, strict=True):
            table = [free.pop() for _ in range(count)]
            self.rows.append(StepRow([1] * length, start, table))
        self.batch: StepBatch = flatten_rows(
            self.rows, self.kv, vocab_size=2, max_model_len=1 << 20, device=DEVICE
        )
        num_heads = case.kv_heads * case.group
        heads = self.noise(self.batch.num_tokens, num_heads + 2 * case.kv_heads, case.head_dim)
        # As the decoder hands them over: parts of one projection.
        parts = heads.split((num_heads, case.kv_heads, case.kv_heads), 1)
        self.queries, self.keys, self.values = parts

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def attend(self, attention: SdpaAttention | TritonAttention) -> torch.Tensor:
        window = self.case.window
        plan = attention.plan(self.batch, [window], self.dtype)[window]
        attention.store(self.kv, 0, self.keys, self.values, self.batch)
        return attention.attend(self.kv, 0, self.queries, self.keys, self.values, plan)

    def triton(self) -> TritonAttention:
        case = self.case
        return TritonAttention(self.layout, case.kv_heads * case.group, is_exact=case.is_exact)


def _same(case: Case) -> None:
    setting = Setting(case)
    want = setting.attend(SdpaAttention())
    got = setting.attend(setting.triton())
    tolerance = TOLERANCE[case.dtype]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", few(CASES.values(), *map(CASES.get, QUICK_CASES)), ids=CASES)
def test_it_is_the_attention_of_plain_torch(case: Case) -> None:
    """Singles and chunks over block, tile and split borders, all kinds of heads and windows."""
    _same(case)


@pytest.mark.parametrize("seed", few(range(12), 1, 2, 3))
def test_it_is_the_attention_of_plain_torch_for_random_batches(seed: int) -> None:
    """Whatever comes together in a step."""
    _same(_random_case(seed))


@pytest.mark.parametrize("case", [Case(MIXED, block_size=7), Case(MIXED, dtype="bfloat16")])
def test_it_stores_exactly_this_steps_tokens(case: Case) -> None:
    """The same bits at the same slots as plain torch, and no other slot touched."""
    one, two = Setting(case), Setting(case)
    SdpaAttention().store(one.kv, 0, one.keys, one.values, one.batch)
    two.triton().store(two.kv, 0, two.keys, two.values, two.batch)
    assert torch.equal(one.kv.keys[0], two.kv.keys[0])
    assert torch.equal(one.kv.values[0], two.kv.values[0])


@pytest.mark.parametrize("rows", few([MIXED, LONG], MIXED))
def test_it_reads_only_what_its_own_rows_have_written(rows: Sequence[tuple[int, int]]) -> None:
    """NaN in every other slot, unused ends of the rows' own blocks included, reaches no result."""
    setting = Setting(Case(rows))
    want = setting.attend(setting.triton())
    known = torch.zeros(setting.kv.keys[0].shape[0], dtype=torch.bool)
    size = setting.kv.block_size
    for row in setting.rows:
        for position in range(row.start + len(row.token_ids)):
            known[row.block_table[position // size] * size + position % size] = True
    for pool in (setting.kv.keys[0], setting.kv.values[0]):
        pool[~known.to(DEVICE)] = float("nan")
    assert (~known).sum() > 3 * size
    assert torch.equal(setting.attend(setting.triton()), want)


EXACT = {
    "float32": Case((), 1, 2, is_exact=True),
    "bfloat16, window": Case((), 1, 7, 32, 5, window=140, dtype="bfloat16", is_exact=True),
    "float16, no groups": Case((), 2, 1, 32, dtype="float16", is_exact=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_exact_results_do_not_know_how_a_sequence_is_cut(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in chunks beside other rows, and single tokens at the edges of splits, alone and
    beside others: the same bits."""
    for module in ("batch", "attention.triton_kernels"):
        monkeypatch.setattr(f"shared.engine.{module}.SPLIT_KEYS", 128)
    length = 290
    whole = Setting(replace(case, rows=((0, length),)))
    want = whole.attend(whole.triton())
    others = ((280, 1), (9, 20))
    for start, stop in ((0, 140), (140, 141), (141, 290)):
        assert torch.equal(_part(whole, start, stop, others), want[start:stop]), (start, stop)
    for position in (0, 127, 128, 256, 289):
        for company in ((), others[:1]):
            got = _part(whole, position, position + 1, company)
            assert torch.equal(got, want[position : position + 1]), (position, company)


def _part(whole: Setting, start: int, stop: int, others: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Compute a part of the sequence again, in one step with rows that read its blocks too, and
    whose queries are noise."""
    table = whole.rows[0].block_table
    rows = [StepRow([1] * count, first, table) for first, count in others]
    rows.append(StepRow([1] * (stop - start), start, table))
    batch = flatten_rows(rows, whole.kv, vocab_size=2, max_model_len=1 << 20, device=DEVICE)
    queries = whole.noise(batch.num_tokens, *whole.queries.shape[1:])
    own = next(extent for extent in batch.extents if extent.row_idx == len(others))
    queries[own.first : own.last] = whole.queries[start:stop]
    attention, window = whole.triton(), whole.case.window
    plan = attention.plan(batch, [window], whole.dtype)[window]
    return attention.attend(whole.kv, 0, queries, queries, queries, plan)[own.first : own.last]


def test_why_it_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No triton, no CUDA, or a kernel that does not compile: a reason each, and never a crash."""
    layout = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=16)

    def reason() -> str:
        return triton.unsupported(layout, 2, block_size=4, device=DEVICE)

    assert reason() == ""
    kernels = triton._kernels()
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "attend", _fail)
        assert reason() == "triton's kernels do not run on this device: out of shared memory"
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "IS_INTERPRETED", False)
        why = triton.unsupported(layout, 2, block_size=4, device=torch.device("cpu"))
        assert why == "triton computes on CUDA, not on cpu"
    with monkeypatch.context() as patched:
        patched.setattr(triton, "_kernels", _missing)
        assert reason() == "triton cannot be imported (No module named 'triton')"


def _fail(*_: object, **__: object) -> None:
    raise ValueError("out of shared memory\nRequired: 1")


def _missing() -> object:
    raise ImportError("No module named 'triton'")
