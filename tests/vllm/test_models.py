"""Families, attentions and quantisations: our engine over vLLM answers as vLLM alone does."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config import PrefillConfig
from shared.engine.load import load_engine
from shared.engine.native.build import unsupported
from shared.errors import EngineFailed, MeshError, ModelError
from tests.support.engine_driver import Driver, greedy
from tests.support.remote_engine import remote_engine
from tests.support.vllm_checkpoints import reference
from tests.vllm.conftest import EAGER, EngineOf

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_NEW = 12
LENGTHS = (5, 33, 100, 300)

MODELS: dict[str, dict[str, Any]] = {
    # mixtures of experts
    "mixtral": {},
    "qwen3_moe": {},
    # sliding windows: of all layers, of every other one
    "mistral": {},
    "gemma3": {},
    "gpt_oss": {},
    # dense families that our own engine does not know
    "phi3": {},
    "glm4": {},
    "olmo2": {},
    # its weights have a latent rank, and vLLM keeps keys and values
    "minicpm3": {},
    # quantised weights
    "w8a8": {"dtype": "bfloat16"} if torch.cpu._is_amx_tile_supported() else {},
    "w4a16": {"dtype": "bfloat16"},
    "awq": {"dtype": "bfloat16"},
    "gptq": {"dtype": "bfloat16"},
}
"""Family -> settings beside float32, in which vLLM has no int8 on a CPU with AMX."""

LATENT = ("deepseek_v2", "deepseek_v3")
"""A latent vector instead of keys and values. vLLM's backend for it on a CPU calls itself a
reference: even in vLLM alone two equal prompts of one batch get different answers. So each prompt
is asked alone and whole here."""


def prompts() -> list[list[int]]:
    source = random.Random(9)
    return [[source.randrange(3, 500) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def truth(folder_of: Callable[[str], Path]) -> Callable[..., list[list[int]]]:
    """What vLLM alone says."""

    def answers(family: str, **others: Any) -> list[list[int]]:
        return reference(folder_of(family), prompts(), NUM_NEW, **others)

    return answers


QUICK = ("mixtral", "gemma3", "w8a8", "awq", "deepseek_v2")
"""One of each kind; all others together take long."""


NEED_AVX512 = ("awq", "gptq", "w4a16")
"""vLLM's CPU kernels for them, and for KV in eight bits, are for nothing less."""


def needs_avx512() -> None:
    """Skip the running test where vLLM cannot compute it."""
    if reason := unsupported("avx512"):
        pytest.skip(f"vLLM cannot compute this here: {reason}")


def each(families: Iterable[str]) -> list[Any]:
    return [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.nightly)
        for family in families
    ]


@pytest.mark.parametrize("family", each(MODELS))
def test_a_model_says_what_vllm_alone_says(
    family: str, engine_of: EngineOf, truth: Callable[..., list[list[int]]]
) -> None:
    """Alone, in chunks, beside others, and after its KV has moved to other blocks."""
    if family in NEED_AVX512:
        needs_avx512()
    settings = MODELS[family]
    want = truth(family, **settings)
    driver = Driver(engine_of(family, **settings))
    params = greedy(NUM_NEW)
    require_alone_and_moved(driver, want)
    assert [driver.run_alone(prompt, params, chunk=40).output for prompt in prompts()] == want
    mixed = driver.run_mixed(prompts(), [params] * len(want), max_chunk=90)
    assert [one.output for one in mixed] == want


@pytest.mark.parametrize("family", each(LATENT))
def test_a_latent_vector_moves_as_keys_and_values_do(
    family: str, engine_of: EngineOf, truth: Callable[..., list[list[int]]]
) -> None:
    """One part of one head, in blocks of 16: alone as vLLM alone, and the same after a move."""
    driver = Driver(engine_of(family))
    layout = driver.engine.layout
    assert (layout.parts, layout.num_kv_heads, layout.head_dim) == (1, 1, 576)
    assert driver.engine.block_size == 16
    alone = {"block_size": 16, "attention_backend": "CPU_MLA"}
    require_alone_and_moved(driver, truth(family, one_by_one=True, **alone))


