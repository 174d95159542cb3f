"""Compiles our Triton kernels for a device that need not be there; prints what became of them.

python -m tests.support.triton_compile 90
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from shared.engine.attention import triton_kernels as kernels
from shared.engine.batch import SPLIT_KEYS
from shared.engine.gpu import triton_layers

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
NUMBERS = dict.fromkeys(kernels._NUMBERS, "*i64")
SHAPES = {
    # dtype, query heads a KV head, KV heads, head_dim, block_size, window
    "8B": ("bfloat16", 4, 8, 128, 16, 0),
    "odd": ("float16", 7, 2, 80, 5, 100),
    "float32": ("float32", 2, 2, 64, 16, 24),
}


def compiled(
    capability: int,
    kernel: Any,
    types: dict[str, str],
    *,
    warps: int = 4,
    stages: int = 2,
    **constants: Any,
) -> dict:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    target = GPUTarget("cuda", capability, 32)
    done = compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    ptx = done.asm["ptx"]
    return {
        "shared_bytes": done.metadata.shared,
        "uses_matrix_units": any(word in ptx for word in ("mma.sync", "wgmma", "tcgen05")),
    }


def attend(
    capability: int,
    shape: tuple,
    *,
    is_single: bool = False,
    is_split: bool = False,
    is_exact: bool = False,
) -> dict:
    dtype, group, num_kv_heads, head_dim, block_size, window = shape
    item_bytes = 4 if dtype == "float32" else 2
    tile = kernels.tile_shape(group, head_dim, item_bytes, is_single=is_single and not is_exact)
    own = POINTERS[dtype]
    types = {
        **NUMBERS,
        **dict.fromkeys(("out", "queries", "key_pool", "value_pool"), own),
        **dict.fromkeys(("sums", "tops", "totals"), "*fp32" if is_split else own),
        **{"scale": "fp32", "query_stride": "i32"},
    }
    return compiled(
        capability,
        kernels._attend,
        types,
        warps=tile.warps,
        stages=tile.stages,
        HEAD_DIM=head_dim,
        DIMS=kernels._power_of_two(head_dim),
        WINDOW=window,
        SPLIT_KEYS=SPLIT_KEYS,
        NUM_HEADS=group * num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        TILE_QUERIES=tile.queries,
        TILE_ROWS=tile.rows,
        TILE_KEYS=tile.keys,
        IS_SINGLE=is_single,
        IS_SPLIT=is_split,
        IS_EXACT=is_exact,
        WIDENS=False,
    )


OLDEST = 80


def multiplying(capability: int) -> dict[str, Any]:
    """Kernels with products, on matrix units but for float32: of that one device stands for all."""
    done: dict[str, Any] = {}
    dtypes = {"bfloat16": 2, "float16": 2} | ({"float32": 4} if capability == OLDEST else {})
    for name, shape in SHAPES.items():
        if shape[0] not in dtypes:
            continue
        done[f"attend {name} singles"] = attend(capability, shape, is_single=True)
        done[f"attend {name} split"] = attend(capability, shape, is_single=True, is_split=True)
        done[f"attend {name} chunks"] = attend(capability, shape)
    for is_split in (False, True):
        done[f"attend 8B exact {is_split}"] = attend(
            capability, SHAPES["8B"], is_single=is_split, is_split=is_split, is_exact=True
        )
    for dtype in dtypes.keys() - {"float16"}:
        types = {
            **dict.fromkeys(("out", "x", "weight", "bias"), POINTERS[dtype]),
            "num_rows": "i32",
        }
        done[f"product {dtype}"] = compiled(
            capability,
            triton_layers._product,
            types,
            WIDTH=4096,
            NUM_OUT=6144,
            TILE=triton_layers._PRODUCT_TILE,
            DEPTH=128 // dtypes[dtype],
            HAS_BIAS=True,
            WIDENS=False,
        )
    return done


def others(capability: int) -> dict[str, Any]:
    """Those that move, add and turn."""
    done: dict[str, Any] = {}
    types = {**NUMBERS, "out": "*bf16", **dict.fromkeys(("sums", "tops", "totals"), "*fp32")}
    sizes = {"HEAD_DIM": 128, "DIMS": 128, "WINDOW": 0, "SPLIT_KEYS": SPLIT_KEYS}
    done["sum_splits"] = compiled(capability, kernels._sum_splits, types, **sizes)
    types = {**NUMBERS, "key_stride": "i32", "value_stride": "i32"}
    types |= dict.fromkeys(("keys", "values", "key_pool", "value_pool"), "*bf16")
    done["store"] = compiled(capability, kernels._store, types, WIDTH=1024, TILE=1024)
    tensors = ("out", "total", "x", "added", "weight", "cos", "sin", "gate_up")
    types = dict.fromkeys(tensors, "*bf16")
    types |= {"eps": "fp32", "stride": "i32"}
    heads = {"HEADS": 33, "HALF": 40, "TILE_HEADS": 16, "FILLED": 64}
    for kernel, sizes in (
        (triton_layers._rms_norm, {"WIDTH": 5120, "FILLED": 8192, "ADDS": True}),
        (triton_layers._rotate, heads),
        (triton_layers._gate, {"WIDTH": 14_336, "TILE": 1024}),
    ):
        done[kernel.fn.__name__] = compiled(capability, kernel, types, **sizes)
    return done


if __name__ == "__main__":
    device = int(sys.argv[1])
    print(json.dumps(multiplying(device) | (others(device) if device == OLDEST else {})))
