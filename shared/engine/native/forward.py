"""The forward pass by the native kernels: weights packed at load, one call a step.

Same function as ``torch_forward`` in bfloat16 and float32, and results are the same bits for any
batch size, chunking, number of threads and CPU (kernels.cpp says why), which torch's are not.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from shared.engine.base import OnLayer
from shared.engine.forward import Forward, Passed
from shared.engine.memory import huge_pages
from shared.engine.memory.paged_kv import TORCH_DTYPES, PagedKv
from shared.engine.models.config import ModelConfig
from shared.engine.models.decoder import DecoderNames, expected_shapes
from shared.engine.models.layers import RotaryEmbedding
from shared.engine.models.weights import Checkpoint
from shared.engine.native import library
from shared.engine.native.build import Unavailable
from shared.engine.sampling.guides import Masks
from shared.errors import LocalProtocolError
from shared.step import StepRow

_Jobs: TypeAlias = list[tuple[str, library.PackJob]]

_AS_STORED = {"BF16": torch.bfloat16, "F32": torch.float32}
"""Numbers that lie in a file as they are packed, by safetensors' names."""

_FIRST_ANGLES = 4096
"""Positions whose rotary angles are computed at load; more when a sequence gets there."""


def unsupported(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, instructions: str = ""
) -> str:
    """Why the kernels cannot run this model here; '' if they can. May compile them (seconds).
    instructions: see ``library.load``."""
    if device.type != "cpu":
        return f"they are for CPUs, not for {device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        known = "bfloat16 and float32"
        return f"they compute {known}, not {str(dtype).removeprefix('torch.')}"
    try:
        kernels = library.load(dtype, instructions)
    except Unavailable as error:
        return str(error)
    if config.head_dim > kernels.max_head_dim or config.group_size > kernels.max_group:
        return f"head_dim {config.head_dim} or {config.group_size} heads a group are too many"
    sizes = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if dtype == torch.bfloat16 and any(size % 2 for size in sizes):
        return "a matrix has an odd number of columns"
    return ""


