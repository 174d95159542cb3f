"""Measure the demo model, or any Hugging Face folder with a chat template, in transformers.

    python -m tools.demo_model.evaluate shared/models/demo
    python -m tools.demo_model.evaluate shared/models/demo-tools

The second is asked for calls of tools and for JSON, too, as is whatever has tools in its template.

Every prompt is run on its own and greedily. The prompts are a pure function of ``--seed``; the
default seed is not one that training uses.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import data, tool_data, words

LENGTHS = (64, 128, 256, 512, 768, 1000)
NUM_FACTS = 10
SHORT_PROMPT = 128
SHORT_NUM_FACTS = 3
THIRDS = ("first third", "middle third", "last third")


class Subject:
    """The model under test."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def chat_tokens(
        self, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the prompt of a chat."""
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        return self.text_tokens(text)

    def text_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text in which special tokens may be spelled out."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def complete(self, tokens: list[int], max_new_tokens: int) -> str:
        """Return the greedy continuation up to the end token."""
        prompt = torch.tensor([tokens])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        answer = output[0, len(tokens) :]
        # Marks of calls are special tokens, too, and are to be seen.
        text = self.tokenizer.decode(answer, skip_special_tokens=False)
        return text.partition(data.END)[0]

    def reply(self, question: str, max_new_tokens: int = 48) -> str:
        """Return the answer to one user message."""
        return self.chat([question], max_new_tokens=max_new_tokens)

    def chat(
        self,
        said: list[str],
        *,
        tools: list[dict[str, Any]] | None = None,
        max_new_tokens: int = 128,
    ) -> str:
        """Return the answer to the last of these; user and assistant speak in turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(said)]
        return self.complete(self.chat_tokens(messages, tools), max_new_tokens)


def rate(outcomes: Iterable[bool]) -> str:
    """Return a count of successes as text."""
    outcomes = list(outcomes)
    return f"{sum(outcomes)}/{len(outcomes)} = {sum(outcomes) / len(outcomes):.1%}"


def recall(subject: Subject, seed: int, samples: int) -> None:
    """Print recall by prompt length and by the place of the asked fact."""
    thirds: dict[str, list[bool]] = defaultdict(list)
    print("recall, exact match (chat: the whole reply; text: the four digits)")
    for length in LENGTHS:
        num_facts = NUM_FACTS if length > SHORT_PROMPT else SHORT_NUM_FACTS
        chat: list[bool] = []
        text: list[bool] = []
        prompt_tokens = 0
        for sample in range(samples):
            prompt = data.recall_prompt(seed + sample, num_facts, length)
            tokens = subject.chat_tokens(prompt.messages)
            prompt_tokens += len(tokens)
            chat.append(subject.complete(tokens, 24) == prompt.expected_reply)
            thirds[THIRDS[min(2, int(prompt.position * 3))]].append(chat[-1])
            completion = subject.complete(subject.text_tokens(prompt.text), 6)
            text.append(completion.startswith(f" {prompt.answer}."))
        print(
            f"  {length:5d} tokens asked, {prompt_tokens / samples:6.1f} on average, "
            f"{num_facts:2d} codes: chat {rate(chat)}, text {rate(text)}",
            flush=True,
        )
    for third in THIRDS:
        print(f"  code in the {third}: chat {rate(thirds[third])}")


def arithmetic(subject: Subject, seed: int, samples: int) -> None:
    """Print how many random sums of each kind are right."""
    rng = random.Random(f"arithmetic-{seed}")
    outcomes: dict[str, list[bool]] = {"a + b": [], "a - b, a >= b": [], "a - b, a < b": []}
    print("arithmetic, 0 to 99, exact match of the whole reply")
    for kind, results in outcomes.items():
        while len(results) < samples:
            left, right = rng.randint(0, 99), rng.randint(0, 99)
            if kind != "a + b" and (left < right) != kind.endswith("a < b"):
                continue
            result = left + right if kind == "a + b" else left - right
            expression = f"{left} {kind[2]} {right}"
            answer = subject.reply(f"What is {expression}?", 16)
            results.append(answer == f"{expression} = {result}.")
        print(f"  {kind}: {rate(results)}", flush=True)


def _talk() -> Iterator[tuple[str, str, str]]:
    for questions, answer in words.SMALL_TALK:
        for question in questions:
            yield "small talk", question, answer
    for last in range(3, 21):
        numbers = ", ".join(str(number) for number in range(1, last + 1))
        yield "counting", f"Count from 1 to {last}.", numbers + "."
    for text in ("Tokyo", "red door 7", "héllo wörld", "ваза", "αβγ", "日本 山", "🙂🎉", "a+b=c"):
        yield "repeating", f"Repeat: {text}", text


def talk(subject: Subject) -> None:
    """Print how many fixed questions get their fixed answers, and some free continuations."""
    outcomes: dict[str, list[bool]] = defaultdict(list)
    wrong: list[str] = []
    for kind, question, answer in _talk():
        reply = subject.reply(question, 96)
        outcomes[kind].append(reply == answer)
        if reply != answer:
            wrong.append(f"  {question!r} -> {reply!r}")
    for kind, results in outcomes.items():
        print(f"{kind}, exact match: {rate(results)}")
    print("\n".join(wrong) or "  (none wrong)")
    print("continuations")
    for text in ("The cat", "Once upon a time", "In the morning"):
        print(f"  {text!r} -> {subject.complete(subject.text_tokens(text), 24)!r}")
    print(f"  story -> {subject.reply('Tell me a story about a fox.', 96)!r}")


def _offered(made: tool_data.Made) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in made.shown.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": made.name, "parameters": parameters}}


