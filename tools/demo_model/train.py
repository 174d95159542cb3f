"""Train the bundled demo model and export it as a Hugging Face folder.

    python -m tools.demo_model.train --minutes 75 --seed 0 --out shared/models/demo
    python -m tools.demo_model.train --minutes 40 --from shared/models/demo \\
        --out shared/models/demo-tools

The learning rate and the latest moment of each step of the length curriculum follow the
training time spent, so the run ends on time on a slow machine too, with fewer tokens seen. A
run that was stopped goes on from its last saved state when it is started again with the same
``--state``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from . import data, tool_data
from .model import DemoModel, ModelConfig

VOCABULARY_LIMIT = 1280
CORPUS_DOCUMENTS = 20_000
WARM_UP_STEPS = 60
DECAY_FROM = 0.35
PAST_LABEL = -1

#: From this share of the time on, what is still hard weighs more: the first digit of a recalled
#: code, which takes the whole key to find (the others follow from it).
FOCUS_FROM = 0.2
FOCUS_FIRST_DIGIT = 3.0
FOCUS_BACKGROUND = 0.02

Stages = tuple[tuple[dict[int, float], float], ...]

#: Rows of each length that a batch is drawn from, and the share of the time after which the
#: next stage begins at the latest. A stage ends early when recall at its last length is good.
STAGES: Stages = (
    ({128: 1.0}, 0.12),
    ({128: 0.4, 256: 0.6}, 0.35),
    ({128: 0.2, 256: 0.3, 512: 0.5}, 0.5),
    ({128: 0.15, 256: 0.2, 512: 0.25, 1152: 0.4}, 2.0),
)
READY_ACCURACY = 0.9

RECALL, ARITHMETIC = 1, 2
_GROUPS = {"recall": RECALL, "arithmetic": ARITHMETIC}


@dataclass(frozen=True)
class Recipe:
    """What is learned, and how: of ``demo`` from nothing, of ``demo-tools`` from ``demo``."""

    sequence: Callable[[random.Random, int], list[data.Document]]
    chat_template: str
    added_tokens: tuple[str, ...]
    stages: Stages
    batch_tokens: int
    peak_rate: float
    focus_from: float


FROM_NOTHING = Recipe(data.sequence, data.CHAT_TEMPLATE, (), STAGES, 8192, 3e-3, FOCUS_FROM)
FROM_DEMO = Recipe(
    tool_data.sequence,
    tool_data.CHAT_TEMPLATE,
    tool_data.ADDED_TOKENS,
    (({256: 0.55, 512: 0.35, 1152: 0.1}, 2.0),),
    4608,
    1.5e-3,
    0.0,
)


@dataclass
class Batch:
    """Token rows with the targets and loss weights of each position.

    ``groups`` marks the first digits of recalled codes and all digits of sums.
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    groups: Tensor


