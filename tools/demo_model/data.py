"""Training text for the bundled demo model.

Everything here is a pure function of a seed: sentences come from templates and short word
lists, so the corpus has no outside source. The only imports are from the standard library.

A document is text plus character spans, each span carrying the loss weight of its tokens.
Documents are of four kinds: recall of codes placed amid other sentences, small arithmetic,
talk (greetings, counting, short stories), and repetition of arbitrary text.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import words
from .words import MODEL_NAME as MODEL_NAME

PAD = "<|pad|>"
END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT, SYSTEM)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Loss weights of the tokens of a document.
DIGITS = 1.0
ANSWER = 0.3
STORY = 0.15
BACKGROUND = 0.05

_TOKEN_PATTERN = re.compile(r"<\|\w+\|>|\d|[^\W\d]+|[^\w\s]|\s(?=\d)|\s\s+")


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end`` of a document, with the loss weight of their tokens."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class Document:
    """A training text; tokens outside all spans have the weight ``BACKGROUND``."""

    kind: str
    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class RecallPrompt:
    """A prompt that holds codes amid other sentences and asks for one of them.

    ``messages`` is the prompt as a chat. ``text`` is the same for plain completion: it ends in
    the beginning of the answer, so that the continuation is a space and the code.
    ``position`` is the place of the asked fact in the text, from 0.0 (first) to 1.0 (last).
    """

    messages: list[dict[str, str]]
    text: str
    key: str
    answer: str
    expected_reply: str
    position: float


@dataclass
class _Builder:
    """Collects the pieces of a document."""

    parts: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    length: int = 0

    def add(self, text: str, weight: float = BACKGROUND) -> None:
        if weight != BACKGROUND:
            self.spans.append(Span(self.length, self.length + len(text), weight))
        self.parts.append(text)
        self.length += len(text)

    def add_answer(self, answer: str, digits: str = "", weight: float = ANSWER) -> None:
        """Add ``answer``; the last occurrence of ``digits`` in it weighs most."""
        start = answer.rfind(digits) if digits else -1
        if start < 0:
            self.add(answer, weight)
            return
        self.add(answer[:start], weight)
        self.add(digits, DIGITS)
        self.add(answer[start + len(digits) :], weight)

    def add_turn(
        self, question: str, answer: str, digits: str = "", weight: float = ANSWER
    ) -> None:
        self.add(f"{USER}{question}{END}{ASSISTANT}")
        self.add_answer(answer + END, digits, weight)

    def document(self, kind: str) -> Document:
        return Document(kind, "".join(self.parts), tuple(self.spans))


def approximate_tokens(text: str) -> int:
    """Return about how many tokens the demo tokenizer makes of ``text``."""
    return sum(1 for _ in _TOKEN_PATTERN.finditer(text))


class _Scene:
    """Makes filler sentences that never contradict each other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lives: dict[str, str] = {}
        self.eats: dict[str, str] = {}

    def filler(self) -> str:
        """Return one sentence that states no code."""
        rng = self.rng
        roll = rng.random()
        if roll < 0.08:
            name = rng.choice(words.NAMES)
            city = self.lives.setdefault(name, rng.choice(words.CITIES))
            return f"{name} lives in {city}."
        if roll < 0.14:
            name = rng.choice(words.NAMES)
            food = self.eats.setdefault(name, rng.choice(words.FOODS))
            return f"{name} likes to eat {food}."
        return _fill(rng.choice(words.FILLERS), rng)

    def question(self) -> tuple[str, str] | None:
        """Return a question on a person of this scene, with its answer."""
        rng = self.rng
        if self.lives and (not self.eats or rng.random() < 0.6):
            name = rng.choice(list(self.lives))
            return f"Where does {name} live?", f"{name} lives in {self.lives[name]}."
        if self.eats:
            name = rng.choice(list(self.eats))
            return f"What does {name} like to eat?", f"{name} likes to eat {self.eats[name]}."
        return None


_SLOTS: dict[str, Sequence[str]] = {
    "animal": words.ANIMALS,
    "place": words.PLACES,
    "thing": words.THINGS,
    "mood": words.MOODS,
    "weather": words.WEATHER,
    "adverb": words.ADVERBS,
    "move": words.MOVES,
    "see": words.SEES,
    "when": words.WHENS,
    "name": words.NAMES,
    "food": words.FOODS,
    "adjective": words.ADJECTIVES,
    "noun": words.NOUNS,
    "city": words.CITIES,
}
_SLOT_PATTERN = re.compile(r"\{(\w+?)(2?)\}")
_VOWEL_PATTERN = re.compile(r"\b([Aa]) (?=[aeio])")


