"""A folder that is damaged, foreign or dangerous is refused with a message that names the fault."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shared.engine import torch_engine
from shared.engine.models import weights
from shared.engine.models.config import ConfigReader
from shared.engine.models.registry import FAMILIES, read_model_config
from shared.engine.models.weights import Checkpoint
from shared.engine.torch_engine import TorchEngine
from shared.errors import EngineFailed, LocalProtocolError, ModelError
from shared.model_folder import ModelFolder
from shared.step import SampleSpec, StepRow
from tests.support.checkpoints import reference_generate, rewrite_config
from tests.support.engine_driver import Driver, greedy

pytestmark = pytest.mark.torch

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(folder_of: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a private copy of a good Llama folder."""
    return Path(shutil.copytree(folder_of("llama-gqa2"), tmp_path / "model"))


def load(folder: Path, **options: Any) -> TorchEngine:
    return TorchEngine.load(folder, num_blocks=4, **options)


def change_tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], file: str = WEIGHTS
) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder)
    for word in words:
        assert word in caught.value.message


def test_a_pool_larger_than_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded: used, it would have the kernel end the process without a word. The
    usual pool, for which nobody asked, is made."""
    monkeypatch.setattr(torch_engine, "available_bytes", lambda: 1 << 20)
    for asked in ({"kv_bytes": 3 << 30}, {"num_blocks": 1 << 20}):
        with pytest.raises(ModelError, match=r"--kv-gib.* is more than the 0\.0 GiB"):
            TorchEngine.load(folder, **asked)
    TorchEngine.load(folder).close()
    monkeypatch.setattr(torch_engine, "available_bytes", lambda: None)
    TorchEngine.load(folder, num_blocks=1 << 16).close()


NORM = "model.layers.1.input_layernorm.weight"
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), (NORM, "missing")),
        (lambda t: t.update(odd=torch.zeros(3)), ("odd", "not part of")),
        (lambda t: t.update({NORM: torch.ones(63)}), (NORM, "[63]", "[64]")),
        (lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)}), (NORM, "I8")),
        (lambda t: t.update({NORM: torch.ones(64, dtype=torch.float64)}), (NORM, "F64")),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}),
            ("model.layers.2.mlp.up_proj.weight",),
        ),
    ],
    ids=["missing", "extra", "shape", "int8", "float64", "layer too many"],
)
def test_wrong_tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], words: tuple[str, ...]
) -> None:
    """A tensor that is missing, unknown or of another shape or type is named."""
    load(folder)
    change_tensors(folder, change)
    refused(folder, *words)


def test_harmless_extras(folder: Path, folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """Stored rotary tables, and a head that is tied anyway, are passed over."""
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_tensors(folder, lambda tensors: tensors.update(table))
    load(folder)
    tied = Path(shutil.copytree(folder_of("llama-mqa-tied"), tmp_path / "tied"))
    plain = load(tied).forward.logits(torch.ones(1, 64))
    copied = "model.embed_tokens.weight"
    change_tensors(tied, lambda tensors: tensors.update({HEAD: tensors[copied].clone()}))
    # Not bit for bit: the header grew, and products depend on how the mapped weights are aligned.
    padded = load(tied).forward.logits(torch.ones(1, 64))
    assert torch.allclose(padded, plain, atol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_head_that_is_not_the_embedding_counts(
    kernels: str, folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Where config.json says that they are one and the checkpoint has two, answers are those of
    transformers, which takes the checkpoint's; and the model is another one than without it."""
    folder = Path(shutil.copytree(folder_of("llama-mqa-tied"), tmp_path / "tied"))
    tied = load(folder).spec.fingerprint
    torch.manual_seed(1)
    change_tensors(folder, lambda tensors: tensors.update({HEAD: torch.randn(199, 64)}))
    prompts = [[3, 1, 4, 1, 5], [9]]
    engine = TorchEngine.load(folder, kernels=kernels, num_blocks=16)
    driver = Driver(engine)
    answers = [driver.run_alone(prompt, greedy(8)).output for prompt in prompts]
    assert answers == reference_generate(folder, prompts, 8)
    assert engine.spec.fingerprint != tied


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_tied_matrix_by_the_name_of_the_head(
    kernels: str, folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    """As safetensors' save_model names it; transformers reads both."""
    folder = Path(shutil.copytree(folder_of("llama-mqa-tied"), tmp_path / "tied"))
    embedding = "model.embed_tokens.weight"
    change_tensors(folder, lambda tensors: tensors.update({HEAD: tensors.pop(embedding)}))
    driver = Driver(TorchEngine.load(folder, kernels=kernels, num_blocks=16))
    answer = driver.run_alone([3, 1, 4], greedy(8)).output
    assert [answer] == reference_generate(folder, [[3, 1, 4]], 8)


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 100, 40_000])
def test_truncated_weights(folder: Path, num_bytes: int) -> None:
    """A file that ends early is refused before any tensor is read."""
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:num_bytes])
    refused(folder, WEIGHTS)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "vector"])
