"""How near a GPU's limits the engine's steps come: memory bandwidth in decode, products in prefill.

    python -m bench.gpu.run [--quick]

Needs one CUDA device with room for the model (about 40 GB without --quick); without one it measures
nothing and exits with 2. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import uvloop

from bench.device import add_device, name_or_exit
from bench.record import Record, arguments, ratios, span, spread

if TYPE_CHECKING:
    from shared.engine.worker import BegunStep

VOCAB = 128_256
MAX_LEN = 8192
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QUICK_LAYERS = 4
REHEARSAL: dict[str, Any] = {
    **SHAPE,
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""What a CPU computes in its stead, to see that everything here runs."""

GOAL_PROMPT = 4096
DECODE_SHARE, PREFILL_SHARE = 0.85, 0.65
"""Goals: of the bandwidth at batch 1, of the product rate in a prompt of GOAL_PROMPT tokens."""

Step = Callable[[], object]
"""Does the work once and waits until it is done."""


class Limits(NamedTuple):
    """What the device does right before a sample."""

    bytes_per_s: float
    flops_per_s: float


class Sample(NamedTuple):
    """Seconds of a step, and the limits that were measured right before it."""

    limits: Limits
    seconds: float


def make_folder(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model folder whose weights are a hole in the file: they are made on the device."""
    from shared.engine.models.decoder import expected_shapes
    from shared.engine.models.registry import read_model_config
    from shared.model_folder import ModelFolder

    (folder / "config.json").write_text(json.dumps(shape))
    header: dict[str, Any] = {}
    at = 0
    for name, sizes in expected_shapes(read_model_config(ModelFolder(folder))).items():
        end = at + 2 * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def seconds_of(step: Step, *, repetitions: int) -> float:
    """Seconds of one step, after one that is not counted."""
    step()
    began_at = time.perf_counter()
    for _ in range(repetitions):
        step()
    return (time.perf_counter() - began_at) / repetitions


def limits(device: str, *, mib: int = 1024, size: int = 8192) -> Limits:
    """Copy within the device's memory (read and write both count), and one square product."""
    import torch

    def waiting(work: Callable[[], object]) -> Step:
        def step() -> None:
            work()
            if device != "cpu":
                torch.cuda.synchronize(device)

        return step

    source = torch.ones(mib << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = seconds_of(waiting(lambda: target.copy_(source)), repetitions=10)
    matrix = torch.randn(size, size, device=device).to(torch.bfloat16)
    multiplying = seconds_of(waiting(lambda: matrix @ matrix), repetitions=10)
    return Limits(2 * (mib << 20) / copying, 2 * size**3 / multiplying)


class OurEnd:
    """The engine as a worker loads it, its weights filled with noise."""

    name = "pdmesh"

    def __init__(self, folder: Path, device: str, *, max_rows: int, **options: Any) -> None:
        import torch

        from shared.engine.torch_engine import TorchEngine
        from shared.engine.worker import ThreadCompute

        self.engine = TorchEngine.load(
            folder, device=device, dtype="bfloat16", max_graph_rows=max_rows, **options
        )
        with torch.inference_mode():
            for weight in self.engine.forward.weights:
                weight.normal_(0, 0.02)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._compute = ThreadCompute(self.engine)
        self._running: BegunStep | None = None
        self._is_ahead = device != "cpu"
        weights = list(self.engine.forward.weights)
        # The embedding, the first of them, is looked up row by row.
        self.read_bytes = sum(one.numel() * one.element_size() for one in weights[1:])

    def decode(self, batch: int, context: int, *, is_replayed: bool = True) -> Step:
        """One token for each of ``batch`` sequences of ``context`` tokens; sampled, greedily.

        As a worker does it: a step takes the tokens of the one before it, and is there when that
        ends. Each call waits for one and begins the one after it; ``settle`` waits for the last.
        """
        from shared.request import SamplingParams
        from shared.step import SampleSpec, StepRow

        engine = self.engine
        per_row = -(-context // engine.block_size)
        if batch * per_row > engine.num_blocks:
            raise MemoryError(f"{engine.num_blocks} blocks are too few")
        spec = SampleSpec(SamplingParams(max_tokens=2), 0, (), ())
        rows = [
            StepRow((7,), context - 1, tuple(range(row * per_row, (row + 1) * per_row)), spec)
            for row in range(batch)
        ]
        self.settle()
        if not (is_replayed and self._is_ahead):
            on_layer = None if is_replayed else lambda _: None
            return lambda: engine.step(rows, on_layer)

        async def step() -> None:
            if self._running is None:
                self._running = self._compute.begin(rows)
            lacking = [[-1] for _ in rows]
            following = self._compute.begin(
                [row._replace(token_ids=own) for row, own in zip(rows, lacking, strict=True)],
                [(own, idx) for idx, own in enumerate(lacking)],
            )
            await self._running.results()
            self._running = following

        return lambda: self._runner.run(step())

    def settle(self) -> None:
        """Wait for the step that is still on its way."""
        if self._running is not None:
            self._runner.run(self._running.results())
            self._running = None

    def prefill(self, length: int) -> Step:
        """All of a prompt in one step, and its first token."""
        self.settle()
        from shared.request import SamplingParams
        from shared.step import SampleSpec, StepRow

        table = tuple(range(-(-length // self.engine.block_size)))
        spec = SampleSpec(SamplingParams(max_tokens=2), 0, (), ())
        row = StepRow([idx % 1000 for idx in range(length)], 0, table, spec)
        return lambda: self.engine.step([row])

    def close(self) -> None:
        self.settle()
        self._runner.run(self._compute.close())
        self._runner.close()
        self.engine.close()


class TransformersEnd:
    """transformers' own forward pass with SDPA; compiled: with a static cache, as CUDA graphs."""

    def __init__(self, folder: Path, device: str, *, is_compiled: bool) -> None:
        import torch
        import transformers

        self.name = "torch.compile" if is_compiled else "transformers"
        config: Any = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = "sdpa"
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self._model = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        assert self._model.dtype == torch.bfloat16
        self._device = device
        self._is_compiled = is_compiled
        self._forward: Any = self._model.forward
        if is_compiled:
            self._forward = torch.compile(self._model.forward, mode="reduce-overhead")

    def decode(self, batch: int, context: int, *, room: int) -> Step:
        """The same; each step adds its token, ``room`` at most."""
        import torch
        import transformers

        config = self._model.config
        cache = transformers.DynamicCache(config=config)
        if self._is_compiled:
            cache = transformers.StaticCache(config=config, max_cache_len=context + room)
        prompt = torch.zeros((batch, context - 1), dtype=torch.int64, device=self._device)
        with torch.inference_mode():
            for part in prompt.split(512, dim=1):  # activations of all at once would be large
                self._model(part, past_key_values=cache, logits_to_keep=1)
        token = torch.full((batch, 1), 7, device=self._device)

        def step() -> None:
            with torch.inference_mode():
                out = self._forward(token, past_key_values=cache)
                out.logits[:, -1].argmax(-1).tolist()

        return step

    def prefill(self, length: int) -> Step:
        import torch

        ids = torch.arange(length, device=self._device)[None] % 1000

        def step() -> None:
            with torch.inference_mode():
                out = self._forward(ids, use_cache=False, logits_to_keep=1)
                out.logits[:, -1].argmax(-1).tolist()

        return step

    def close(self) -> None:
        del self._model, self._forward


@contextmanager
def ending(end: Any) -> Iterator[Any]:
    """Give the device's memory back to the next one."""
    import torch

    try:
        yield end
    finally:
        end.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def prefill_flops(shape: dict[str, Any], length: int) -> float:
    """Multiplications and additions of a prompt: matrices of all layers, and causal attention."""
    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    matrices = 2 * hidden * queries + 2 * hidden * kv + 3 * hidden * mlp
    attention = 2 * queries * (length + 1)  # q k and p v, half of the positions
    return shape["num_hidden_layers"] * length * (2.0 * matrices + attention)


def kv_bytes(shape: dict[str, Any], batch: int, context: int) -> int:
    """KV that a decode step reads."""
    per_token = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return batch * context * per_token


def measure(asked: argparse.Namespace, record: Record, shape: dict[str, Any], folder: Path) -> None:
    """Ours, then the peers, one after the other; each sample right after the device's limits."""
    prefill = f"prefill {asked.prompt}"
    decodes = {f"decode batch {batch} at {asked.context}": batch for batch in asked.batches}
    took: dict[tuple[str, str], list[Sample]] = {}

    def take(who: str, what: str, step: Step) -> None:
        can_do = limits(asked.device, **asked.limit_sizes)
        seconds = seconds_of(step, repetitions=asked.steps if what in decodes else 3)
        took.setdefault((who, what), []).append(Sample(can_do, seconds))
        print(f"  {who:16} {what:26} {seconds * 1e3:9.3f} ms", flush=True)

    with ending(OurEnd(folder, asked.device, max_rows=max(asked.batches), **asked.options)) as ours:
        read_bytes = ours.read_bytes
        for _ in range(asked.repetitions):
            for what, batch in decodes.items():
                take(ours.name, what, ours.decode(batch, asked.context))
                by_kernel = ours.decode(batch, asked.context, is_replayed=False)
                take("kernel by kernel", what, by_kernel)
            take(ours.name, prefill, ours.prefill(asked.prompt))
    if asked.quick or asked.exact or asked.no_peers:
        print("no peers with --quick, --exact or --no-peers")
    elif importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: left out")
    else:
        for is_compiled in (False, True):
            with ending(TransformersEnd(folder, asked.device, is_compiled=is_compiled)) as peer:
                for what, batch in decodes.items():
                    room = asked.repetitions * (asked.steps + 1)
                    step = peer.decode(batch, asked.context, room=room)
                    for _ in range(asked.repetitions):
                        take(peer.name, what, step)
                step = peer.prefill(asked.prompt)
                for _ in range(asked.repetitions):
                    take(peer.name, prefill, step)

    moved = {
        what: read_bytes + kv_bytes(shape, batch, asked.context) for what, batch in decodes.items()
    }
    report(record, took, moved, prefill_flops(shape, asked.prompt))
    if asked.device != "cpu":
        set_goals(record, asked, shape["num_hidden_layers"])


def report(
    record: Record,
    took: dict[tuple[str, str], list[Sample]],
    moved: dict[str, int],
    flops: float,
) -> None:
    """A line and a row for each end and work.

    took: by end and work. moved: bytes that a step of each decode reads; flops: of the prompt,
    which is all other work.
    """
    seen = [sample.limits for samples in took.values() for sample in samples]
    record.rows.append({"what": "copy", "bytes_per_s": spread([one.bytes_per_s for one in seen])})
    record.rows.append(
        {"what": "product", "flops_per_s": spread([one.flops_per_s for one in seen])}
    )
    for (who, what), samples in took.items():
        seconds = [sample.seconds for sample in samples]
        if what in moved:
            name = "share_of_bandwidth"
            least = [moved[what] / sample.limits.bytes_per_s for sample in samples]
        else:
            name = "share_of_product_rate"
            least = [flops / sample.limits.flops_per_s for sample in samples]
        share = ratios(least, seconds)
        # Peers are measured after us, so no sample of theirs has one of ours beside it.
        ours = statistics.median(sample.seconds for sample in took[OurEnd.name, what])
        times = statistics.median(seconds) / ours
        row = {"who": who, "what": what, "seconds": spread(seconds), name: share}
        record.rows.append({**row, "median_x_pdmesh": times})
        of_limit = span(share, ".3f")
        print(f"{who:16} {what:26} share of the limit {of_limit}, {times:.2f} x our time")


def set_goals(record: Record, asked: argparse.Namespace, num_layers: int) -> None:
    """Note rows 1 and 2: our shares of the limits at batch 1 and in a prompt of GOAL_PROMPT tokens.

    A model cut to fewer layers says so: it is another goal than the whole one's.
    """
    of = "" if num_layers == SHAPE["num_hidden_layers"] else f", {num_layers} layers"
    of += ", exact" if asked.exact else ""
    ours = {row["what"]: row for row in record.rows if row.get("who") == OurEnd.name}
    decode, prefill = f"decode batch 1 at {asked.context}", f"prefill {GOAL_PROMPT}"
    if decode in ours:
        share = ours[decode]["share_of_bandwidth"]
        record.goal(1, f"{decode}{of}: share of the bandwidth", share, ">=", DECODE_SHARE)
    if prefill in ours:
        share = ours[prefill]["share_of_product_rate"]
        record.goal(2, f"{prefill}{of}: share of the product rate", share, ">=", PREFILL_SHARE)


def shape_for(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the model's shape: of all layers, of some with --quick, or of a rehearsal."""
    if asked.device == "cpu":
        return REHEARSAL
    return {**SHAPE, "num_hidden_layers": QUICK_LAYERS} if asked.quick else SHAPE


def main() -> None:
    parser = arguments(__doc__, f"{QUICK_LAYERS} layers, 3 repetitions, no peers")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=1024, help="tokens a decoded sequence has")
    parser.add_argument("--prompt", type=int, default=GOAL_PROMPT, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=30, help="decode steps a sample")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--exact", action="store_true", help="ours with exact products, attention")
    add_device(parser)
    asked = parser.parse_args()
    name = name_or_exit(asked.device)
    shape = shape_for(asked)
    if asked.quick:
        asked.repetitions = 3
    asked.limit_sizes = {}
    if asked.device == "cpu":
        asked.context, asked.prompt, asked.limit_sizes = 64, 256, {"mib": 16, "size": 256}
    longest = max(asked.prompt, asked.context * max(asked.batches))
    num_blocks = -(-longest // 16) + max(asked.batches)
    asked.options = {"num_blocks": num_blocks, "exact": asked.exact}
    record = Record.of(__file__, asked, device=name, exact=asked.exact)
    # A rehearsal on a CPU is of another shape and leaves no figures.
    record.is_written &= asked.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), shape)
        measure(asked, record, shape, Path(folder))
    record.finish()


if __name__ == "__main__":
    main()