@dataclass
class Progress:
    """What must survive a restart besides the weights and the optimiser state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stage: int = 0
    recall: dict[int, float] = field(default_factory=dict)
    arithmetic: float = 0.0
    loss: float = 0.0


def train_tokenizer(seed: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits numbers into digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT,
        min_frequency=20,
        special_tokens=list(data.SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(data.corpus(seed, CORPUS_DOCUMENTS), trainer)
    return tokenizer


def _encode_row(
    tokenizer: Tokenizer, documents: list[data.Document]
) -> tuple[list[int], list[float], list[int]]:
    tokens: list[int] = []
    weights: list[float] = []
    groups: list[int] = []
    for document in documents:
        encoding = tokenizer.encode(document.text)
        spans = iter((*document.spans, data.Span(len(document.text) + 1, 1 << 30, 0.0)))
        span = next(spans)
        group = _GROUPS.get(document.kind, 0)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            while start >= span.end:
                span = next(spans)
            weight = span.weight if span.start <= start and end <= span.end else data.BACKGROUND
            tokens.append(token)
            weights.append(weight)
            counted = weight == data.DIGITS and (group != RECALL or start == span.start)
            groups.append(group if counted else 0)
    return tokens, weights, groups


def make_batch(tokenizer: Tokenizer, recipe: Recipe, seed: str, length: int, rows: int) -> Batch:
    """Return a batch that is a pure function of the arguments."""
    rng = random.Random(seed)
    batch = Batch(
        torch.zeros(rows, length, dtype=torch.long),
        torch.full((rows, length), PAST_LABEL, dtype=torch.long),
        torch.zeros(rows, length),
        torch.zeros(rows, length, dtype=torch.long),
    )
    for row in range(rows):
        tokens, weights, groups = _encode_row(tokenizer, recipe.sequence(rng, length))
        used = min(len(tokens) - 1, length)
        batch.tokens[row, :used] = torch.tensor(tokens[:used])
        batch.targets[row, :used] = torch.tensor(tokens[1 : used + 1])
        batch.weights[row, :used] = torch.tensor(weights[1 : used + 1])
        batch.groups[row, :used] = torch.tensor(groups[1 : used + 1])
    return batch


def weighted_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted mean loss, the loss of every position and which were right."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.tokens)
    logits = logits.float().flatten(0, 1)
    targets = batch.targets.flatten()
    losses = F.cross_entropy(logits, targets, ignore_index=PAST_LABEL, reduction="none")
    weights = batch.weights.flatten()
    right = logits.detach().argmax(-1) == targets
    return (losses * weights).sum() / weights.sum(), losses.detach(), right


def focus(batch: Batch) -> None:
    """Change the weights to those of the later part of the training."""
    batch.weights[batch.weights == data.BACKGROUND] = FOCUS_BACKGROUND
    batch.weights[batch.groups == RECALL] = FOCUS_FIRST_DIGIT


def begin_from(model: DemoModel, tensors: dict[str, Tensor]) -> None:
    """Take over a trained model's weights; tokens that it does not have begin as a mean one."""
    embedding = "model.embed_tokens.weight"
    known = tensors[embedding].float()
    rows = known.mean(0, keepdim=True).repeat(model.config.vocab_size, 1)
    rows[: len(known)] = known
    model.load_state_dict({k: v.float() for k, v in tensors.items()} | {embedding: rows})


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""

    def __init__(self, model: DemoModel, rate: float) -> None:
        matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.muon = torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(
            others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )

    def step(self, rate: float) -> None:
        """Apply the gradients at learning rate ``rate`` and clear them."""
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return all state as named tensors."""
        return {
            f"{name}.{index}.{key}": value
            for name, optimizer in self._named()
            for index, entry in optimizer.state_dict()["state"].items()
            for key, value in entry.items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what ``state`` returned."""
        for name, optimizer in self._named():
            state: dict[int, dict[str, Tensor]] = {}
            for path, value in tensors.items():
                owner, index, key = path.split(".")
                if owner == name:
                    state.setdefault(int(index), {})[key] = value
            optimizer.load_state_dict(
                {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
            )

    def _named(self) -> tuple[tuple[str, torch.optim.Optimizer], ...]:
        return ("muon", self.muon), ("adamw", self.adamw)


def learning_rate(peak: float, step: int, share: float) -> float:
    """Return the rate after ``share`` of the time: warm-up, then constant, then cosine."""
    rate = peak * min(1.0, (step + 1) / WARM_UP_STEPS)
    if share > DECAY_FROM:
        phase = min(1.0, (share - DECAY_FROM) / (1 - DECAY_FROM))
        rate *= 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * phase))
    return rate


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(model: DemoModel, tokenizer: Tokenizer, template: str, out: Path) -> None:
    """Write the model folder; each file is replaced in one step, the weights last."""
    out.mkdir(parents=True, exist_ok=True)
    config = model.config
    end, pad = tokenizer.token_to_id(data.END), tokenizer.token_to_id(data.PAD)
    temporary = Path(tempfile.mkdtemp(prefix=".export-", dir=out.parent))
    try:
        tokenizer.save(str(temporary / "tokenizer.json"))
        _write_json(
            temporary / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
                "bos_token": None,
                "eos_token": data.END,
                "pad_token": data.PAD,
                "chat_template": template,
            },
        )
        _write_json(
            temporary / "special_tokens_map.json", {"eos_token": data.END, "pad_token": data.PAD}
        )
        _write_json(
            temporary / "generation_config.json",
            {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad, "do_sample": False},
        )
        _write_json(
            temporary / "config.json",
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                **asdict(config),
                "hidden_act": "silu",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "mlp_bias": False,
                "initializer_range": 0.02,
                "tie_word_embeddings": True,
                "use_cache": True,
                "bos_token_id": None,
                "eos_token_id": end,
                "pad_token_id": pad,
                "torch_dtype": "bfloat16",
            },
        )
        tensors = {
            name: value.detach().to(torch.bfloat16).contiguous().clone()
            for name, value in model.state_dict().items()
        }
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for path in sorted(temporary.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.chmod(0o644)
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@torch.no_grad()
def held_out_losses(
    model: nn.Module, tokenizer: Tokenizer, recipe: Recipe
) -> dict[int, tuple[float, float]]:
    """Return, per row length, the weighted and the unweighted loss on unseen documents."""
    result: dict[int, tuple[float, float]] = {}
    for length in (128, 256, 512, 1152):
        rows = 2 * recipe.batch_tokens // length
        batch = make_batch(tokenizer, recipe, f"held-out-{length}", length, rows)
        loss, losses, _ = weighted_loss(model, batch)
        seen = batch.targets.flatten() != PAST_LABEL
        result[length] = loss.item(), losses[seen].mean().item()
    return result


def _average(old: float | None, new: float) -> float:
    return new if old is None else 0.9 * old + 0.1 * new


class Trainer:
    """One training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        if args.start is None:
            self.recipe = FROM_NOTHING
            self.tokenizer = train_tokenizer(args.seed)
        else:
            self.recipe = FROM_DEMO
            self.tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
            self.tokenizer.add_tokens(list(self.recipe.added_tokens))
        if args.rate is not None:
            self.recipe = replace(self.recipe, peak_rate=args.rate)
        vocabulary = math.ceil(self.tokenizer.get_vocab_size() / 64) * 64
        self.model = DemoModel(ModelConfig(vocab_size=vocabulary))
        if args.start is not None:
            begin_from(self.model, load_file(args.start / "model.safetensors"))
        self.optimizers = Optimizers(self.model, self.recipe.peak_rate)
        self.progress = Progress()
        if args.state.exists():
            self._load()
        self.forward = torch.compile(self.model, dynamic=False) if args.compile else self.model

    def _load(self) -> None:
        tensors = load_file(self.args.state)
        prefix = "weights/"
        self.model.load_state_dict(
            {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        )
        self.optimizers.load({k: v for k, v in tensors.items() if not k.startswith(prefix)})
        with safe_open(self.args.state, "pt") as file:
            saved = json.loads(file.metadata()["progress"])
        recall = {int(length): value for length, value in saved.pop("recall").items()}
        self.progress = Progress(**saved, recall=recall)
        print(f"resumed at step {self.progress.step}", flush=True)

    def _save(self) -> None:
        weights = {f"weights/{k}": v.contiguous() for k, v in self.model.state_dict().items()}
        temporary = self.args.state.with_suffix(".tmp")
        save_file(
            weights | self.optimizers.state(),
            temporary,
            metadata={"progress": json.dumps(asdict(self.progress))},
        )
        os.replace(temporary, self.args.state)

    @property
    def share(self) -> float:
        """The share of the training time that is spent."""
        return self.progress.seconds / (self.args.minutes * 60)

    def run(self) -> None:
        """Train until the time is spent, then export."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        print(f"{size:,} parameters, {self.tokenizer.get_vocab_size()} tokens in the vocabulary")
        exported = time.monotonic()
        while self.share < 1:
            started = time.monotonic()
            self._step()
            self.progress.seconds += time.monotonic() - started
            if self.progress.step % 25 == 0:
                self._report()
            if time.monotonic() - exported > self.args.export_every * 60:
                self._save()
                export(self.model, self.tokenizer, self.recipe.chat_template, self.args.out)
                print(f"exported; held-out {self._held_out()}", flush=True)
                exported = time.monotonic()
        self._save()
        export(self.model, self.tokenizer, self.recipe.chat_template, self.args.out)
        print(f"done; held-out {self._held_out()}", flush=True)

    def _held_out(self) -> str:
        losses = held_out_losses(self.model, self.tokenizer, self.recipe)
        return ", ".join(f"{n}: {w:.4f} ({u:.3f} all)" for n, (w, u) in losses.items())

    def _step(self) -> None:
        progress = self.progress
        self._advance()
        lengths, _ = self.recipe.stages[progress.stage]
        rng = random.Random(f"length-{self.args.seed}-{progress.step}")
        length = rng.choices(list(lengths), list(lengths.values()))[0]
        seed = f"train-{self.args.seed}-{progress.step}"
        batch = make_batch(
            self.tokenizer, self.recipe, seed, length, self.recipe.batch_tokens // length
        )
        if self.share >= self.recipe.focus_from:
            focus(batch)
        loss, _, right = weighted_loss(self.forward, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step(learning_rate(self.recipe.peak_rate, progress.step, self.share))

        groups = batch.groups.flatten()
        recall = right[groups == RECALL].float().mean().item()
        progress.recall[length] = _average(progress.recall.get(length), recall)
        progress.arithmetic = _average(
            progress.arithmetic, right[groups == ARITHMETIC].float().mean().item()
        )
        progress.loss = _average(progress.loss or None, loss.item())
        progress.step += 1
        progress.tokens += self.recipe.batch_tokens

    def _advance(self) -> None:
        stages = self.recipe.stages
        lengths, until = stages[self.progress.stage]
        ready = self.progress.recall.get(max(lengths), 0.0) > READY_ACCURACY
        if (ready and self.progress.stage + 1 < len(stages)) or self.share > until:
            self.progress.stage += 1
            print(f"stage {self.progress.stage + 1} at step {self.progress.step}", flush=True)

    def _report(self) -> None:
        progress = self.progress
        recall = " ".join(f"{n}:{value:.3f}" for n, value in sorted(progress.recall.items()))
        left = self.args.minutes - progress.seconds / 60
        print(
            f"step {progress.step} tokens {progress.tokens / 1e6:.1f}M "
            f"loss {progress.loss:.4f} right: first digits of codes {recall} "
            f"sums {progress.arithmetic:.3f} "
            f"{progress.tokens / progress.seconds:,.0f} tokens/s, {left:.1f} min left",
            flush=True,
        )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled demo model.")
    parser.add_argument("--minutes", type=float, default=75.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="start", type=Path, help="a trained model, to learn tools")
    parser.add_argument("--rate", type=float, help="peak learning rate (default: the recipe's)")
    parser.add_argument("--out", type=Path, default=Path("shared/models/demo"))
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(tempfile.gettempdir()) / "pdmesh-demo-train.safetensors",
        help="where to keep, and look for, the state of an unfinished run",
    )
    parser.add_argument("--export-every", type=float, default=5.0, help="minutes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="compile the model (needs g++)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Trainer(args).run()


if __name__ == "__main__":
    main()