def test_weights_that_shrink_while_they_are_loaded(folder: Path, is_fused: bool) -> None:
    """What is read, and not mapped, is missed as an error that names the tensor."""
    checkpoint = Checkpoint(ModelFolder(folder))
    name = "model.layers.0.self_attn.q_proj.weight" if is_fused else NORM
    info = checkpoint.tensors[name]
    read = partial(checkpoint.read_into, torch.empty(info.shape)) if is_fused else checkpoint.get
    os.truncate(info.path, info.begin + 5)
    with pytest.raises(ModelError, match=f"{name}: the file ends too soon"):
        read(name)


def test_a_file_that_is_exchanged_while_it_is_loaded(folder: Path) -> None:
    """What is read by its place comes from the file whose header was checked; what would be mapped
    is refused."""
    before = load_file(folder / WEIGHTS)[NORM].clone()
    checkpoint = Checkpoint(ModelFolder(folder))
    other = folder / "other"
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, other)
    digest = checkpoint.digest(vocab_size=199)
    other.replace(folder / WEIGHTS)
    assert torch.equal(checkpoint.get(NORM), before)
    assert checkpoint.digest(vocab_size=199) == digest
    assert Checkpoint(ModelFolder(folder)).digest(vocab_size=199) != digest
    with pytest.raises(ModelError, match="exchanged or written while it was loaded"):
        checkpoint.get("model.layers.0.self_attn.o_proj.weight")


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_file_that_is_written_while_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Its new weights would be computed under the fingerprint of what was there before."""
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / "new")

    def write() -> None:
        shutil.copy(folder / "new", folder / WEIGHTS)

    monkeypatch.setattr("shared.engine.torch_engine.keep_precision", write)
    with pytest.raises(ModelError, match="written while it was loaded"):
        TorchEngine.load(folder, num_blocks=8, kernels=kernels)


def test_hostile_headers(folder: Path) -> None:
    """A header that is huge, no JSON, or lies about its tensors is refused."""
    path = folder / WEIGHTS
    good = path.read_bytes()

    def with_header(header: bytes) -> bytes:
        return struct.pack("<Q", len(header)) + header + bytes(64)

    def entry(**changes: object) -> bytes:
        fields = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}
        return json.dumps({NORM: fields}).encode()

    for data, word in (
        (struct.pack("<Q", 1 << 40) + good[8:], "header"),
        (with_header(b"{nonsense"), "JSON"),
        (with_header(b"[1]"), "object"),
        (with_header(b"[" * 100_000), "JSON"),
        (with_header(entry(shape=[5])), NORM),
        (with_header(entry(shape=[-4])), NORM),
        (with_header(entry(data_offsets=[16, 0])), NORM),
        (with_header(entry(data_offsets=[0, 1 << 50])), NORM),
        (with_header(entry(data_offsets=[0])), NORM),
        (with_header(json.dumps({NORM: 7}).encode()), NORM),
        (with_header(entry()[:-1] + b"," + entry().replace(b"layers.1", b"layers.0")[1:]), "share"),
    ):
        path.write_bytes(data)
        refused(folder, WEIGHTS, word)


def test_pickle_is_never_loaded(folder: Path) -> None:
    """A folder with pickled weights only says how to mend it; the file is not opened."""
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never read")
    refused(folder, "pickle", "safe_serialization")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "model.safetensors.index.json")


def test_index_is_checked(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """An index may only name safetensors files of the folder, and must say where tensors are."""
    shards = folder_of("llama-gqa4-biases", shard_bytes=60_000)
    folder = Path(shutil.copytree(shards, tmp_path / "m"))
    path = folder / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    names = sorted(good["weight_map"])

    def with_map(**changes: object) -> None:
        path.write_text(json.dumps({"weight_map": {**good["weight_map"], **changes}}))

    with_map(**{names[0]: "../elsewhere.safetensors"})
    refused(folder, "plain file name")
    with_map(**{names[0]: "weights.bin"})
    refused(folder, names[0], "weights.bin")
    with_map(**{names[0]: "absent.safetensors"})
    refused(folder, "absent.safetensors")
    # Of one that is alone in its shard nobody would know where it is: the index led there.
    files = list(good["weight_map"].values())
    names = [name for name in names if files.count(good["weight_map"][name]) > 1]
    other = next(f for f in good["weight_map"].values() if f != good["weight_map"][names[0]])
    with_map(**{names[0]: other})
    refused(folder, names[0], other)
    path.write_text('{"weight_map": {}}')
    refused(folder, "weight_map")
    with_map(**{"model.layers.0.self_attn.rotary_emb.inv_freq": other})
    load(folder)  # needless: it is computed
    with_map()
    load(folder)
    change_tensors(folder, lambda tensors: tensors.pop(names[0]), good["weight_map"][names[0]])
    refused(folder, names[0], "missing")
    (folder / other).unlink()
    refused(folder, other)


def test_links_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    """A link may not leave the folder, unless to the blobs of the hub cache that it lies in."""
    outside = tmp_path / "outside.safetensors"
    shutil.move(folder / WEIGHTS, outside)
    (folder / WEIGHTS).symlink_to(outside)
    refused(folder, WEIGHTS, "link")

    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    load(snapshot)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ("MixtralForCausalLM", "LlamaForCausalLM")),
        ({"architectures": None, "model_type": "gpt2"}, ("gpt2",)),
        ({"hidden_size": None}, ("hidden_size", "missing")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'")),
        ({"num_hidden_layers": True}, ("num_hidden_layers",)),
        ({"num_attention_heads": 0}, ("num_attention_heads",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads 3",)),
        ({"head_dim": 15}, ("head_dim 15",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"rms_norm_eps": -1}, ("rms_norm_eps",)),
        ({"vocab_size": 198}, ("model.embed_tokens.weight", "[198, 64]")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, ("'dynamic'",)),
        ({"rope_parameters": {"rope_type": "linear"}}, ("rope_parameters: factor",)),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4},
                "original_max_position_embeddings": 0,
            },
            ("rope_scaling", "original_max_position_embeddings 0"),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1}},
            ("rope_parameters", "rope_theta 1"),
        ),
        ({"rope_parameters": {"full_attention": {}}}, ("layer types",)),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor",)),
        ({"rope_parameters": 3}, ("rope_parameters",)),
        ({"attention_bias": True}, ("model.layers.0.self_attn.q_proj.bias", "missing")),
        ({"attention_bias": "yes"}, ("attention_bias",)),
        ({"eos_token_id": ["a"]}, ("eos_token_id",)),
        ({"dtype": "int4"}, ("int4",)),
        ({"max_position_embeddings": 0}, ("max_position_embeddings",)),
        ({"max_position_embeddings": 1}, ("max_model_len 1", "2 to 1")),
        ({"num_hidden_layers": 1 << 24}, ("num_hidden_layers", "up to 10000")),
        ({"head_dim": 10**400}, ("head_dim", "up to 2147483647")),
        ({"rope_theta": 10**400}, ("rope_theta", "up to 1e99")),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 1e308}},
            ("rope_parameters: factor", "up to 1e99"),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 5e-324}},
            ("rope_parameters: beta_fast", "5e-324"),
        ),
    ],
    ids=str,
)
def test_bad_config(folder: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """What config.json says and we do not compute is refused, by key."""
    rewrite_config(folder, lambda values: values.update(changes))
    refused(folder, *words)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bad_number_of_layers_takes_no_memory(family: str) -> None:
    """It is refused before anything is made a layer, whatever the family."""
    values = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1 << 22}
    reader = ConfigReader(values | {"use_sliding_window": True}, "config.json")
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"num_hidden_layers .* up to 10000"):
            FAMILIES[family](reader)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


FAMILY_DEFAULTS = {
    "llama": ("llama-mha", transformers.LlamaConfig),
    "mistral": ("mistral-no-window", transformers.MistralConfig),
    "qwen2": ("qwen2-tied", transformers.Qwen2Config),
    "qwen3": ("qwen3-own-head-dim", transformers.Qwen3Config),
}


@pytest.mark.parametrize("family", FAMILY_DEFAULTS)
def test_what_a_config_leaves_out(
    family: str, folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Is what transformers takes for that family; a null means as many KV heads as heads."""
    shape, config_class = FAMILY_DEFAULTS[family]
    folder = Path(shutil.copytree(folder_of(shape), tmp_path / "model"))

    def read(change: Callable[[dict[str, Any]], object]) -> tuple[int, int]:
        rewrite_config(folder, lambda values: change(values) and None)
        config = read_model_config(ModelFolder(folder))
        return config.max_position_embeddings, config.num_kv_heads

    def leave_out(values: dict[str, Any]) -> None:
        for key in ("max_position_embeddings", "num_key_value_heads"):
            del values[key]
        values.update(num_attention_heads=64, hidden_size=1024)

    left_out = config_class(num_attention_heads=64)
    assert read(leave_out) == (left_out.max_position_embeddings, left_out.num_key_value_heads)
    changed = read(lambda values: values.update(num_key_value_heads=None))
    assert changed == (left_out.max_position_embeddings, 64)


