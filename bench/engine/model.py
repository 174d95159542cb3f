"""The model of these measurements: a random Llama of 125 M parameters in bfloat16, in two formats.

Run with transformers (``make``: our environment) and with gguf (``convert``: llama.cpp's). Weights
are random, so speed is all that can be compared; what each engine really runs in is asserted.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCAB = 32_000
MAX_LEN = 8192
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LEN,
}


LARGER = {
    **SIZES,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
"""1.1 B parameters, of TinyLlama's shape."""

MODELS = {"125m": SIZES, "1.1b": LARGER}


def write_llama(folder: Path, no_text: Sequence[int] = (), **shape: Any) -> None:
    """Write a random checkpoint as transformers does. no_text: ids whose logits are 0, below the
    best of a thousand others."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    with torch.no_grad():
        model.lm_head.weight[list(no_text)] = 0.0
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100GB")


def make(folder: Path, sizes: dict[str, int] = SIZES) -> None:
    write_llama(folder, (), **sizes, bos_token_id=None, eos_token_id=None)


def convert(folder: Path, target: Path, sizes: dict[str, int]) -> None:
    """Write the same weights as GGUF, and the tokenizer if there is one; matrices stay bfloat16."""
    import gguf  # pyright: ignore[reportMissingImports]
    import numpy as np

    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(MAX_LEN)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_rope_dimension_count(sizes["hidden_size"] // sizes["num_attention_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_tokenizer(writer, folder / "tokenizer.json")
    for name, shape, words in _tensors(folder / "model.safetensors"):
        kind, layer = _gguf_name(name)
        matrix = np.asarray(words).reshape(shape)
        if kind in ("attn_q", "attn_k"):
            heads = "num_attention_heads" if kind == "attn_q" else "num_key_value_heads"
            matrix = _permuted(matrix, sizes[heads])
        full = f"{kind}.weight" if layer is None else f"blk.{layer}.{kind}.weight"
        if matrix.ndim == 1:  # norms are float32 there
            wide = (matrix.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(full, wide)
        else:
            octets = matrix.view(np.uint8)
            writer.add_tensor(full, octets, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, path: Path) -> None:
    """Write a byte-level BPE as transformers saves it. Ids beyond its tokens are nobody's text."""
    import gguf  # pyright: ignore[reportMissingImports]

    if not path.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    found = json.loads(path.read_text())
    tokens = [f"<|unused {idx}|>" for idx in range(VOCAB)]
    kinds = [gguf.TokenType.UNUSED] * VOCAB
    for token, idx in found["model"]["vocab"].items():
        tokens[idx], kinds[idx] = token, gguf.TokenType.NORMAL
    for added in found["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in found["model"]["merges"]])
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _permuted(matrix, heads: int):
    """llama.cpp rotates neighbours where transformers rotates halves: reorder a head's rows."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns).copy()


def _gguf_name(name: str) -> tuple[str, int | None]:
    parts = {
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
        "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    }  # fmt: skip
    words = name.removesuffix(".weight").split(".")
    return parts[words[-1]], int(words[2]) if "layers" in words else None


def _tensors(path: Path):
    """Name, shape and 16-bit words of every tensor; bfloat16 is no numpy type."""
    import numpy as np

    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            assert entry["dtype"] == "BF16", entry["dtype"]
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            yield name, entry["shape"], np.frombuffer(file.read(end - begin), dtype=np.uint16)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), MODELS[sys.argv[3]])
