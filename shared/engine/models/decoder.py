"""The one decoder of all families: pre-norm, grouped attention, gated feed-forward.

What differs between Llama, Mistral, Qwen2 and Qwen3 is a switch in ModelConfig. Reference for the
arithmetic and for tensor names: ``transformers/models/llama/modeling_llama.py`` and its siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog
import torch
from torch.nn import functional as F

from shared.engine.attention.base import AttentionBackend
from shared.engine.base import OnLayer
from shared.engine.batch import StepBatch
from shared.engine.gpu.streams import Streams
from shared.engine.memory import huge_pages
from shared.engine.memory.paged_kv import PagedKv
from shared.engine.models.config import ModelConfig
from shared.engine.models.layers import LayerOps, RotaryEmbedding
from shared.engine.models.weights import Checkpoint

_log = structlog.get_logger(__name__)


class DecoderNames:
    """How checkpoints call what is not in a layer; layers lie below ``LAYERS``."""

    EMBEDDING = "model.embed_tokens"
    LAYERS = "model.layers"
    NORM = "model.norm"
    HEAD = "lm_head"


class Linear(NamedTuple):
    """A matrix ``[out, in]`` and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. qkv: rows of q, then k, then v. gate_up: rows of gate, then up."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A loaded model: token ids and positions in, hidden states out."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: torch.Tensor,
        ops: LayerOps,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._ops = ops
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, embedding.device)

    @property
    def weights(self) -> Iterable[torch.Tensor]:
        """All tensors, for tests that check what a worker really runs in."""
        yield self._embedding
        for layer in self._layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                yield linear.weight
                if linear.bias is not None:
                    yield linear.bias
            for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm):
                if norm is not None:
                    yield norm
        yield self._norm
        yield self._head

    def forward(
        self,
        batch: StepBatch,
        kv: PagedKv,
        attention: AttentionBackend,
        streams: Streams,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """Return hidden states before the final norm, ``[num_tokens, hidden_size]``.

        Writes KV of every token of the batch; reports each layer as soon as its KV is written.
        """
        eps = self.config.rms_norm_eps
        x = F.embedding(batch.token_ids, self._embedding)
        cos, sin = self._rotary.cos_sin(batch.positions, x.dtype)
        plans = attention.plan(batch, self.config.windows, x.dtype)
        normed = self._ops.rms_norm(x, self._layers[0].input_norm, eps)
        for idx, layer in enumerate(self._layers):
            queries, keys, values = self._project(layer, normed, cos, sin)
            attention.store(kv, idx, keys, values, batch)
            # Before on_layer, which may set off a copy: that waits for this mark.
            streams.layer_written(idx)
            if on_layer is not None:
                on_layer(idx)
            plan = plans[self.config.windows[idx]]
            mixed = attention.attend(kv, idx, queries, keys, values, plan)
            added = self._ops.linear(mixed.flatten(1), *layer.out)
            x, normed = self._ops.add_norm(x, added, layer.mlp_norm, eps)
            # SwiGLU (Shazeer 2020); gate and up are one matrix.
            gated = self._ops.gate(self._ops.linear(normed, *layer.gate_up))
            added = self._ops.linear(gated, *layer.down)
            if idx + 1 < len(self._layers):
                x, normed = self._ops.add_norm(x, added, self._layers[idx + 1].input_norm, eps)
            else:
                x = x + added
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[n, vocab_size]`` of hidden states ``[n, hidden_size]``."""
        normed = self._ops.rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return self._ops.linear(normed, self._head, None).float()

    def _project(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, ops = self.config, self._ops
        heads = ops.linear(x, *layer.qkv).view(x.shape[0], -1, config.head_dim)
        sizes = (config.num_heads, config.num_kv_heads)
        rotated, values = heads.split((sum(sizes), config.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = rotated.split(sizes, dim=1)
            queries = ops.rms_norm(queries, layer.q_norm, config.rms_norm_eps)
            keys = ops.rms_norm(keys, layer.k_norm, config.rms_norm_eps)
            return ops.rotate(queries, cos, sin), ops.rotate(keys, cos, sin), values
        queries, keys = ops.rotate(rotated, cos, sin).split(sizes, dim=1)
        return queries, keys, values


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model must hold."""
    hidden, mlp, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{DecoderNames.EMBEDDING}.weight": (config.vocab_size, hidden),
        f"{DecoderNames.NORM}.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[f"{DecoderNames.HEAD}.weight"] = (config.vocab_size, hidden)
    linears = (
        ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_rows, config.o_bias),
        ("mlp.gate_proj", mlp, hidden, config.mlp_bias),
        ("mlp.up_proj", mlp, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, mlp, config.mlp_bias),
    )
    for idx in range(config.num_layers):
        prefix = f"{DecoderNames.LAYERS}.{idx}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (dim,)
        for name, rows, columns, has_bias in linears:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