def test_a_length_may_be_a_float(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """Transformers reads 128.0 as 128; half a position is none."""
    folder = Path(shutil.copytree(folder_of("llama-llama3-rope"), tmp_path / "model"))
    want = read_model_config(ModelFolder(folder))

    def rope(length: float) -> None:
        key = "original_max_position_embeddings"
        rewrite_config(folder, lambda values: values["rope_parameters"].update({key: length}))

    rope(128.0)
    assert read_model_config(ModelFolder(folder)) == want
    rope(128.5)
    refused(folder, "original_max_position_embeddings", "128.5")


def test_bad_qwen_windows(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """layer_types must fit the layers and the window."""
    folder = Path(shutil.copytree(folder_of("qwen2-window-upper"), tmp_path / "m"))
    for changes, word in (
        ({"layer_types": ["full_attention"]}, "3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "sliding_window"),
    ):
        rewrite_config(folder, lambda values, changes=changes: values.update(changes))
        refused(folder, word)


def test_bad_json(folder: Path) -> None:
    """No config.json, or one that is not a JSON object, is refused."""
    path = folder / "config.json"
    for text in ("{", "[]", "\x00", "[" * 100_000):
        path.write_text(text)
        refused(folder, "config.json")
    path.unlink()
    refused(folder, "config.json")
    refused(folder / "nowhere", "nowhere")


def test_arguments_are_checked(folder: Path) -> None:
    """Arguments that do not fit the model are refused; a device that is not there is a failure."""
    for options in (
        {"dtype": "int8"},
        {"max_model_len": 0},
        {"max_model_len": 4096},
        {"block_size": 0},
    ):
        with pytest.raises(ModelError):
            load(folder, **options)
    with pytest.raises(ModelError):
        TorchEngine.load(folder, kv_bytes=100)
    if not torch.cuda.is_available():
        with pytest.raises(EngineFailed):
            load(folder, device="cuda")


def test_spec(folder: Path) -> None:
    """The spec says what was loaded: name, lengths, end ids of both files, size of the pool."""
    rewrite_config(folder, lambda values: values.update(eos_token_id=7))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    engine = TorchEngine.load(folder, kv_bytes=1 << 20, max_model_len=100, block_size=8)
    assert engine.spec.name == "model"
    assert engine.spec.max_model_len == 100
    assert engine.spec.vocab_size == 199
    assert engine.spec.eos_token_ids == {7, 9}
    assert engine.num_blocks == (1 << 20) // (8 * engine.layout.token_bytes)
    assert load(folder, name="other").spec.name == "other"


def test_fingerprint(folder: Path, folder_of: Callable[..., Path]) -> None:
    """It changes with config, weights, dtype and end-of-sequence, and with nothing else."""
    first = load(folder).spec.fingerprint
    assert len(first) == 32
    assert load(folder_of("llama-gqa2"), max_model_len=64, block_size=4).spec.fingerprint == first
    others = [
        load(folder, dtype="bfloat16").spec.fingerprint,
        load(folder_of("llama-gqa2", seed=1)).spec.fingerprint,
        load(folder_of("llama-gqa2", eos_token_id=3)).spec.fingerprint,
    ]
    rewrite_config(folder, lambda values: values.update(rms_norm_eps=1e-4))
    others.append(load(folder).spec.fingerprint)
    assert len({first, *others}) == 5


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_fingerprint_of_a_fine_tune(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one matrix in a layer alone, as adapters are merged, far from the ends of a large file."""
    monkeypatch.setattr(weights, "FINGERPRINT_EDGE_BYTES", 1)
    change_tensors(folder, lambda _: None)  # the header is another from here on
    first = load(folder).spec.fingerprint
    change_tensors(folder, lambda tensors: tensors[f"model.layers.0.{name}.weight"].mul_(1.01))
    assert load(folder).spec.fingerprint != first


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_fingerprint_of_new_tokens(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tune may change the rows of its special tokens alone, wherever they are."""
    monkeypatch.setattr(weights, "FINGERPRINT_EDGE_BYTES", 1000)
    change_tensors(folder, lambda _: None)  # the header is another from here on
    known = {load(folder).spec.fingerprint}
    for row in (3, 190):
        change_tensors(folder, lambda tensors, at=row: tensors[f"{name}.weight"][at].mul_(1.01))
        known.add(load(folder).spec.fingerprint)
    assert len(known) == 3


def test_bad_rows_are_refused_before_they_run(folder: Path) -> None:
    """A row that would read out of bounds raises LocalProtocolError, and the engine lives on."""
    engine = load(folder, max_model_len=40)
    for row in (
        StepRow([], 0, [0]),
        StepRow([199], 0, [0]),
        StepRow([-1], 0, [0]),
        StepRow([1], -1, [0]),
        StepRow([1], 0, [4]),
        StepRow([1], 0, [-1]),
        StepRow([1] * 17, 0, [0]),
        StepRow([1], 40, [0, 1, 2]),
        StepRow([1, 2], 0, [0], None, 0, [3, 4, 5]),
    ):
        with pytest.raises(LocalProtocolError):
            engine.step([row])
    assert engine.step([]) == []
    assert len(Driver(engine).run_alone([1, 2, 3], greedy(3)).output) == 3


def test_torch_errors_become_engine_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch raises in a step ends as EngineFailed with its first line, and what helps."""
    engine = load(folder)

    def lost(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left\nlong trace")

    monkeypatch.setattr(engine.forward, "run", lost)
    with pytest.raises(EngineFailed, match=r"^a step failed: no memory left; .*--gpu-memory-share"):
        engine.step([StepRow([1], 0, [0], SampleSpec(greedy(1), 0, (), ()))])


def test_close_twice(folder: Path) -> None:
    """Closing an engine frees its memory, and again does nothing."""
    engine = load(folder)
    engine.close()
    engine.close()
    with pytest.raises(AttributeError):
        engine.pool_arrays()
