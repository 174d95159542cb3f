"""The demo model's training text: deterministic, consistent, and of the length asked for."""

import random
import re

import pytest

from tools.demo_model import data, tool_data, words

LENGTHS = (64, 128, 256, 512, 1000)
SEEDS = range(8)
FACT = re.compile(
    r"(?:code (?:of|for) the |The )(\w+ \w+)(?: is| has the code| opens with the code)"
)


def prompt_text(prompt: data.RecallPrompt) -> str:
    """Return the one message of a prompt."""
    (message,) = prompt.messages
    return message["content"]


def stated_codes(text: str) -> dict[str, str]:
    """Return the codes stated in a text by their keys."""
    sentences = re.findall(r"[^.?!]*\b\d{4}\.", text)
    found: dict[str, str] = {}
    for sentence in sentences:
        match = FACT.search(sentence)
        if match:
            found[match[1]] = sentence[-5:-1]
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_a_recall_prompt_is_a_pure_function_of_its_arguments(length: int) -> None:
    """The same arguments give the same prompt, and another seed gives another."""
    assert data.recall_prompt(5, 3, length) == data.recall_prompt(5, 3, length)
    assert data.recall_prompt(5, 3, length) != data.recall_prompt(6, 3, length)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_recall_prompt_states_the_code_it_asks_for(seed: int, length: int) -> None:
    """The asked key is stated once, with the answer, and is asked for at the end."""
    prompt = data.recall_prompt(seed, 3, length)
    content = prompt_text(prompt)
    assert stated_codes(content)[prompt.key] == prompt.answer
    assert content.endswith(f"What is the code of the {prompt.key}?")
    assert prompt.text.endswith(f" The code of the {prompt.key} is")
    assert prompt.expected_reply == f"The code of the {prompt.key} is {prompt.answer}."
    assert 0.0 <= prompt.position <= 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_recall_prompt_has_the_facts_and_the_length_asked_for(seed: int) -> None:
    """All keys are distinct, and the length is met to within one sentence."""
    prompt = data.recall_prompt(seed, 10, 600)
    assert len(stated_codes(prompt_text(prompt))) == 10
    assert 580 <= data.approximate_tokens(prompt_text(prompt)) <= 600


def test_keys_share_words_with_other_keys() -> None:
    """Most prompts hold a key that differs from the asked one in one word only."""
    sharing = 0
    for seed in range(40):
        prompt = data.recall_prompt(seed, 10, 400)
        adjective, noun = prompt.key.split()
        others = [key.split() for key in stated_codes(prompt_text(prompt)) if key != prompt.key]
        sharing += any(adjective == other[0] or noun == other[1] for other in others)
    assert sharing > 30


def test_a_recall_prompt_needs_a_fact() -> None:
    """A prompt without facts cannot ask for one."""
    with pytest.raises(ValueError, match="num_facts"):
        data.recall_prompt(0, 0, 64)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_training_row_is_deterministic_and_about_as_long_as_asked(length: int) -> None:
    """A row depends on the generator's state only and does not exceed its length by much."""
    rows = [data.sequence(random.Random(7), length) for _ in range(2)]
    assert rows[0] == rows[1]
    for seed in SEEDS:
        row = data.sequence(random.Random(seed), length)
        total = sum(data.approximate_tokens(document.text) for document in row)
        assert 0.4 * length < total < 1.3 * length + 40


@pytest.mark.parametrize("seed", SEEDS)
def test_spans_are_ordered_and_inside_the_text(seed: int) -> None:
    """Spans of a document do not overlap and weigh more than the background."""
    for document in data.sequence(random.Random(seed), 512):
        end = 0
        for span in document.spans:
            assert end <= span.start < span.end <= len(document.text)
            assert span.weight > data.BACKGROUND
            end = span.end
        assert document.text.endswith(data.END)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_are_right(seed: int) -> None:
    """Every stated sum is right and its result has the full loss weight."""
    document = data.arithmetic_document(random.Random(seed), 256)
    sums = re.findall(r"(\d+) ([+-]) (\d+) = (-?\d+)\.", document.text)
    assert sums
    for left, sign, right, result in sums:
        assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    heavy = [span for span in document.spans if span.weight == data.DIGITS]
    assert [document.text[span.start : span.end] for span in heavy] == [s[3] for s in sums]


def test_every_answer_in_a_document_agrees_with_its_facts() -> None:
    """The digits of full weight are the code that the document states for the asked key."""
    document = data.recall_document(random.Random("consistent"), 512)
    facts, _, _ = document.text.partition(data.ASSISTANT)
    stated = stated_codes(facts)
    answers = re.findall(r"\|>The code of the (\w+ \w+) is (\d{4})\.<", document.text)
    assert answers
    assert all(stated[key] == code for key, code in answers)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_code_that_was_not_told_is_not_known(seed: int) -> None:
    """Both kinds of answer begin alike, so that the key stands before what is known of it; what
    says it is what weighs most."""
    kinds: set[bool] = set()
    for number in range(8):
        document = tool_data.told_document(random.Random(f"{seed}-{number}"), 128)
        told, *_ = document.text.partition(data.ASSISTANT)
        stated = stated_codes(told)
        found = re.findall(r"assistant\|>The code of the (\w+ \w+) is( [\w ]+)\.<", document.text)
        answers: list[tuple[str, str]] = found
        assert answers
        for key, said in answers:
            assert said == (f" {stated[key]}" if key in stated else tool_data.NOT_KNOWN)
        most = [document.text[it.start : it.end] for it in document.spans if it.weight == 1.0]
        assert most == [said for _, said in answers]
        kinds |= {key in stated for key, _ in answers}
    assert kinds == {True, False}


def test_words_of_keys_are_distinct() -> None:
    """No word is listed twice, so that keys drawn from the lists are distinct."""
    for names in (words.ADJECTIVES, words.NOUNS, words.NAMES):
        assert len(set(names)) == len(names)
    assert len(words.ADJECTIVES) * len(words.NOUNS) > 900