def _fill(template: str, rng: random.Random) -> str:
    used: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        slot = match[1]
        if slot == "year":
            return str(rng.randint(1900, 2030))
        if slot == "hour":
            return str(rng.randint(1, 12))
        word = rng.choice(_SLOTS[slot])
        while word == used.get(slot):
            word = rng.choice(_SLOTS[slot])
        used[slot] = word
        return word

    text = _SLOT_PATTERN.sub(replace, template)
    return _VOWEL_PATTERN.sub(r"\1n ", text)


def _code(rng: random.Random) -> str:
    return f"{rng.randint(0, 9999):04d}"


def _keys(rng: random.Random, count: int) -> list[str]:
    """Return distinct keys; mostly from few adjectives and nouns, so that many share one."""
    side = math.isqrt(count) + 1
    if rng.random() < 0.75:
        adjectives = rng.sample(
            words.ADJECTIVES, min(len(words.ADJECTIVES), side + rng.randint(0, 2))
        )
        nouns = rng.sample(words.NOUNS, min(len(words.NOUNS), side + rng.randint(0, 2)))
    else:
        adjectives, nouns = words.ADJECTIVES, words.NOUNS
    pairs = [f"{adjective} {noun}" for adjective in adjectives for noun in nouns]
    if len(pairs) < count:
        pairs = [f"{adjective} {noun}" for adjective in words.ADJECTIVES for noun in words.NOUNS]
    return rng.sample(pairs, count)


def _choose_facts(rng: random.Random, count: int) -> dict[str, str]:
    return {key: _code(rng) for key in _keys(rng, count)}


def _made_up_word(rng: random.Random) -> str:
    syllables = rng.randint(1, 3)
    letters = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(syllables))
    return "".join(letters) + rng.choice(("", "n", "r", "t", "x"))


def _rename_some(rng: random.Random, facts: dict[str, str]) -> dict[str, str]:
    """Return the facts with made-up nouns or codes of other lengths in some of them."""
    renamed: dict[str, str] = {}
    for key, code in facts.items():
        roll = rng.random()
        if roll < 0.4:
            key = f"{key.partition(' ')[0]} {_made_up_word(rng)}"
        elif roll < 0.6:
            code = str(rng.randint(10, 99_999))
        renamed[key] = code
    return renamed


def _fact(rng: random.Random, key: str, code: str) -> str:
    template = words.FACTS[0] if rng.random() < 0.6 else rng.choice(words.FACTS)
    return template.format(key=key, code=code)


def _question(rng: random.Random, key: str) -> str:
    template = words.QUESTIONS[0] if rng.random() < 0.5 else rng.choice(words.QUESTIONS)
    return template.format(key=key)


def _filler_until(scene: _Scene, tokens: int) -> list[str]:
    sentences: list[str] = []
    while tokens > 0:
        sentence = scene.filler()
        tokens -= approximate_tokens(sentence)
        if tokens >= 0:
            sentences.append(sentence)
    return sentences


def _interleave(rng: random.Random, facts: list[str], fillers: list[str]) -> list[str]:
    """Return the facts, in order, at random places amid the fillers."""
    total = len(facts) + len(fillers)
    places = set(rng.sample(range(total), len(facts)))
    fact, filler = iter(facts), iter(fillers)
    return [next(fact) if place in places else next(filler) for place in range(total)]


_FACT_TOKENS = 14
_TURN_TOKENS = 27
_RESTATEMENT_TOKENS = 13


def recall_document(rng: random.Random, tokens: int) -> Document:
    """Return facts amid other sentences, then questions with answers or restatements."""
    chat = rng.random() < 0.7
    query_tokens = _TURN_TOKENS if chat else _RESTATEMENT_TOKENS
    count = rng.randint(1, 14)
    queries = rng.randint(1, 14)
    budget = tokens - 8
    while count * _FACT_TOKENS + queries * query_tokens > budget and (count > 1 or queries > 1):
        if count * _FACT_TOKENS > queries * query_tokens and count > 1:
            count -= 1
        elif queries > 1:
            queries -= 1
        else:
            count -= 1
    facts = _choose_facts(rng, count)
    if rng.random() < 0.06:
        facts = _rename_some(rng, facts)
        count = len(facts)
    scene = _Scene(rng)
    fillers = _filler_until(scene, budget - count * _FACT_TOKENS - queries * query_tokens)
    sentences = _interleave(rng, [_fact(rng, *fact) for fact in facts.items()], fillers)
    asked = rng.sample(list(facts), min(queries, count))
    while len(asked) < queries:
        asked.append(rng.choice(list(facts)))

    out = _Builder()
    if not chat:
        out.add(" ".join(sentences))
        for key in asked:
            out.add_answer(" " + words.RECALL_ANSWER.format(key=key, code=facts[key]), facts[key])
        out.add(END)
        return out.document("recall")

    lead = _chat_lead(rng, out, sentences)
    for number, key in enumerate(asked):
        question = _question(rng, key)
        if number == 0 and lead:
            question = f"{lead} {question}"
        out.add_turn(question, words.RECALL_ANSWER.format(key=key, code=facts[key]), facts[key])
        if rng.random() < 0.06:
            aside = scene.question()
            if aside is not None:
                out.add_turn(*aside, weight=DIGITS)
    return out.document("recall")