def with_own_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return the config, untied if the checkpoint has a head that is not its embedding: then that
    counts and not what config.json says, as in transformers 5."""
    tensors = checkpoint.tensors
    head, embedding = (f"{it}.weight" for it in (DecoderNames.HEAD, DecoderNames.EMBEDDING))
    if not config.tie_word_embeddings or head not in tensors:
        return config
    if embedding not in tensors:  # stored once, by the other name
        tensors[embedding] = tensors.pop(head)
        return config
    one, other = tensors[head], tensors[embedding]
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    if is_alike and torch.equal(checkpoint.get(head), checkpoint.get(embedding)):
        return config
    _log.warning(
        "the head is not tied: config.json says so, but the checkpoint has another",
        file=str(tensors[head].path),
    )
    return replace(config, tie_word_embeddings=False)


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: LayerOps,
) -> Decoder:
    """Load the weights tensor by tensor.

    On CPU, in the dtype they are stored in, matrices stay views of the mapped files. Only q, k, v
    and gate, up are read into one matrix each: one product instead of three or two.
    Raises ModelError: the checkpoint does not fit the config.
    """
    checkpoint.require(expected_shapes(config), tied=config.tie_word_embeddings)

    def whole(name: str) -> torch.Tensor:
        return checkpoint.get(name).to(device=device, dtype=dtype)

    def fused(names: Sequence[str]) -> torch.Tensor:
        shapes = [checkpoint.tensors[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        out = huge_pages.tensor((sum(rows), *shapes[0][1:]), dtype, device)
        for part, name in zip(out.split(rows), names, strict=True):
            checkpoint.read_into(part, name)
        return out

    def linear(prefix: str, names: Sequence[str], has_bias: bool) -> Linear:
        join = fused if len(names) > 1 else lambda full: whole(full[0])
        weight = join([f"{prefix}.{name}.weight" for name in names])
        bias = join([f"{prefix}.{name}.bias" for name in names]) if has_bias else None
        return Linear(weight, bias)

    layers: list[Layer] = []
    for idx in range(config.num_layers):
        prefix = f"{DecoderNames.LAYERS}.{idx}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        layers.append(
            Layer(
                input_norm=whole(f"{prefix}.input_layernorm.weight"),
                qkv=linear(attn, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
                q_norm=whole(f"{attn}.q_norm.weight") if config.qk_norm else None,
                k_norm=whole(f"{attn}.k_norm.weight") if config.qk_norm else None,
                out=linear(attn, ("o_proj",), config.o_bias),
                mlp_norm=whole(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=linear(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
                down=linear(mlp, ("down_proj",), config.mlp_bias),
            )
        )
    embedding = whole(f"{DecoderNames.EMBEDDING}.weight")
    head = embedding if config.tie_word_embeddings else whole(f"{DecoderNames.HEAD}.weight")
    return Decoder(
        config,
        embedding=embedding,
        layers=layers,
        norm=whole(f"{DecoderNames.NORM}.weight"),
        head=head,
        ops=ops,
    )