def require_alone_and_moved(driver: Driver, want: list[list[int]]) -> None:
    """A prompt alone and whole, and what goes on from its KV in other blocks, say this."""
    engine, params = driver.engine, greedy(NUM_NEW)
    assert [driver.run_alone(prompt, params).output for prompt in prompts()] == want
    for prompt, answer in zip(prompts(), want, strict=True):
        first, moved = driver.start(prompt, params), driver.start(prompt, params)
        row = first.row(1 << 30)
        first.commit(row, engine.step([row])[0])
        at = (0, len(prompt), 0, engine.layout.num_layers)
        frame = engine.new_buffer(engine.layout.token_bytes * len(prompt))
        engine.gather(first.block_table, *at, frame)
        assert np.count_nonzero(frame)
        engine.scatter(moved.block_table, *at, frame)
        moved.num_computed, moved.output = len(prompt), list(first.output)
        while not moved.is_done:
            row = moved.row(1)
            moved.commit(row, engine.step([row])[0])
        assert moved.output == answer
        driver.finish(first)
        driver.finish(moved)


@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_a_model_whose_state_is_not_kv_is_refused(family: str, engine_of: EngineOf) -> None:
    """With a sentence that says what it has."""
    with pytest.raises(ModelError, match=r"cannot be handed|attention"):
        engine_of(family)


def test_a_model_whose_layers_keep_heads_of_several_sizes_is_refused(engine_of: EngineOf) -> None:
    """Not for an attention backend that nobody has named: vLLM chooses one for such models, which
    its CPU build passes over."""
    with pytest.raises(EngineFailed, match="must be of one size, in all layers"):
        engine_of("gemma4")


def test_kv_in_fp8_moves_with_its_bits(engine_of: EngineOf) -> None:
    """Half the bytes of a 16-bit layout, and the tokens that the engine says without a move; a
    layout of another dtype is another one."""
    needs_avx512()
    plain = engine_of("llama", dtype="bfloat16")
    driver = Driver(engine_of("llama", dtype="bfloat16", vllm_args="kv_cache_dtype=fp8_e4m3"))
    layout = driver.engine.layout
    assert layout.dtype == "fp8_e4m3"
    assert layout.token_bytes * 2 == plain.layout.token_bytes
    assert layout.digest != plain.layout.digest
    params = greedy(NUM_NEW)
    want = [driver.run_alone(prompt, params).output for prompt in prompts()]
    require_alone_and_moved(driver, want)


def test_a_model_that_arguments_change_is_another_one(engine_of: EngineOf) -> None:
    """Else a worker whose rotary angles are others would take KV, and read back what it had kept
    before; ranks and whatever else is for speed change nothing."""
    plain = engine_of("llama").spec.fingerprint
    changed = engine_of("llama", vllm_args="""hf_overrides='{"rope_theta":20000.0}'""")
    assert changed.spec.fingerprint != plain
    assert engine_of("llama", vllm_args="stream_interval=2").spec.fingerprint == plain


def test_sinks_and_windows_on_several_threads(engine_of: EngineOf) -> None:
    """The same answer each time, with the same logprobs: split among threads, vLLM's kernel gives
    others."""
    driver = Driver(engine_of("gpt_oss", threads=2))
    params = greedy(NUM_NEW, logprobs=0)
    done = [driver.run_alone(prompts()[-1], params) for _ in range(6)]
    assert all(one.results == done[0].results for one in done)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"num_blocks": 3}, "--num-blocks"), ({"num_blocks": 0, "kv_gib": 0.0001}, "--kv-gib")],
)
def test_kv_that_is_too_small_names_what_sizes_it(
    settings: Mapping[str, Any], flag: str, engine_of: EngineOf
) -> None:
    """VLLM advises an argument that has no effect on a CPU."""
    with pytest.raises(ModelError, match=f"increasing {flag} or decreasing --max-model-len"):
        engine_of("llama", **settings)


def test_angles_that_follow_the_longest_context_make_another_model(engine_of: EngineOf) -> None:
    """Phi-3's long ones: what was computed with the short ones would be read as if with them."""
    change = "hf_overrides=" + json.dumps(
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 16,
                "long_factor": [4.0] * 16,
                "original_max_position_embeddings": 400,
            }
        },
        separators=(",", ":"),
    )
    engines = [engine_of("phi3", vllm_args=f"'{change}'", max_model_len=it) for it in (400, 800)]
    short, long = (Driver(it).run_alone(prompts()[2], greedy(NUM_NEW)).output for it in engines)
    assert short != long
    assert engines[0].spec.fingerprint != engines[1].spec.fingerprint