class NativeForward(Forward):
    """A packed model with its pool. See ``forward.Forward``."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        kv: PagedKv,
        *,
        max_model_len: int,
        instructions: str = "",
    ) -> None:
        """Pack the weights, straight from the files. instructions: see ``library.load``.

        Raises ModelError: the checkpoint does not fit the config.
        """
        self._dtype = TORCH_DTYPES[kv.layout.dtype]
        self._library = library.load(self._dtype, instructions)
        self._config = config
        self._kv = kv
        self._max_model_len = max_model_len
        self._tensors: list[torch.Tensor] = []
        self._model = self._pack(checkpoint)
        self._angles = _Angles(config, self._dtype)
        per_token = config.hidden_size + config.intermediate_size
        per_token += (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._scratch = _Scratch(per_token, self._dtype)
        self._x = _Scratch(config.hidden_size, self._dtype)
        self._normed = _Scratch(config.hidden_size, self._dtype)
        self._logits = torch.empty(0, config.vocab_size)
        self._best = array("q")

    @property
    def instructions(self) -> str:
        """What the CPU is asked for: see ``build.INSTRUCTIONS``."""
        return self._library.instructions

    @property
    def weights(self) -> Iterable[torch.Tensor]:
        """See Forward; packed ones are flat."""
        return iter(self._tensors)

    def run(
        self, rows: Sequence[StepRow], samples: Sequence[int], on_layer: OnLayer | None
    ) -> Passed:
        """See Forward.

        All that can be is done before the kernels: what they read and write drives rows and
        torch's own code out of the caches (bench/engine).
        """
        token_ids, firsts, starts = array("i"), array("i", [0]), array("i")
        tables, table_at = array("i"), array("i", [0])
        block_size, longest = self._kv.block_size, 0
        for row in rows:
            length = len(row.token_ids)
            stop = row.start + length
            if length == 0 or row.start < 0 or stop > self._max_model_len:
                raise LocalProtocolError(
                    f"a row of {length} tokens from position {row.start} does not fit "
                    f"max_model_len {self._max_model_len}"
                )
            try:
                token_ids.extend(row.token_ids)
            except OverflowError as error:
                raise LocalProtocolError("a token id beyond 32 bits") from error
            firsts.append(len(token_ids))
            starts.append(row.start)
            tables.extend(row.block_table[: -(-stop // block_size)])
            table_at.append(len(tables))
            longest = max(longest, stop)
        num_tokens, num_samples = len(token_ids), len(samples)
        cos, sin = self._angles.upto(longest)
        batch = library.BatchStruct(
            num_rows=len(rows),
            num_tokens=num_tokens,
            token_ids=_address(token_ids),
            firsts=_address(firsts),
            starts=_address(starts),
            tables=_address(tables) if tables else None,
            table_at=_address(table_at),
            cos=cos,
            sin=sin,
            x=self._x.address(num_tokens),
            scratch=self._scratch.address(num_tokens),
        )
        if not self._library.check(self._model, batch):
            raise LocalProtocolError(
                f"a row names a token outside this model's vocabulary of {self._config.vocab_size}"
                f", a block outside this pool of {self._kv.num_blocks} blocks, or fewer blocks than"
                " its tokens need"
            )
        lasts = [first - 1 for first in firsts[1:]]
        head = self._head(num_samples)
        is_all = num_samples == num_tokens  # every row is one token that wants its next
        if on_layer is None:
            self._library.forward(self._model, batch)
        else:
            self._library.embed(self._model, batch)
            for layer in range(self._config.num_layers):
                self._library.first_half(self._model, batch, layer)
                on_layer(layer)
                self._library.second_half(self._model, batch, layer)
        if is_all:
            self._library.logits(self._model, batch.x, head)
        elif samples:
            hidden = self._x.rows(num_tokens)
            picked = hidden.index_select(0, torch.tensor([lasts[idx] for idx in samples]))
            self._library.logits(self._model, picked.data_ptr(), head)

        def deny(masks: Masks) -> None:
            allowed = masks.addresses(num_samples)
            self._library.deny(self._model, head, _address(allowed))

        return Passed(
            lambda: self._x.rows(num_tokens),
            lasts,
            lambda: self._logits[:num_samples],
            deny,
            lambda: self._best[:num_samples].tolist(),
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.contiguous()
        head = self._head(hidden.shape[0])
        self._library.logits(self._model, hidden.data_ptr(), head)
        return self._logits[: hidden.shape[0]]

    def _head(self, count: int) -> library.HeadStruct:
        """Return where the logits of so many tokens go."""
        if count > len(self._best):
            self._logits = torch.empty(count, self._config.vocab_size)
            self._best = array("q", bytes(8 * count))
        return library.HeadStruct(
            count=count,
            normed=self._normed.address(count),
            logits=self._logits.data_ptr(),
            best=_address(self._best),
        )

    # --- loading -------------------------------------------------------------------------------

    def _pack(self, checkpoint: Checkpoint) -> library.ModelStruct:
        config, names = self._config, DecoderNames
        jobs: _Jobs = []
        checkpoint.require(expected_shapes(config), tied=config.tie_word_embeddings)

        def tensor(name: str) -> torch.Tensor:
            stored = checkpoint.get(name)
            return stored.to(self._dtype).contiguous()

        def kept(name: str) -> int:
            self._tensors.append(tensor(name))
            return self._tensors[-1].data_ptr()

        def linear(
            prefix: str, parts: Sequence[str], has_bias: bool, *, is_gated: bool = False
        ) -> library.LinearStruct:
            matrices = [f"{prefix}{part}.weight" for part in parts]
            biases = [tensor(f"{prefix}{part}.bias") for part in parts] if has_bias else []
            return self._linear(checkpoint, matrices, biases, jobs, is_gated=is_gated)

        layers = (library.LayerStruct * config.num_layers)()
        for idx, layer in enumerate(layers):
            prefix = f"{names.LAYERS}.{idx}"
            attn, mlp = f"{prefix}.self_attn.", f"{prefix}.mlp."
            layer.input_norm = kept(f"{prefix}.input_layernorm.weight")
            layer.mlp_norm = kept(f"{prefix}.post_attention_layernorm.weight")
            if config.qk_norm:
                layer.q_norm = kept(f"{attn}q_norm.weight")
                layer.k_norm = kept(f"{attn}k_norm.weight")
            layer.qkv = linear(attn, ("q_proj", "k_proj", "v_proj"), config.qkv_bias)
            layer.out = linear(attn, ("o_proj",), config.o_bias)
            layer.gate_up = linear(mlp, ("gate_proj", "up_proj"), config.mlp_bias, is_gated=True)
            layer.down = linear(mlp, ("down_proj",), config.mlp_bias)
            layer.keys = self._kv.keys[idx].data_ptr()
            layer.values = self._kv.values[idx].data_ptr()
            layer.window = config.windows[idx] or 0
        embedding = kept(f"{names.EMBEDDING}.weight")
        tied = config.tie_word_embeddings
        head = linear("", (names.EMBEDDING if tied else names.HEAD,), False)
        packed = self._library.pack([job for _, job in jobs])
        for (name, _), job in zip(jobs, packed, strict=True):
            if job.problem:
                raise checkpoint.broken(name, job.problem)
        return library.ModelStruct(
            hidden=config.hidden_size,
            mlp=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            num_layers=config.num_layers,
            block_size=self._kv.block_size,
            num_blocks=self._kv.num_blocks,
            threads=torch.get_num_threads(),
            eps=config.rms_norm_eps,
            scale=1 / math.sqrt(config.head_dim),
            embedding=embedding,
            norm=kept(f"{names.NORM}.weight"),
            head=head,
            layers=layers,
        )

    def _linear(
        self,
        checkpoint: Checkpoint,
        matrices: Sequence[str],
        biases: Sequence[torch.Tensor],
        jobs: _Jobs,
        *,
        is_gated: bool,
    ) -> library.LinearStruct:
        """Have matrices that read the same input packed into one."""
        panel = library.PANEL
        counts = [checkpoint.tensors[name].shape[0] for name in matrices]
        k = checkpoint.tensors[matrices[0]].shape[1]
        rows = sum(counts)
        num_panels = -(-counts[0] // (panel // 2)) if is_gated else -(-rows // panel)
        panels = huge_pages.tensor((num_panels * panel * k,), self._dtype)
        address = panels.data_ptr()
        bias = torch.zeros(num_panels * panel, dtype=self._dtype) if biases else None
        first = 0
        for part, name in enumerate(matrices):
            if is_gated:
                half = panel // 2
                job = library.PackJob(panels=address, width=half, offset=part * half)
                if bias is not None:
                    halves = bias.view(num_panels, 2, half)[:, part]
                    flat = torch.zeros(num_panels * half, dtype=self._dtype)
                    flat[: len(biases[part])] = biases[part]
                    halves.copy_(flat.view(num_panels, half))
            else:
                job = library.PackJob(panels=address, width=panel, first=first)
                if bias is not None:
                    bias[first : first + len(biases[part])] = biases[part]
            self._put(checkpoint, name, job, jobs)
            first += counts[part]
        self._tensors.append(panels)
        if bias is not None:
            self._tensors.append(bias)
        return library.LinearStruct(
            panels=address,
            bias=bias.data_ptr() if bias is not None else None,
            n=num_panels * panel if is_gated else rows,
            k=k,
        )

    def _put(self, checkpoint: Checkpoint, name: str, job: library.PackJob, jobs: _Jobs) -> None:
        """Have one matrix packed: with all others from the files, or now if it has to be
        converted."""
        job.rows, job.k = checkpoint.tensors[name].shape
        if _AS_STORED.get(checkpoint.tensors[name].dtype) == self._dtype:
            job.file, job.position = checkpoint.place(name)
            jobs.append((name, job))
            return
        matrix = checkpoint.get(name).to(self._dtype).contiguous()
        job.matrix = matrix.data_ptr()
        self._library.pack([job])


class _Angles:
    """Rotary cos and sin of positions, ``[positions, head_dim]``, grown by doubling."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, torch.device("cpu"))
        self._compute(min(_FIRST_ANGLES, config.longest_len))

    def upto(self, num_positions: int) -> tuple[int, int]:
        """Return where tables of at least so many positions lie."""
        if num_positions > self._count:
            self._compute(1 << (num_positions - 1).bit_length())
        return self._addresses

    def _compute(self, count: int) -> None:
        cos, sin = self._rotary.cos_sin(torch.arange(count), self._dtype)
        self._tables = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        self._addresses = self._tables[0].data_ptr(), self._tables[1].data_ptr()
        self._count = count


class _Scratch:
    """Rows of numbers that are the same memory in every step."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width = width
        self._dtype = dtype
        self._count = 0
        self.address(64)

    def rows(self, count: int) -> torch.Tensor:
        """Return ``[count, width]``, with anything in it."""
        self.address(count)
        return self._memory[: count * self._width].view(count, self._width)

    def address(self, count: int) -> int:
        """Return where ``rows`` would lie."""
        if count > self._count:
            self._memory = huge_pages.tensor((count * self._width,), self._dtype)
            self._count = count
            self._address = self._memory.data_ptr()
        return self._address


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


assert array("i").itemsize == ctypes.sizeof(ctypes.c_int32)