def calls(subject: Subject, seed: int, samples: int) -> None:
    """Print how often the right tool is called with the right arguments, all of them, in the
    categories of the Berkeley function-calling leaderboard that are of one turn."""
    rng = random.Random(f"calls-{seed}")
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for _ in range(samples):
        # Names and parameters are unlike: a question must not fit two tools.
        several = rng.sample(tool_data.KNOWN_TOOLS, 3)
        known = [tool_data.known_tool(rng, tool) for tool in several]
        made_up = tool_data.any_tool(rng)
        for kind, asked, others in (
            ("one tool", known[0], []),
            ("one of three tools", known[0], known[1:]),
            ("a tool of a made-up name", made_up, []),
        ):
            offered = [asked, *others]
            rng.shuffle(offered)
            answer = subject.chat([asked.question], tools=[_offered(one) for one in offered])
            outcomes[kind].append(answer == tool_data.call_text(asked))
        question = tool_data.plain_turn(rng)[0]
        answer = subject.chat([question], tools=[_offered(one) for one in known])
        outcomes["no tool fits: none is called"].append(tool_data.CALL not in answer)
        result = f"{tool_data.RESPONSE}{known[0].result}{tool_data.RESPONSE_END}"
        said = [known[0].question, tool_data.call_text(known[0]), result]
        answer = subject.chat(said, tools=[_offered(known[0])])
        outcomes["the result is told"].append(answer == known[0].answer)
    print("calls of tools, exact match of the whole call or answer")
    for kind, results in outcomes.items():
        print(f"  {kind}: {rate(results)}", flush=True)


def schemas(subject: Subject, seed: int, samples: int) -> None:
    """Print how often sentences are told as JSON of a schema, without a grammar."""
    rng = random.Random(f"schemas-{seed}")
    same: list[bool] = []
    for _ in range(samples):
        text, schema, value = tool_data.schema_case(rng)
        answer = subject.reply(f"{text} {tool_data.asked_schema(rng, schema)}", 96)
        same.append(answer == json.dumps(value))
    print(f"JSON of a schema, without a grammar, exact match: {rate(same)}", flush=True)


def second_turns(subject: Subject, seed: int, samples: int) -> None:
    """Print how often a question about the first turn is answered in the second."""
    rng, untold = random.Random(f"turns-{seed}"), random.Random(f"untold-{seed}")
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for _ in range(samples):
        prompt = data.recall_prompt(rng.randrange(2**31), 1, 24)
        told, _, question = prompt.messages[-1]["content"].rpartition(". ")
        answer = subject.chat([f"{told}.", words.ACKNOWLEDGEMENT, question])
        outcomes["a code of the first turn"].append(answer == prompt.expected_reply)
        told_key, asked_key = data._keys(untold, 2)  # pyright: ignore[reportPrivateUsage]
        told = words.FACTS[0].format(key=told_key, code=f"{untold.randint(0, 9999):04d}")
        asked = words.QUESTIONS[0].format(key=asked_key)
        answer = subject.chat([told, words.ACKNOWLEDGEMENT, asked])
        outcomes["a code that was not told: none is made up"].append(not re.search(r"\d", answer))
        name = tool_data.made_up(rng) if rng.random() < 0.5 else rng.choice(words.NAMES)
        greeting = f"Nice to meet you, {name}."
        answer = subject.chat([f"My name is {name}.", greeting, "What is my name?"])
        outcomes["the user's name"].append(answer == f"Your name is {name}.")
        left, right = rng.randint(0, 99), rng.randint(0, 99)
        first = ["Hello!", words.SMALL_TALK[0][1], f"What is {left} + {right}?"]
        outcomes["a sum after a greeting"].append(
            subject.chat(first) == f"{left} + {right} = {left + right}."
        )
    print("second turns of a chat, exact match of the whole reply")
    for kind, results in outcomes.items():
        print(f"  {kind}: {rate(results)}", flush=True)


@torch.inference_mode()
def held_out_loss(subject: Subject, seed: int, documents: int) -> None:
    """Print the mean negative log-likelihood of unseen documents, per token."""
    rng = random.Random(f"loss-{seed}")
    totals: dict[str, tuple[float, int]] = {}
    while documents > 0:
        for document in data.sequence(rng, rng.choice((128, 256, 512, 1024))):
            tokens = torch.tensor([subject.text_tokens(document.text)])
            if tokens.shape[1] > subject.model.config.max_position_embeddings:
                continue
            loss = subject.model(tokens, labels=tokens).loss.item()
            total, count = totals.get(document.kind, (0.0, 0))
            scored = tokens.shape[1] - 1
            totals[document.kind] = total + loss * scored, count + scored
            documents -= 1
    print("held-out loss per token (nats, all tokens)")
    for kind, (total, count) in sorted(totals.items()):
        print(f"  {kind}: {total / count:.4f} over {count:,} tokens")
    total = sum(total for total, _ in totals.values())
    count = sum(count for _, count in totals.values())
    print(f"  all: {total / count:.4f} over {count:,} tokens")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Measure the demo model.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("shared/models/demo"))
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=200, help="prompts per line of the result")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    subject = Subject(args.folder, getattr(torch, args.dtype))
    recall(subject, args.seed, args.samples)
    arithmetic(subject, args.seed, args.samples)
    talk(subject)
    second_turns(subject, args.seed, args.samples)
    if "tools" in (subject.tokenizer.chat_template or ""):
        calls(subject, args.seed, args.samples)
        schemas(subject, args.seed, args.samples)
    held_out_loss(subject, args.seed, args.samples)
    print(f"{time.monotonic() - started:.0f} s, {args.dtype}")


if __name__ == "__main__":
    main()
