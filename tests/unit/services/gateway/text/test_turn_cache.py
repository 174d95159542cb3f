"""Long prompts tokenized piece by piece: the ids of the whole, and the work of what is new."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.gateway.text import turn_cache
from services.gateway.text.turn_cache import TurnCache
from tests.support.tiny_tokenizer import TEMPLATE, tiny_tokenizer

MARKS = ("<user>", "<a>", "<a><", "user>x", "<|im|>", "[I]", "[I] ", "x<", "_u_", ">", "▁<t>")
TURN = "<user>" + "the end of a line and in all " * 40 + "<eos>"


def metaspace(scheme: Any) -> Tokenizer:
    """As of models that came from sentencepiece: the first word, or each, has a space before it."""
    alphabet = " ▁<>[]|_abeiImnrstux"
    vocab = {char: index for index, char in enumerate(["?", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("ab", "ba"), normalizers.NFC()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return tokenizer


def spaced() -> Tokenizer:
    """A space is put before what does not begin with one."""
    tokenizer = tiny_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


MAKERS = {
    "bytes": tiny_tokenizer,
    "spaced": spaced,
    "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"),
    "never": lambda: metaspace("never"),
}
FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
)


@pytest.mark.parametrize("name", MAKERS)
@given(
    added=st.lists(
        st.tuples(st.sampled_from(MARKS), FLAGS), max_size=5, unique_by=lambda it: it[0]
    ),
    words=st.lists(st.sampled_from([*MARKS, " ", "\n", "ab", "x", "the end"]), max_size=30),
)
def test_the_ids_are_those_of_the_whole(
    name: str, added: list[tuple[str, dict[str, bool]]], words: list[str]
) -> None:
    """However the tokens that were added are written, one in another or over its end, and whatever
    they take of the spaces around them; also from the pieces that are kept."""
    tokenizer = MAKERS[name]()
    tokenizer.add_tokens([AddedToken(content, **flags) for content, flags in added])
    text = "".join(words)
    turns = TurnCache(tokenizer, "".join(MARKS), least_chars=1)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert turns.encode(text, b"") == whole
    assert turns.encode(text, b"") == whole


class Counting:
    """A tokenizer that notes what it is given."""

    def __init__(self) -> None:
        self._tokenizer = tiny_tokenizer()
        self.given: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
        self.given += texts
        return self._tokenizer.encode_batch_fast(texts, **more)


def test_a_turn_costs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier turns are not tokenized again, but for another owner, or when they had to go."""
    counting: Any = Counting()
    turns = TurnCache(counting, TEMPLATE.replace("<{{ message['role'] }}>", "<user><assistant>"))
    talk = TURN + TURN.replace("line", "page") + TURN.replace("line", "word")
    turns.encode(talk, b"me")
    assert "".join(counting.given) == talk
    counting.given.clear()
    more = TURN.replace("the", "in")
    assert turns.encode(talk + more, b"me") == tiny_tokenizer().encode(talk + more).ids
    assert len("".join(counting.given)) < len(TURN) + len(more) + 20
    counting.given.clear()
    turns.encode(talk, b"you")
    assert "".join(counting.given) == talk
    monkeypatch.setattr(turn_cache, "MAX_IDS", 10)
    turns.encode("x", b"me")
    counting.given.clear()
    turns.encode(talk, b"me")
    assert "".join(counting.given) == talk
