"""The native kernels: the same function as torch's, the same bits for every way of batching."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.native import build, library
from shared.engine.sampling.guides import Masks
from shared.engine.torch_engine import TorchEngine
from shared.errors import LocalProtocolError, ModelError
from shared.step import SampleSpec, StepRow
from tests.support.checkpoints import SHAPES
from tests.support.engine_driver import greedy
from tests.support.house import ROOT
from tests.support.native import needs_native, quick_compiler
from tests.support.tiers import few

pytestmark = pytest.mark.torch

EngineOf = Callable[..., TorchEngine]
LENGTH = 150


WAYS = {
    "bfloat16": ("bfloat16", "native"),
    "bfloat16 avx512-bf16": ("bfloat16", "avx512-bf16"),
    "bfloat16 avx512": ("bfloat16", "avx512"),
    "bfloat16 avx2": ("bfloat16", "avx2"),
    "float32": ("float32", "native"),
    "float32 avx2": ("float32", "avx2"),
}
every_way = pytest.mark.parametrize("native_of", few(WAYS, "bfloat16 avx2"), indirect=True)


@pytest.fixture
def native_of(
    folder_of: Callable[..., Path], request: pytest.FixtureRequest
) -> Iterator[Callable[..., TorchEngine]]:
    """Load a shape on the native kernels: in bfloat16 by the quickest, or one of ``WAYS``."""
    dtype, kernels = WAYS[getattr(request, "param", "bfloat16")]
    needs_native(dtype, kernels if kernels in build.INSTRUCTIONS else "")
    engines: list[TorchEngine] = []

    def engine(shape: str, **options: object) -> TorchEngine:
        options = {"num_blocks": 40, "kernels": kernels, **options}
        engines.append(TorchEngine.load(folder_of(shape, dtype=dtype), **options))
        return engines[-1]

    threads = torch.get_num_threads()
    yield engine
    torch.set_num_threads(threads)
    for one in engines:
        one.close()


def prompt_of(shape: str, length: int = LENGTH, seed: int = 0) -> list[int]:
    """Return random token ids."""
    rng = random.Random(f"{shape} {seed}")
    return [rng.randrange(SHAPES[shape].vocab) for _ in range(length)]


def hidden_of(engine: TorchEngine, tokens: list[int], cuts: list[int], table: list[int]):
    """Return hidden states of a prompt computed in chunks that end at ``cuts``."""
    parts = []
    with torch.inference_mode():
        for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            passed = engine.forward.run([StepRow(tokens[start:stop], start, table)], [], None)
            parts.append(passed.hidden().clone())
    return torch.cat(parts)


@every_way
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_however_a_prompt_is_cut(shape: str, native_of: EngineOf) -> None:
    """Whole, in chunks, token by token, in another place of the pool, with other block sizes."""
    tokens = prompt_of(shape)
    whole = hidden_of(native_of(shape), tokens, [], list(range(10)))
    engine = native_of(shape, block_size=5)
    for cuts in ([1, 64, 65], [100, 149], list(range(1, LENGTH))):
        table = random.Random(len(cuts)).sample(range(40), 30)
        assert torch.equal(hidden_of(engine, tokens, cuts, table), whole)


@every_way
@pytest.mark.parametrize("shape", ["llama-gqa2", "qwen3-bias-mixed-windows", "mistral-window"])
def test_same_bits_in_any_company(shape: str, native_of: EngineOf) -> None:
    """A sequence gets the same hidden states alone and in a batch of prompts and single tokens."""
    engine = native_of(shape, num_blocks=200)
    prompts = [prompt_of(shape, length, length) for length in (40, 7, 130, 66, 1, 91, 13)]
    tables = [list(range(10 * idx, 10 * idx + 10)) for idx in range(len(prompts))]
    alone = [
        hidden_of(engine, tokens, [], table) for tokens, table in zip(prompts, tables, strict=True)
    ]
    moved = [[block + 100 for block in table] for table in tables]
    with torch.inference_mode():
        # All but the last token in one batch, then every last token in one.
        rows = [
            StepRow(tokens[:-1], 0, table)
            for tokens, table in zip(prompts, moved, strict=True)
            if len(tokens) > 1
        ]
        engine.forward.run(rows, [], None)
        rows = [
            StepRow(tokens[-1:], len(tokens) - 1, table)
            for tokens, table in zip(prompts, moved, strict=True)
        ]
        last = engine.forward.run(rows, [], None).hidden()
        assert torch.equal(last, torch.stack([states[-1] for states in alone]))
        mixed = [*rows[:3], StepRow(prompts[5], 0, list(range(190, 200))), *rows[3:]]
        passed = engine.forward.run(mixed, [], None)
        stop = passed.lasts[3] + 1
        assert torch.equal(passed.hidden()[stop - len(prompts[5]) : stop], alone[5])


def test_same_bits_with_any_number_of_threads(native_of: EngineOf) -> None:
    """Threads share the work; they do not change it."""
    tokens = prompt_of("llama-gqa2")
    one, three = (native_of("llama-gqa2", num_threads=count) for count in (1, 3))
    table = list(range(10))
    assert torch.equal(hidden_of(one, tokens, [], table), hidden_of(three, tokens, [], table))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", build.NUMBERS)
def test_same_bits_on_any_cpu(dtype: str, shape: str, folder_of: Callable[..., Path]) -> None:
    """Hidden states, logits and KV, whatever instructions the kernels are made of: workers of
    unequal machines give the same answers."""
    tokens, table = prompt_of(shape, 70), list(range(5))
    states, logits, keys = [], [], []
    for name in build.usable_instructions(dtype):
        engine = TorchEngine.load(folder_of(shape, dtype=dtype), num_blocks=5, kernels=name)
        assert engine.machine["kernels"] == f"native, {name}"
        has_own_bits = name in build.OWN_BITS
        assert engine.spec.engine == ("torch amx" if has_own_bits else "torch")
        if has_own_bits:
            continue
        states.append(hidden_of(engine, tokens, [], table))
        with torch.inference_mode():
            logits.append(engine.forward.logits(states[-1]).clone())
        keys.append(torch.stack(list(engine._kv.keys)))
        engine.close()
    assert len(states) > 1 or pytest.skip("this CPU has one kind of instructions")
    for same in (states, logits, keys):
        assert all(torch.equal(one, same[0]) for one in same[1:])


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_are_reported_in_order_and_change_nothing(shape: str, native_of: EngineOf) -> None:
    """A layer's KV is in the pool when it is reported, and the result is that of one call."""
    engine = native_of(shape)
    tokens, seen = prompt_of(shape, 70), []

    def on_layer(layer: int) -> None:
        seen.append((layer, bool(engine._kv.keys[layer][:70].any())))

    with torch.inference_mode():
        plain = engine.forward.run([StepRow(tokens, 0, list(range(5)))], [], None).hidden().clone()
        for pool in [*engine._kv.keys, *engine._kv.values]:
            pool.zero_()
        told = engine.forward.run([StepRow(tokens, 0, list(range(5)))], [], on_layer).hidden()
        assert torch.equal(plain, told)
    assert seen == [(layer, True) for layer in range(engine.layout.num_layers)]


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 10, 13, 64, 97, 200, 800])
@pytest.mark.parametrize(("rows", "k"), [(64, 64), (200, 96), (33, 130), (1, 2), (70, 5000)])
def test_a_product_is_that_of_torch(count: int, rows: int, k: int) -> None:
    """Every way to cut rows into tiles and k into stretches, and matrices that fill no panel; and
    numbers that no normal bfloat16 holds."""
    generator = torch.Generator().manual_seed(count * rows + k)
    matrix = torch.randn(rows, k, generator=generator).to(torch.bfloat16)
    x = torch.randn(count, k, generator=generator).to(torch.bfloat16)
    x[0] *= 2.0**-126
    want = x.double() @ matrix.double().T
    got = {
        (dtype, name): library.load(dtype, name).product(matrix.to(dtype))(x.to(dtype))
        for dtype in (torch.bfloat16, torch.float32)
        for name in build.usable_instructions(str(dtype).removeprefix("torch."))
    }
    assert got or pytest.skip("no native kernels")
    for (dtype, name), product in got.items():
        # One rounding to bfloat16 of a float32 sum; or the sum.
        rounding = 2**-8 if dtype == torch.bfloat16 else 0
        assert torch.allclose(product.double(), want, rtol=rounding, atol=1e-4 * k**0.5)
        same = as_amx_adds(x, matrix) if name in build.OWN_BITS else got[dtype, "avx2"]
        assert torch.equal(product, same)