def _chat_lead(rng: random.Random, out: _Builder, sentences: list[str]) -> str:
    """Put the sentences before the questions; return what the first question must follow."""
    text = " ".join(sentences)
    roll = rng.random()
    if roll < 0.12:
        out.add(f"{SYSTEM}{text}{END}")
        return ""
    if rng.random() < 0.2:
        out.add(f"{SYSTEM}{rng.choice(words.SYSTEM_PROMPTS)}{END}")
    if roll < 0.25:
        out.add_turn(text, words.ACKNOWLEDGEMENT)
        return ""
    if roll < 0.35 and len(sentences) > 1:
        cut = rng.randrange(1, len(sentences))
        out.add_turn(" ".join(sentences[:cut]), words.ACKNOWLEDGEMENT)
        return " ".join(sentences[cut:])
    return text


def _sum(rng: random.Random) -> tuple[str, str, str]:
    """Return a question, its answer and the digits of the result."""
    left, right = rng.randint(0, 99), rng.randint(0, 99)
    if rng.random() < 0.15:
        left, right = left % 10, right % 10
    if rng.random() < 0.5:
        expression, result = f"{left} + {right}", str(left + right)
    else:
        if left < right and rng.random() < 0.6:
            left, right = right, left
        expression, result = f"{left} - {right}", str(left - right)
    question = rng.choice(
        ("What is {}?",) * 5 + ("How much is {}?", "{} = ?", "{}", "{} =", "Please add up: {}")
    )
    return question.format(expression), f"{expression} = {result}.", result


def arithmetic_document(rng: random.Random, tokens: int) -> Document:
    """Return sums as chat turns or as plain text."""
    out = _Builder()
    turns = max(1, min(rng.randint(1, 6), tokens // 24))
    if rng.random() < 0.8:
        if rng.random() < 0.1:
            out.add(f"{SYSTEM}{rng.choice(words.SYSTEM_PROMPTS)}{END}")
        for _ in range(turns):
            out.add_turn(*_sum(rng))
        return out.document("arithmetic")
    for turn in range(turns * 2):
        _, answer, result = _sum(rng)
        out.add_answer((" " if turn else "") + answer, result)
    out.add(END)
    return out.document("arithmetic")


def _count(rng: random.Random) -> tuple[str, str]:
    first = rng.choice((1, 1, 1, rng.randint(0, 40)))
    last = first + rng.randint(2, 20)
    numbers = ", ".join(str(number) for number in range(first, last + 1))
    return f"Count from {first} to {last}.", numbers + "."


def _story(rng: random.Random, hero: str | None = None) -> str:
    hero = hero or rng.choice(words.ANIMALS)
    friend = rng.choice([animal for animal in words.ANIMALS if animal != hero])
    place, thing = rng.choice(words.PLACES), rng.choice(words.THINGS)
    mood, adjective = rng.choice(words.MOODS), rng.choice(words.ADJECTIVES)
    middle = (
        f"One day the {hero} {rng.choice(words.PAST_MOVES)} to the {place}.",
        f"There the {hero} found a {adjective} {thing}.",
        f"The {hero} gave the {thing} to a {friend}.",
    )
    end = rng.choice(
        (
            f"The {friend} was very happy.",
            f"The {hero} and the {friend} became good friends.",
            f"Then the {hero} went home to sleep.",
        )
    )
    opening = f"Once upon a time there was a {mood} {hero}."
    text = " ".join((opening, *middle, end))
    return _VOWEL_PATTERN.sub(r"\1n ", text)


_STORY_QUESTIONS = (
    "Tell me a story about a {}.",
    "Tell me a story about the {}.",
    "Tell me a short story about a {}.",
    "Write a story about a {}.",
)
_ANY_STORY = ("Tell me a story.", "Tell me a short story.", "Please tell me a story.")


def _talk_turn(rng: random.Random) -> tuple[str, str, float]:
    roll = rng.random()
    if roll < 0.5:
        questions, answer = rng.choice(words.SMALL_TALK)
        return rng.choice(questions), answer, ANSWER
    if roll < 0.6:
        return *_count(rng), ANSWER
    hero = rng.choice(words.ANIMALS)
    if rng.random() < 0.3:
        return rng.choice(_ANY_STORY), _story(rng), STORY
    question = _VOWEL_PATTERN.sub(r"\1n ", rng.choice(_STORY_QUESTIONS).format(hero))
    return question, _story(rng, hero), STORY


def talk_document(rng: random.Random, tokens: int) -> Document:
    """Return small talk and short stories, as a chat or as plain text."""
    out = _Builder()
    if rng.random() < 0.25:
        text = _story(rng) if rng.random() < 0.4 else " ".join(_filler_until(_Scene(rng), tokens))
        out.add(text + END, STORY)
        return out.document("talk")
    if rng.random() < 0.2:
        out.add(f"{SYSTEM}{rng.choice(words.SYSTEM_PROMPTS)}{END}")
    used = 0
    for _ in range(rng.randint(1, 4)):
        question, answer, weight = _talk_turn(rng)
        out.add_turn(question, answer, weight=weight)
        used += approximate_tokens(question) + approximate_tokens(answer) + 3
        if used > tokens // 2:
            break
    return out.document("talk")


def _arbitrary_text(rng: random.Random) -> str:
    parts: list[str] = []
    for _ in range(rng.randint(1, 5)):
        roll = rng.random()
        if roll < 0.4:
            parts.append(rng.choice(rng.choice(list(_SLOTS.values()))))
        elif roll < 0.65:
            parts.append(_made_up_word(rng))
        else:
            alphabet = rng.choice(words.ALPHABETS)
            parts.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 5))))
    return " ".join(parts)


