"""What a push leaves exposed with a real engine: receipts of whole meshes, beside serialized ones.

    python -m bench.overlap.engines [--quick] [--engines torch vllm]

Two meshes of three processes each, the same but for ``--transfer-mode``: auto, as production runs,
and serialized. They take turns, one prompt after the other. vllm needs the interpreter that ``make
setup-vllm`` makes, and is compared with our engine in that same interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvloop

from bench.disaggregation.run import VOCAB, make_model
from bench.mesh import a_mesh, ask, channel_to
from bench.overlap.run import pictures_of
from bench.record import Record, arguments, ratios, span, spread
from services.cli.bench.prompts import one_prompt
from shared.config import DecodeConfig, PrefillConfig

MODES = ("auto", "serialized")
LENGTHS = (256, 1024, 4096)
NUM_TOKENS = 8
"""Of each answer: enough that the transfer has ended."""


@contextlib.asynccontextmanager
async def opened(folder: Path, engine: str, mode: str) -> AsyncGenerator[Any]:
    """Open one mesh and a channel to it; one thread for each worker."""
    common: dict[str, Any] = {"model": str(folder), "log_level": "warning"}
    worker = {**common, "device": "cpu", "engine": engine, "threads": 1, "kv_gib": 0.5}
    prefill, decode = PrefillConfig(**worker, transfer_mode=mode), DecodeConfig(**worker)
    async with a_mesh([prefill], [decode], **common) as mesh, channel_to(mesh) as channel:
        yield channel


async def measure(engine: str, folder: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask both meshes in turn; one row a length."""
    rows: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        meshes = {
            mode: await stack.enter_async_context(opened(folder, engine, mode)) for mode in MODES
        }
        for length in asked.lengths:
            found: dict[str, list[Any]] = {mode: [] for mode in MODES}
            for turn in range(asked.repetitions + 2):  # the first two warm up
                prompt = one_prompt(length, 1000 * length + turn, VOCAB - 100).ids(0)
                answers: dict[str, list[int]] = {}
                for mode, channel in meshes.items():
                    answers[mode], receipt = await ask(channel, prompt, NUM_TOKENS)
                    found[mode] += [receipt] * (turn > 1)
                if answers["auto"] != answers["serialized"]:
                    raise RuntimeError(f"{engine}: the way of KV changed an answer")
            rows.append({"engine": engine, "tokens": length, **summary(found)})
            print(line(rows[-1]), flush=True)
    return rows


def summary(found: dict[str, list[Any]]) -> dict[str, Any]:
    """Medians and spreads in milliseconds; the ratio of exposed times within a repetition."""

    def of(mode: str, key: str) -> list[float]:
        return [receipt[key] * 1e3 for receipt in found[mode]]

    exposed = {mode: of(mode, "transfer_exposed_s") for mode in MODES}
    return {
        "mib": found["auto"][0]["transfer_bytes"] / 2**20,
        "modes": sorted({receipt["mode"] for receipt in found["auto"]}),
        "prefill_ms": spread(of("auto", "prefill_s")),
        "first_step_ms": spread(of("auto", "first_step_s")),
        "exposed_ms": {mode: spread(values) for mode, values in exposed.items()},
        "exposed_over_serialized": ratios(exposed["auto"], exposed["serialized"]),
        "exposed_over_prefill": ratios(exposed["auto"], of("auto", "prefill_s")),
    }


def line(row: dict[str, Any]) -> str:
    auto, serialized = (row["exposed_ms"][mode] for mode in MODES)
    return (
        f"{row['engine']:5} {row['tokens']:5} tokens, {row['mib']:.1f} MiB: prefill "
        f"{row['prefill_ms']['median']:.1f} ms, exposed {span(auto, '.2f')} ms, serialized "
        f"{serialized['median']:.2f}: {span(row['exposed_over_serialized'], '.3f')}"
    )


def main() -> None:
    parser = arguments(__doc__, "few prompts, not recorded")
    parser.add_argument("--engines", nargs="+", choices=("torch", "vllm"), default=["torch"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of prompts")
    parser.add_argument("--repetitions", type=int, default=15)
    asked = parser.parse_args()
    if asked.quick:
        asked.repetitions = 3
    record = Record.of(__file__, asked)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        for engine in asked.engines:
            record.rows += uvloop.run(measure(engine, Path(name), asked))
    record.finish(pictures_of)


if __name__ == "__main__":
    main()