def as_amx_adds(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x @ matrix.T`` as Intel's manual has TDPBF16PS: of each 32 numbers the even products in one
    chain, the odd ones in another, then both, then that to the sum. Inputs and results that are
    too small for a normal number are zero."""

    def flushed(values: torch.Tensor) -> torch.Tensor:
        return torch.where(values.abs() < 2.0**-126, torch.zeros_like(values), values)

    count, k = x.shape
    left, right = flushed(x.float()), flushed(matrix.float())
    total = torch.zeros(count, matrix.shape[0])
    for start in range(0, k, 32):
        chains = torch.zeros(2, *total.shape)
        for at in range(start, min(start + 32, k)):
            # Exact, so that this is one rounding, as a fused multiply-add has it.
            exact = left[:, at, None] * right[None, :, at]
            chains[at % 2] = flushed(chains[at % 2] + exact)
        total = flushed(total + flushed(chains[0] + chains[1]))
    return total.to(torch.bfloat16)


def test_helpers_end_with_the_thread_that_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own, as many as it asks for, and all compute the same."""
    needs_native()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    matrix, x = torch.randn(640, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    product = library.load(torch.bfloat16).product(matrix)
    expected = product(x)
    tasks = Path("/proc/self/task")
    before = len(list(tasks.iterdir()))

    def compute(_: int) -> int:
        assert all(product(x).equal(expected) for _ in range(50))
        return len(list(tasks.iterdir()))

    with ThreadPoolExecutor(3) as threads:
        assert max(threads.map(compute, range(3))) >= before + 1 + 4
    deadline = time.monotonic() + 30  # a thread is joined a little before its helpers are
    while len(list(tasks.iterdir())) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_most_likely_token_is_the_first_of_equals(native_of: EngineOf) -> None:
    """What the kernels find on the way is what argmax finds."""
    engine = native_of("llama-gqa2", num_blocks=70)
    with torch.inference_mode():
        rows = [StepRow([idx], 0, [idx]) for idx in range(70)]
        passed = engine.forward.run(rows, range(70), None)
        logits = passed.logits()
        assert passed.best is not None
        assert logits.dtype == torch.float32
        # bfloat16 logits tie now and then.
        firsts = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        assert passed.best() == firsts.tolist()
        vocab = logits.shape[1]
        places = range(1, 70, 2)
        chance = np.random.default_rng(3)
        bits = chance.integers(0, 256, (len(places), 4 * -(-vocab // 32)), np.uint8)
        bits[0] = 0
        bits[0, (vocab - 1) // 8] = 1 << (vocab - 1) % 8  # the last token alone
        allowed = torch.ones(logits.shape, dtype=torch.bool)
        found = np.unpackbits(bits, axis=1, bitorder="little")[:, :vocab]
        allowed[list(places)] = torch.from_numpy(found).bool()
        want = logits.where(allowed, -torch.inf)
        passed.deny(Masks(places, bits, {}))
        assert torch.equal(passed.logits(), want)
        assert passed.best() == want.argmax(-1).tolist()
        assert passed.best()[1] == vocab - 1


def test_a_plain_step_asks_nothing_of_torch(native_of: EngineOf) -> None:
    """A tensor that nobody reads costs a step tens of us: torch is out of the caches by then."""
    engine = native_of("llama-gqa2")

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    plain, drawn = (SampleSpec(greedy(1, temperature=heat), 0, [], []) for heat in (0.0, 1.0))
    rows = [StepRow([idx], 0, [idx], plain) for idx in range(3)]
    engine.step(rows)  # makes what is made once
    with Counting() as counting:
        results = engine.step(rows)
        assert counting.calls == 0
        mixed = engine.step([*rows[:2], StepRow([2], 0, [2], drawn)])
        assert counting.calls > 0
    assert results[:2] == mixed[:2]


@pytest.mark.parametrize(
    "row",
    [
        StepRow([], 0, [0]),
        StepRow([1], -1, [0]),
        StepRow([199], 0, [0]),
        StepRow([-1], 0, [0]),
        StepRow([1 << 40], 0, [0]),
        StepRow([1] * 17, 0, [0]),
        StepRow([1], 0, [40]),
        StepRow([1], 0, [-1]),
        StepRow([1], 2048, list(range(40))),
    ],
)
def test_bad_rows_are_refused_before_anything_runs(row: StepRow, native_of: EngineOf) -> None:
    """Unknown tokens and blocks, and rows that do not fit, never reach the kernels."""
    engine = native_of("llama-gqa2")
    with pytest.raises(LocalProtocolError):
        engine.step([StepRow([1], 0, [1]), row])
    assert not any(pool.any() for pool in engine._kv.keys)


def test_kernels_are_chosen(
    folder_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto falls back to torch, in float32, and says why; native insists; torch never compiles."""
    folder = folder_of("llama-gqa2", dtype="bfloat16")
    monkeypatch.setattr(build, "unsupported", lambda _: "this CPU lacks everything")
    library._found.cache_clear()
    try:
        engine = TorchEngine.load(folder, num_blocks=2)
        assert type(engine.forward).__name__ == "TorchForward"
        assert engine.spec.dtype == engine.layout.dtype == "float32"
        assert {weight.dtype for weight in engine.forward.weights} == {torch.float32}
        sample = SampleSpec(greedy(1), 0, (), ())
        assert engine.step([StepRow([1], 0, [0], sample)])[0].token_id >= 0
        with pytest.raises(ModelError, match="native kernels cannot run here: this CPU lacks"):
            TorchEngine.load(folder, num_blocks=2, kernels="native")
    finally:
        library._found.cache_clear()
    with pytest.raises(ModelError, match="they compute bfloat16 and float32, not float16"):
        TorchEngine.load(folder, num_blocks=2, dtype="float16", kernels="native")


def test_what_is_computed_is_said(folder_of: Callable[..., Path]) -> None:
    """With what, in which dtype, and whether answers may depend on their batch: only 16 bits on
    torch's kernels do, which on a CPU nobody gets who does not ask for them, and is warned then."""

    def said(stored: str, **options: Any) -> tuple[str, str, str, str]:
        with capture_logs() as logs:
            TorchEngine.load(folder_of("llama-gqa2", dtype=stored), num_blocks=2, **options)
        (line,) = (one for one in logs if one["event"] == "model is computed")
        return line["log_level"], line["dtype"], line["kernels"], line["answers"]

    tokens = "the same tokens in any batch, but where two tie"
    any_of_them = ("float32", "bfloat16", "float16")
    for stored in any_of_them:
        assert said(stored, kernels="torch") == ("info", "float32", "torch", tokens)
        assert said(stored, kernels="torch", exact=True)[3] == tokens
    for stored in any_of_them[1:]:
        level, dtype, _, answers = said(stored, kernels="torch", dtype=stored)
        assert (level, dtype) == ("warning", stored)
        assert answers == "may depend on their batch and on failover"
        with pytest.raises(ModelError, match=f"--exact: sums of {stored} on torch's kernels"):
            said(stored, kernels="torch", dtype=stored, exact=True)
    needs_native()
    bits = ("info", "bfloat16", "native", "the same bits in any batch")
    assert said("bfloat16") == said("bfloat16", exact=True) == bits
    for stored in ("float32", "float16"):
        assert said(stored) == ("info", "float32", *bits[2:])


def test_a_gpus_products_are_not_rounded_on_the_way(
    folder_of: Callable[..., Path],
) -> None:
    """Whatever torch's defaults and the environment say."""
    products = torch.backends.cuda.matmul
    switches = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    for name in switches:
        setattr(products, name, True)
    TorchEngine.load(folder_of("llama-gqa2"), num_blocks=2)
    for name in switches:
        # (reduced, split-k) for the reductions in newer versions of torch.
        assert not np.any(getattr(products, name)), name


@pytest.mark.slow
def test_a_build_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use compiles into the user's cache; the next finds it, without a compiler."""
    needs_native()
    monkeypatch.setattr(build, "HERE", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler := quick_compiler(tmp_path))
    assert loaded_anew() == ("avx2", "")
    (made,) = (tmp_path / "pdmesh" / "native").glob("*.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert loaded_anew() == ("avx2", "")
    data = made.read_bytes()
    damages = (data[:0], data[:4000], data[: len(data) // 2], data[:-1], b"\0" * len(data))
    for damaged in damages:  # the loader would end the process with some of them
        made.unlink()  # what this process has loaded stays as it is
        made.write_bytes(damaged)
        with pytest.raises(build.Unavailable, match=r"no C\+\+ compiler"):
            loaded_anew()
    monkeypatch.setenv("CXX", compiler)
    assert loaded_anew() == ("avx2", "")
    assert len(made.read_bytes()) == len(data)


def test_what_was_brought_is_passed_over_where_it_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel's kernels need no compiler; damaged ones, others' and those of other sources are
    told, and the next best are taken."""
    needs_native()
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", quick_compiler(tmp_path))
    monkeypatch.setattr(build, "_name", lambda *what: f"kernels-{'-'.join(what)}-{'0' * 16}.so")
    best, *lesser = build.usable_instructions("bfloat16")
    made = build.compile_into(tmp_path, "bfloat16", "avx2", portable=True)
    monkeypatch.setenv("CXX", "no-such-compiler")

    def said() -> list[str]:
        with capture_logs() as logs:
            assert loaded_anew("")[0] == "avx2"
        (line,) = (one for one in logs if one["event"] == "native kernels loaded")
        assert (line["kernels"], line["outcome"]) == ("bfloat16 by avx2", "brought with pdmesh")
        return [one["reason"] for one in logs if one["event"] == "compiled kernels passed over"]

    assert said() == []
    if not lesser:
        pytest.skip("this CPU has one kind of instructions")
    assert "no C++ compiler" in loaded_anew("")[1]
    better = tmp_path / build._name("bfloat16", best)
    better.write_bytes(made.read_bytes()[:-1])
    assert said() == ["it is damaged"]
    foreign = b"of another machine"
    better.write_bytes(foreign + build._digest(foreign))
    (reason,) = said()
    assert "kernels-bfloat16" in reason
    better.rename(tmp_path / f"kernels-bfloat16-{best}-{'1' * 16}.so")
    assert said() == ["it was made of other sources"]


def loaded_anew(instructions: str = "avx2") -> tuple[str, str]:
    """Return what a new process would load for bfloat16: its instructions and their shortfall."""
    library._found.cache_clear()
    try:
        found = library.load(torch.bfloat16, instructions)
    finally:
        library._found.cache_clear()
    return found.instructions, found.shortfall


@pytest.mark.slow
def test_the_next_best_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is too old for the best makes lesser ones; where the cache cannot be written
    or is mounted noexec, and where what is in it was made for other libraries, they are compiled
    all the same."""
    needs_native()
    monkeypatch.setattr(build, "HERE", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = quick_compiler(tmp_path)
    best, *lesser = build.usable_instructions("bfloat16")
    if lesser:
        flag = build._options("bfloat16", best)[-1]
        unknown = f'case " $* " in *" {flag} "*) echo \'error: what is {flag}?\'; exit 1;; esac'
        monkeypatch.setenv("CXX", program(tmp_path / "old", f'{unknown}; exec {compiler} "$@"'))
        instructions, shortfall = loaded_anew("")
        assert instructions == lesser[0]
        assert f"not by {best}: " in shortfall
        assert f"what is {flag}?" in shortfall

    monkeypatch.setenv("CXX", compiler)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "compiled at every start: " in loaded_anew()[1]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "noexec"))
    with monkeypatch.context() as patched:
        mount_noexec(patched, tmp_path / "noexec")
        assert "noexec/pdmesh/native is mounted noexec (set XDG" in loaded_anew()[1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    made = tmp_path / "other" / "pdmesh" / "native" / build._name("bfloat16", "avx2")
    made.parent.mkdir(parents=True)
    foreign = b"of another machine"
    made.write_bytes(foreign + build._digest(foreign))
    assert loaded_anew() == ("avx2", "")
    assert build._is_whole(made)
    assert len(made.read_bytes()) > 10_000


def mount_noexec(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the system say so of a folder: to mount one takes root."""
    asked = os.statvfs

    def answered(path: Path) -> SimpleNamespace:
        is_inside = Path(path).is_relative_to(folder)
        return SimpleNamespace(f_flag=asked(path).f_flag | os.ST_NOEXEC * is_inside)

    patched.setattr(os, "statvfs", answered)


def program(path: Path, body: str) -> str:
    """Write a shell script and return its path."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_an_install_brings_the_sources() -> None:
    """Without one of them no installed worker could compile, or find what was compiled."""
    settings = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text())["tool"]["setuptools"]
    brought = settings["package-data"]["shared.engine.native"]
    assert {path.name for path in build.SOURCES} <= {*brought}
    assert {*build.HERE.glob("*.cpp"), *build.HERE.glob("*.h")} == {*build.SOURCES}


@pytest.mark.slow
def test_an_image_gets_all_kernels(tmp_path: Path) -> None:
    """What the Dockerfile copies for its stage of kernels is enough to make them."""
    needs_native()
    stage = (Path(ROOT) / "Dockerfile").read_text().split(" AS native\n")[1].split("\nFROM ")[0]
    for source, target in re.findall(r"^COPY (shared/\S+) (\S+)$", stage, re.M):
        if (Path(ROOT) / source).is_dir():
            shutil.copytree(Path(ROOT) / source, tmp_path / target, ignore=_COMPILED)
        else:
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(ROOT) / source, tmp_path / target)
    (command,) = re.findall(r"^RUN (.*) \\$", stage, re.M)
    assert command == "python3 -m shared.engine.native.build"
    alone = {"PATH": os.environ["PATH"], "CXX": quick_compiler(tmp_path)}
    subprocess.run([sys.executable, *command.split()[1:]], cwd=tmp_path, env=alone, check=True)
    made = (tmp_path / "shared/engine/native").glob("*.so")
    assert len(list(made)) == sum(len(build._helpful(numbers)) for numbers in build.NUMBERS)


_COMPILED = shutil.ignore_patterns("*.so", "__pycache__")


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, r"no C\+\+ compiler"),
        ("echo 'no such option' >&2; exit 1", "no such option"),
        ("exit 0", "made no library"),
        ('for it; do :; done; echo rubbish > "$it"', "made no library"),
        ('for it; do :; done; head -c 4000 /bin/sh > "$it"', "made no library"),
        ("kill -9 $$", "failed"),
        ("head -c 200 /bin/sh; exit 1", "failed"),
        ("sleep 60", "took more than 0.3 s"),
        ("sleep 60 & wait", "took more than 0.3 s"),
    ],
)
def test_why_there_is_no_build(
    compiler: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler and with a broken one: the reason is told, and nothing is left behind."""
    monkeypatch.setenv("CXX", program(tmp_path / "c++", compiler) if compiler else "no-such")
    if "0.3" in said:
        monkeypatch.setattr(build, "TIMEOUT_S", 0.3)
    with pytest.raises(build.Unavailable, match=said):
        build.compile_into(tmp_path / "made", "bfloat16", "avx2")
    assert {path.name for path in (tmp_path / "made").glob("*")} <= {".lock"}


@pytest.mark.parametrize(
    ("asked", "first"),
    [("{} -DPD_ASKED", "-DPD_ASKED"), ("'{} 2' -DPD_ASKED", "-DPD_ASKED"), ("{} 2", "-std=c++17")],
)
def test_a_compiler_with_words_of_its_own(
    asked: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CXX may hold a command and its first words, as "ccache g++", or a path with spaces."""
    for name in ("c++", "c++ 2"):
        program(tmp_path / name, 'echo "error: asked for $1"; exit 1')
    monkeypatch.setenv("CXX", asked.format(tmp_path / "c++"))
    with pytest.raises(build.NotMade, match=f"asked for {re.escape(first)}$"):
        build.compile_into(tmp_path / "made", "bfloat16", "avx2")


def test_where_no_build_can_be_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is named; what is on PATH as a compiler and is no program is not taken for it."""
    needs_native()
    with pytest.raises(build.NoPlace, match="/proc/nowhere cannot be written"):
        build.compile_into(Path("/proc/nowhere"), "bfloat16", "avx2")
    full = program(
        tmp_path / "full", "echo 'ld: final link failed: No space left on device'; exit 1"
    )
    monkeypatch.setenv("CXX", full)
    with pytest.raises(build.NoPlace, match="cannot be written: No space left"):
        build.compile_into(tmp_path, "bfloat16", "avx2")
    with monkeypatch.context() as patched:
        mount_noexec(patched, tmp_path)
        with pytest.raises(build.NoPlace, match="is mounted noexec"):
            build.compile_into(tmp_path, "bfloat16", "avx2")
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "text"))
    with pytest.raises(build.NotMade, match="cannot be run"):
        build.compile_into(tmp_path, "bfloat16", "avx2")


@pytest.mark.slow
def test_who_waits_for_a_compiler_that_hangs_believes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that start together lose its limit once, not one after the other."""
    monkeypatch.setattr(build, "TIMEOUT_S", 1.0)
    monkeypatch.setenv("CXX", program(tmp_path / "c++", f"echo >> {tmp_path}/calls; sleep 60"))

    def compile_it(_: int) -> str:
        with pytest.raises(build.Unavailable) as caught:
            build.compile_into(tmp_path / "made", "bfloat16", "avx2")
        return str(caught.value)

    with ThreadPoolExecutor(4) as workers:
        reasons = list(workers.map(compile_it, range(4)))
    assert {"took more than 1 s" in reason for reason in reasons} == {True}
    assert (tmp_path / "calls").read_text().count("\n") == 1
    compile_it(0)  # one that comes later tries for itself
    assert (tmp_path / "calls").read_text().count("\n") == 2


@pytest.mark.parametrize(("rows", "k"), [(64, 64), (100, 66), (1, 2), (31, 34), (40_000, 64)])
def test_packed_from_a_file_as_from_memory(rows: int, k: int, tmp_path: Path) -> None:
    """Whole and partial groups of rows, one piece and several, from any place of a file."""
    needs_native()
    kernels = library.load(torch.bfloat16)
    matrix = torch.randn(rows, k).to(torch.bfloat16)
    path = tmp_path / "matrix"
    path.write_bytes(b"head" + matrix.view(torch.int16).numpy().tobytes() + b"tail")
    room = (2, -(-rows // library.PANEL) * library.PANEL * k)
    panels = torch.zeros(room, dtype=torch.bfloat16)
    with path.open("rb") as file:
        shape = {"rows": rows, "k": k, "width": library.PANEL}
        jobs = (
            library.PackJob(matrix=matrix.data_ptr(), panels=panels[0].data_ptr(), **shape),
            library.PackJob(file=file.fileno(), position=4, panels=panels[1].data_ptr(), **shape),
        )
        assert [job.problem for job in kernels.pack(jobs)] == ["", ""]
    # Pairs of k side by side, in panels of 64 columns.
    columns = panels[0].view(-1, k // 2, library.PANEL, 2).permute(0, 2, 1, 3).reshape(-1, k)
    assert torch.equal(columns[:rows], matrix)
    assert columns[rows:].count_nonzero() == 0
    assert torch.equal(panels[0], panels[1])


@pytest.mark.parametrize("rows", [40, 64, 70])
def test_packed_beside_others(rows: int) -> None:
    """After other rows, from a column in the middle of a group; and side by side in halves."""
    needs_native()
    k, half = 34, library.PANEL // 2
    kernels = library.load(torch.bfloat16)
    above, below = (torch.randn(rows, k).to(torch.bfloat16) for _ in range(2))

    def packed(*places: dict[str, int]) -> torch.Tensor:
        panels = torch.zeros(3, k // 2, library.PANEL, 2, dtype=torch.bfloat16)
        jobs = [
            library.PackJob(
                matrix=one.data_ptr(), rows=rows, k=k, panels=panels.data_ptr(), **place
            )
            for one, place in zip((above, below), places, strict=True)
        ]
        kernels.pack(jobs)
        return panels.permute(0, 2, 1, 3).reshape(-1, k)

    stacked = packed({"width": 64, "first": 3}, {"width": 64, "first": 3 + rows})
    assert torch.equal(stacked[3 : 3 + 2 * rows], torch.cat((above, below)))
    halves = packed({"width": half}, {"width": half, "offset": half}).view(3, 2, half, k)
    assert torch.equal(halves[:, 0].reshape(-1, k)[:rows], above)
    assert torch.equal(halves[:, 1].reshape(-1, k)[:rows], below)


def test_a_file_that_cannot_be_packed(tmp_path: Path) -> None:
    """One that ends too soon and one that cannot be read are told, and the others are packed."""
    needs_native()
    path = tmp_path / "matrix"
    path.write_bytes(bytes(64 * 64 * 2 - 1))
    panels = torch.full((3, 64 * 64), 7.0, dtype=torch.bfloat16)
    with path.open("rb") as file, path.open("ab") as writer:
        places = ((file, 64), (writer, 16), (file, 16))
        jobs = [
            library.PackJob(file=one.fileno(), rows=rows, k=64, panels=room.data_ptr(), width=64)
            for (one, rows), room in zip(places, panels, strict=True)
        ]
        problems = [job.problem for job in library.load(torch.bfloat16).pack(jobs)]
    assert problems == ["the file ends too soon", "Bad file descriptor", ""]
    assert panels[2].view(32, 64, 2)[:, :16].count_nonzero() == 0


def test_weights_that_shrink_while_they_are_loaded(
    folder_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is cut after its header was checked is an error that names it: packing from a
    mapped one would end the process."""
    needs_native()
    source = folder_of("llama-gqa2", dtype="bfloat16")
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    pack = library.Library.pack

    def cut_and_pack(
        self: library.Library, jobs: Sequence[library.PackJob]
    ) -> Sequence[library.PackJob]:
        os.truncate(folder / "model.safetensors", max(job.position for job in jobs) + 1)
        return pack(self, jobs)

    monkeypatch.setattr(library.Library, "pack", cut_and_pack)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .* the file ends too soon"):
        TorchEngine.load(folder, num_blocks=4, kernels="native")