def test_sizes_that_do_not_fit_the_weights_are_told(engine_of: EngineOf) -> None:
    """VLLM asserts them without a word."""
    with pytest.raises(ModelError, match=r"assert .*hf_overrides do not fit its weights\?"):
        engine_of("llama", vllm_args="""hf_overrides='{"vocab_size":1000}'""")


def test_weights_are_those_of_the_fingerprint_and_all_of_them(
    folder_of: Callable[[str], Path], engine_of: EngineOf, tmp_path: Path
) -> None:
    """A file of other weights in the folder is not read. Part of what is one parameter in vLLM
    (q, k and v), or the head, is missed: answers were noise. In ranks, too."""
    folder = tmp_path / "llama"
    shutil.copytree(folder_of("llama"), folder)
    whole = load_file(folder / "model.safetensors")
    save_file({name: it * 2 for name, it in whole.items()}, folder / "other.safetensors")

    def config(*arguments: str) -> PrefillConfig:
        return PrefillConfig(
            engine="vllm",
            device="cpu",
            model=str(folder),
            vllm_args=" ".join([EAGER, *arguments]),
            dtype="float32",
            num_blocks=96,
            threads=1,
        )

    want = Driver(engine_of("llama")).run_alone(prompts()[1], greedy(NUM_NEW)).output
    with remote_engine(config()) as engine:
        assert Driver(engine).run_alone(prompts()[1], greedy(NUM_NEW)).output == want
    for lost, named, arguments in (
        ("lm_head", "lm_head", ()),
        ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.qkv_proj", ()),
        (
            "model.layers.1.mlp.up_proj",
            "model.layers.1.mlp.gate_up_proj",
            ("tensor_parallel_size=2",),
        ),
    ):
        rest = {name: it for name, it in whole.items() if name != f"{lost}.weight"}
        save_file(rest, folder / "model.safetensors")
        with (
            pytest.raises(ModelError, match=f"has not all of {named}"),
            remote_engine(config(*arguments)),
        ):
            pass


@pytest.mark.parametrize(
    ("lost", "named"), [("norm", "norm"), ("layers.1.self_attn.k_proj", "layers.1.*qkv_proj")]
)
def test_of_a_quantised_model_nothing_may_lack(
    lost: str, named: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A norm is missed, which was served as ones; and codes whose scales are there, which were
    served as the highest."""
    folder = tmp_path / "w8a8"
    shutil.copytree(folder_of("w8a8"), folder)
    rest = load_file(folder / "model.safetensors")
    del rest[f"model.{lost}.weight"]
    save_file(rest, folder / "model.safetensors")
    config = PrefillConfig(
        engine="vllm", device="cpu", model=str(folder), vllm_args=EAGER, num_blocks=96, threads=1
    )
    with pytest.raises(ModelError, match=f"has not all of model.{named}"), remote_engine(config):
        pass


def _load_amid_exchange(folder: Path, told: Connection) -> None:
    def begins(part: str) -> None:
        if "loading weights" in part:
            (folder / "new").replace(folder / "model.safetensors")

    config = PrefillConfig(
        engine="vllm", device="cpu", model=str(folder), vllm_args=EAGER, num_blocks=96, threads=1
    )
    try:
        load_engine(config, begins)
    except ModelError as error:
        told.send(str(error))


def test_weights_that_are_exchanged_amid_the_load_are_refused(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The new ones were computed under the old ones' fingerprint, whose KV others keep."""
    folder = tmp_path / "llama"
    shutil.copytree(folder_of("llama"), folder)
    shutil.copy(folder / "model.safetensors", folder / "new")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_load_amid_exchange, args=(folder, theirs))
    child.start()
    theirs.close()
    assert "exchanged or written while it was loaded" in ours.recv()  # EOFError: it was not refused
    child.join()


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("kv_cache_dtype=int8_per_token_head", ModelError),
        pytest.param(
            """kv_cache_dtype=fp8 kv_cache_dtype_skip_layers='["0"]'""",
            EngineFailed,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_kv_that_frames_have_no_place_for_is_refused(
    argument: str, error: type[MeshError], engine_of: EngineOf
) -> None:
    """Scales beside it, or layers that keep it in another dtype."""
    needs_avx512()
    with pytest.raises(error, match="KV"):
        engine_of("llama", dtype="bfloat16", vllm_args=argument)