def repeat_document(rng: random.Random, tokens: int) -> Document:
    """Return chat turns that ask for arbitrary text back, so that every byte is trained."""
    out = _Builder()
    for _ in range(max(1, min(rng.randint(1, 3), tokens // 48))):
        text = _arbitrary_text(rng)
        question = rng.choice(("Repeat: {}", "Say: {}", "Repeat after me: {}")).format(text)
        out.add_turn(question, text)
    return out.document("repeat")


Maker = Callable[[random.Random, int], Document]
MIX: tuple[tuple[Maker, float], ...] = (
    (recall_document, 0.7),
    (arithmetic_document, 0.16),
    (talk_document, 0.1),
    (repeat_document, 0.04),
)


def sequence(rng: random.Random, tokens: int) -> list[Document]:
    """Return documents of about ``tokens`` tokens in total: one row of a training batch."""
    makers = [maker for maker, _ in MIX]
    maker = rng.choices(makers, [weight for _, weight in MIX])[0]
    documents: list[Document] = []
    left = tokens
    if maker is recall_document:
        share = 1.0 if rng.random() < 0.6 else rng.uniform(0.4, 1.0)
        documents.append(recall_document(rng, int(tokens * share)))
        left -= approximate_tokens(documents[-1].text)
    while left > 40:
        maker = rng.choices(makers, (0.2 if left >= 70 else 0.0, 0.4, 0.3, 0.1))[0]
        documents.append(maker(rng, min(left, 128)))
        left -= approximate_tokens(documents[-1].text)
    rng.shuffle(documents)
    return documents


def corpus(seed: int, documents: int) -> list[str]:
    """Return texts for training the tokenizer."""
    rng = random.Random(f"corpus-{seed}")
    texts: list[str] = []
    while len(texts) < documents:
        texts.extend(document.text for document in sequence(rng, 384))
    return texts[:documents]


def recall_prompt(seed: int, num_facts: int, approx_tokens: int) -> RecallPrompt:
    """Return a recall prompt of about ``approx_tokens`` tokens with ``num_facts`` codes.

    The prompt is a pure function of the arguments. Facts are at random places amid filler
    sentences, and one of them, chosen at random, is asked for. When the facts alone need more
    tokens than asked for, the prompt is longer.
    """
    if num_facts < 1:
        raise ValueError("num_facts must be at least 1")
    rng = random.Random(f"recall-{seed}-{num_facts}-{approx_tokens}")
    facts = _choose_facts(rng, num_facts)
    stated = [_fact(rng, *fact) for fact in facts.items()]
    index = rng.randrange(num_facts)
    key = list(facts)[index]
    question = words.QUESTIONS[0].format(key=key)
    fixed = sum(approximate_tokens(text) for text in stated) + approximate_tokens(question) + 3
    fillers = _filler_until(_Scene(rng), approx_tokens - fixed)
    sentences = _interleave(rng, stated, fillers)
    body = " ".join(sentences)
    reply = words.RECALL_ANSWER.format(key=key, code=facts[key])
    place = sentences.index(stated[index])
    return RecallPrompt(
        messages=[{"role": "user", "content": f"{body} {question}"}],
        text=f"{body} {reply.partition(' is ')[0]} is",
        key=key,
        answer=facts[key],
        expected_reply=reply,
        position=place / max(1, len(sentences) - 1),
    )
