"""What computes a model and in which dtype, and what that means for its answers: chosen once, when
an engine is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import structlog
import torch

from shared.engine.attention.triton import unsupported as triton_unsupported
from shared.engine.memory.paged_kv import TORCH_DTYPES
from shared.engine.models.config import ModelConfig
from shared.engine.models.weights import Checkpoint
from shared.engine.native.build import NATIVE
from shared.engine.native.forward import unsupported as native_unsupported
from shared.errors import ModelError
from shared.kv.layout import KvLayout

_log = structlog.get_logger(__name__)

Kernels = Literal["native", "amx", "avx512-bf16", "avx512", "avx2", "triton", "torch"]


def keep_precision() -> None:
    """Have sums of a GPU's products kept in float32, whatever the dtype: torch lets its libraries
    round parts of 16-bit sums, and the environment float32 products to TF32. For the process."""
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_bf16_reduced_precision_reduction = False


def choose(
    dtype: str,
    kernels: str,
    config: ModelConfig,
    checkpoint: Checkpoint,
    block_size: int,
    device: torch.device,
    *,
    exact: bool,
) -> tuple[KvLayout, Kernels]:
    """Return what computes, and in which dtype; say which, and what that means for answers.

        native; triton if exact   the same bits, whatever a row is computed with, native ones on
                                  whatever CPU
        float32                   the same tokens: logprobs differ by 1e-5 (CPU), too little to
                                  change one, but where two tokens tie
        16 bits otherwise         neither: a tenth of the answers may differ by a token

    So torch computes no 16 bits on a CPU unless told to; mostly they are slower there, too
    (bench/engine). Raises ModelError: what was asked for does not exist, or cannot run here.
    """
    stored = config.dtype or checkpoint.dtype
    served = stored if dtype == "auto" else dtype
    if served not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise ModelError(f"{checkpoint.folder.path}: dtype {served} is not supported ({known} are)")
    if dtype == "auto" and served == "float16" and device.type == "cpu":
        served = "float32"  # nothing computes it quicker there
    layout = KvLayout(
        dtype=served,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    chosen = choose_kernels(kernels, config, layout, block_size, device, exact=exact)
    if dtype == "auto" and chosen == "torch" and device.type == "cpu":
        layout = replace(layout, dtype="float32")
    if chosen in NATIVE or (chosen == "triton" and exact):
        answers = "the same bits in any batch"
    elif layout.dtype == "float32":
        answers = "the same tokens in any batch, but where two tie"
    elif exact:
        raise ModelError(
            f"--exact: sums of {layout.dtype} on torch's kernels depend on the batch; take"
            " --dtype float32, or a machine where the native or triton kernels run"
        )
    else:
        answers = "may depend on their batch and on failover" + (
            ": --exact is slower and they do not" if chosen == "triton" else ""
        )
    log = _log.warning if answers.startswith("may") and device.type == "cpu" else _log.info
    log("model is computed", dtype=layout.dtype, stored=stored, kernels=chosen, answers=answers)
    return layout, chosen


def choose_kernels(
    asked: str,
    config: ModelConfig,
    layout: KvLayout,
    block_size: int,
    device: torch.device,
    *,
    exact: bool = False,
) -> Kernels:
    """Return what computes. Raises ModelError: it was asked for and cannot run here."""
    if asked == "torch":
        return "torch"
    fused: Kernels = "triton" if device.type == "cuda" else "native"
    if asked in ("triton", *NATIVE):
        fused = asked
    if fused in NATIVE:
        instructions = "" if fused == "native" else fused
        dtype = TORCH_DTYPES[layout.dtype]
        reason = native_unsupported(config, dtype, device, instructions)
    else:
        reason = triton_unsupported(
            layout, config.num_heads, block_size=block_size, device=device, is_exact=exact
        )
    if not reason:
        return fused
    if asked != "auto":
        raise ModelError(f"the {fused} kernels cannot run here: {reason}")
    lost = ", two to seven times slower" if device.type == "cpu" else ""
    _log.warning(f"{fused} kernels not used, torch computes{lost}", reason=reason)
    return "torch"
