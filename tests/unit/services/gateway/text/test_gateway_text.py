"""Text of the gateway: decoding of answers, stop strings, chat templates, single tokens."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.process import load
from services.gateway.text.chat_template import ChatTemplate, Rendering
from services.gateway.text.detokenizer import (
    MAX_CHAR_BYTES,
    MAX_UNFINISHED,
    AnswerText,
    ByteDetokenizer,
    Detokenizer,
    StopMatcher,
    StreamDetokenizer,
    WholeTexts,
)
from services.gateway.text.text_model import INLINE_CHARS, LARGE_CHARS, TextModel, byte_alphabet
from shared.config import GatewayConfig
from shared.errors import InvalidRequest, ModelError, Overloaded
from shared.model_folder import DEMO_FOLDER, ModelFolder, SpecialTokens, read_template
from shared.request import FinishReason, SamplingParams
from tests.support.answer_tokens import answer_tokens
from tests.support.fake_hub import FakeHub
from tests.support.tiny_tokenizer import EOS, VOCAB_SIZE, tiny_text_model, tiny_tokenizer

"""No test depends on speed."""

TOKENIZER = tiny_tokenizer()


def streaming(*, skip_special: bool = True) -> Detokenizer:
    """By the library's stream."""
    return StreamDetokenizer(TOKENIZER, skip_special=skip_special)


def looking_up(*, skip_special: bool = True) -> Detokenizer:
    """By texts of whole characters."""
    return ByteDetokenizer(WholeTexts(TOKENIZER, skip_special=skip_special))


WAYS = pytest.mark.parametrize("new", [streaming, looking_up])
"""The two must give the same pieces."""


FOX, X = "🦊".encode(), 260
"""The bytes of a character, which are tokens below, and a word."""


def sentencepiece_style() -> Tokenizer:
    """A tokenizer in the style of Llama 2: a space mark, byte fallback, and no space before the
    first word."""
    words = ["\u2581the", "\u2581fox", "s", "\u2581", "x"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


# --- decoding -----------------------------------------------------------------------------------


@WAYS
@given(text=st.text(max_size=60))
@example(text="🦊")
@example(text="e\u0301 क्षि \u200d👩‍👩‍👧")
def test_decoding_token_by_token_gives_the_text_back(
    text: str, new: Callable[[], Detokenizer]
) -> None:
    """Any Unicode text comes back from its tokens, whatever characters they split."""
    detokenizer = new()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = [detokenizer.step(token_id) for token_id in ids]
    # U+FFFD of the client's own looks like an incomplete character, so it may come late, but it
    # comes.
    assert "".join(pieces) + detokenizer.flush() == text


@WAYS
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_decoding_token_by_token_equals_a_full_decode(
    ids: list[int], new: Callable[[], Detokenizer]
) -> None:
    """Random ids, broken UTF-8 and unknown ids included, give the text of a full decode."""
    detokenizer = new()
    text = "".join(detokenizer.step(token_id) for token_id in ids) + detokenizer.flush()
    assert text == TOKENIZER.decode(ids)


@given(
    st.lists(
        st.one_of(
            st.integers(256, 260),
            st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]),
        )
    )
)
def test_byte_tokens_join_to_characters(parts: list[int | str]) -> None:
    """Words, and characters spelled out in byte tokens, give the text of a full decode.

    (Of byte tokens that never become UTF-8 a full decode replaces the whole run, good characters
    too, which no stream can know.)
    """
    tokenizer = sentencepiece_style()
    ids: list[int] = []
    for part in parts:
        ids += part.encode() if isinstance(part, str) else [part]
    detokenizer = StreamDetokenizer(tokenizer)
    text = "".join(detokenizer.step(token_id) for token_id in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


@given(
    ids=st.lists(st.integers(256, 260) | st.integers(128, 255), max_size=12),
    tail=st.lists(st.integers(256, 260) | st.integers(128, 255), max_size=3),
)
@example(ids=[*"😀".encode(), 0xF0, 257], tail=[])
@example(ids=[0xF0, 257, 258, 257, 258, 0xC3], tail=list("😀".encode()))
def test_broken_bytes_cost_no_word_and_no_space(ids: list[int], tail: list[int]) -> None:
    """Where the library rewrites what was given out, all that is whole comes, and once."""
    tokenizer = sentencepiece_style()
    detokenizer = StreamDetokenizer(tokenizer, prompt_tail=tail)
    text = "".join(detokenizer.step(token_id) for token_id in ids) + detokenizer.flush()
    words = tokenizer.decode([256, *(token_id for token_id in ids if token_id >= 256)])
    first = tokenizer.decode([256])
    assert re.sub("[^ -~]", "", text).strip() == words.removeprefix(first).strip()


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_looking_texts_up_gives_the_pieces_of_decoding(ids: list[int]) -> None:
    """Not only the whole text is the same: every token gives out the same piece at the same time,
    special ones skipped or not. A long run of broken bytes is given up by one of them alone."""
    whole, num_unfinished = WholeTexts(TOKENIZER, skip_special=True), 0
    for token_id in ids:
        text = whole[token_id]
        num_unfinished = 0 if text else num_unfinished + (text is None)
        assume(num_unfinished <= MAX_UNFINISHED)
    for skip in (True, False):
        one, other = streaming(skip_special=skip), looking_up(skip_special=skip)
        for token_id in ids:
            assert one.step(token_id) == other.step(token_id)
        assert one.flush() == other.flush()


def test_texts_are_looked_up_only_where_tokens_are_bytes() -> None:
    """A decoder that looks at its neighbours gives a token another text at the beginning."""
    assert WholeTexts.is_for(TOKENIZER)
    assert not WholeTexts.is_for(sentencepiece_style())
    assert (
        TextModel(sentencepiece_style(), None)
        .new_answer(SamplingParams())
        .feed(answer_tokens([256, 257]))
        == "the fox"
    )


def test_a_text_is_looked_up_rather_than_decoded() -> None:
    """Of a text that splits a character into tokens, only those are decoded."""

    class Noted(WholeTexts):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(tuple(token_ids))
            return super().decode(token_ids)

    decoded: list[tuple[int, ...]] = []
    whole = Noted(TOKENIZER, skip_special=True)
    ids = TOKENIZER.encode("the 🦊 and", add_special_tokens=False).ids
    fox = [token_id for token_id in ids if whole[token_id] is None]
    decoded.clear()
    detokenizer = ByteDetokenizer(whole)
    assert "".join(detokenizer.step(token_id) for token_id in ids) == "the 🦊 and"
    assert decoded == [tuple(fox[: at + 1]) for at in range(len(fox))] != []


@given(st.lists(st.integers(0x80, 0xFF), min_size=1, max_size=3), st.text(min_size=1, max_size=2))
def test_broken_bytes_are_told_as_they_come(broken: list[int], after: str) -> None:
    """A run of them costs no more than its length, is seen before it ends, and the text of all is
    that of a full decode."""
    longest = 0

    class Noted(WholeTexts):
        def decode(self, token_ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids)

    chars = {byte: char for char, byte in byte_alphabet().items()}
    data = broken * 50 + list(after.encode())
    ids = [TOKENIZER.token_to_id(chars[byte]) for byte in data]
    detokenizer = ByteDetokenizer(Noted(TOKENIZER, skip_special=True))
    pieces = [detokenizer.step(token_id) for token_id in ids]
    assert any(pieces[:12])
    assert longest <= MAX_UNFINISHED + MAX_CHAR_BYTES
    assert "".join(pieces) + detokenizer.flush() == TOKENIZER.decode(ids)


def test_an_answer_finishes_the_character_that_a_prompt_began() -> None:
    """And does not tell the prompt again."""
    ids = TOKENIZER.encode("a🦊b", add_special_tokens=False).ids
    whole = WholeTexts(TOKENIZER, skip_special=True)
    for cut in range(1, 5):
        detokenizer = ByteDetokenizer(whole, prompt_tail=ids[:cut])
        text = "".join(detokenizer.step(token_id) for token_id in ids[cut:]) + detokenizer.flush()
        assert text == "🦊b"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([*FOX[2:], X], "🦊x"),
        ([*FOX[2:], X, 0xC3], "🦊x\ufffd"),
        ([X], "x"),
    ],
    ids=["finished", "another begun", "left"],
)
def test_sentencepiece_tells_no_prompt_that_ends_inside_a_character(
    ids: list[int], text: str
) -> None:
    """Its bytes are tokens of their own, and its stream would begin with all that it was given."""
    the = 256
    detokenizer = StreamDetokenizer(sentencepiece_style(), prompt_tail=[the, *FOX[:2]])
    assert "".join(map(detokenizer.step, ids)) + detokenizer.flush() == text


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
    ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12),
)
def test_after_any_prompt_comes_what_the_answer_adds_to_it(
    prompt: list[int], ids: list[int]
) -> None:
    """Random ids, broken UTF-8 on both sides: the text of both, less what the prompt had said."""
    whole = WholeTexts(TOKENIZER, skip_special=True)
    detokenizer = ByteDetokenizer(whole, prompt_tail=prompt)
    text = "".join(detokenizer.step(token_id) for token_id in ids) + detokenizer.flush()
    said, full = TOKENIZER.decode(prompt), TOKENIZER.decode(prompt + ids)
    same = itertools.takewhile(lambda at: said[:at] == full[:at], range(1, len(said) + 1))
    assert text == full[max(same, default=0) :]


@WAYS
def test_no_piece_ends_inside_a_character(new: Callable[[], Detokenizer]) -> None:
    """The bytes of a character wait for its last one."""
    detokenizer = new()
    ids = TOKENIZER.encode("a🦊", add_special_tokens=False).ids
    assert [detokenizer.step(token_id) for token_id in ids] == ["a", "", "", "", "🦊"]


@WAYS
def test_an_incomplete_character_at_the_end_is_replaced(new: Callable[[], Detokenizer]) -> None:
    """What never became a character comes out as U+FFFD, as in a full decode."""
    detokenizer = new()
    ids = TOKENIZER.encode("a🦊", add_special_tokens=False).ids[:3]
    assert [detokenizer.step(token_id) for token_id in ids] == ["a", "", ""]
    assert detokenizer.flush() == TOKENIZER.decode(ids)[1:] == "\ufffd"


def test_an_answer_that_continues_a_prompt_keeps_its_first_space() -> None:
    """With the prompt's tail as a start, sentencepiece decoders do not eat the space."""
    tokenizer = sentencepiece_style()
    the, fox = 256, 257
    assert StreamDetokenizer(tokenizer).step(fox) == "fox"
    assert StreamDetokenizer(tokenizer, prompt_tail=[the]).step(fox) == " fox"


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    """Special tokens have no text by default."""
    ids = [*TOKENIZER.encode("a", add_special_tokens=False).ids, EOS]
    for skip, text in ((True, "a"), (False, "a<eos>")):
        for new in (streaming, looking_up):
            detokenizer = new(skip_special=skip)
            assert "".join(detokenizer.step(token_id) for token_id in ids) == text


def test_ids_that_the_tokenizer_does_not_know_have_no_text() -> None:
    """Padding rows of the embedding decode to nothing."""
    assert StreamDetokenizer(TOKENIZER).step(VOCAB_SIZE - 1) == ""


# --- stop strings -------------------------------------------------------------------------------


def stopped_reference(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Cut text at the stop string that is complete first, the longest of several; by brute
    force."""
    for end in range(len(text) + 1):
        for found in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(found):
                return text[: end - len(found)], found
    return text, None


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4, unique=True),
    cuts=st.lists(st.integers(0, 30), max_size=12),
)
@example(text="aaab", stop=["aab"], cuts=[1, 2, 3])
@example(text="abc", stop=["abc", "b"], cuts=[])
def test_stop_strings_do_not_depend_on_how_text_is_cut(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    """Any cutting gives the text and the stop string of a brute-force search, and never more than
    that on the way."""
    wanted, wanted_stop = stopped_reference(text, stop)
    matcher = StopMatcher(stop)
    given_out, found = "", None
    for start, end in itertools.pairwise(sorted({0, *cuts, len(text)})):
        safe, found = matcher.feed(text[start:end])
        given_out += safe
        assert wanted.startswith(given_out)
        if found is not None:
            break
    else:
        given_out += matcher.flush()
    assert (given_out, found) == (wanted, wanted_stop)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    """Only a possible beginning waits."""
    matcher = StopMatcher(["END"])
    assert matcher.feed("xE") == ("x", None)
    assert matcher.feed("N ") == ("EN ", None)
    assert matcher.feed("abc") == ("abc", None)


def feed_all(
    answer: AnswerText, ids: Sequence[int], *, per_batch: int, finish: FinishReason
) -> tuple[str, int, FinishReason, str | int | None]:
    """Feed ids in batches; returns text, number of tokens, finish reason and stop reason."""
    texts: list[str] = []
    for start in range(0, len(ids), per_batch):
        is_last = start + per_batch >= len(ids)
        part = ids[start : start + per_batch]
        reason = finish if is_last else FinishReason.NONE
        texts.append(answer.feed(answer_tokens(part, reason, first=start)))
        if answer.finish_reason is not FinishReason.NONE:
            return "".join(texts), answer.num_tokens, answer.finish_reason, answer.stop_reason
    raise AssertionError("the answer did not end")


@given(
    text=st.text("the and🦊in", max_size=30),
    stop=st.lists(st.text("the and🦊", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_an_answer_is_the_same_however_its_tokens_are_batched(
    text: str, stop: list[str], min_tokens: int
) -> None:
    """Streaming token by token, in threes and at once give one text, count, finish and stop
    reason."""
    model = tiny_text_model()
    ids = [*TOKENIZER.encode(text, add_special_tokens=False).ids, EOS]
    outcomes = {
        feed_all(
            model.new_answer(SamplingParams(min_tokens=min_tokens), stop=stop),
            ids,
            per_batch=per_batch,
            finish=FinishReason.STOP,
        )
        for per_batch in (1, 3, 1000)
    }
    assert len(outcomes) == 1
    model.close()


def test_a_stop_string_ends_the_answer_at_its_token() -> None:
    """Tokens after the one that completes the stop string do not count."""
    ids = TOKENIZER.encode("one and two", add_special_tokens=False).ids
    answer = AnswerText(StreamDetokenizer(TOKENIZER), stop=["nd"])
    assert answer.feed(answer_tokens(ids, FinishReason.LENGTH)) == "one a"
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_reason == "nd"
    assert TOKENIZER.decode(ids[: answer.num_tokens]) == "one and"


def test_the_stop_string_is_kept_on_request() -> None:
    """include_stop keeps the stop string, and the text of a stop token."""
    ids = TOKENIZER.encode("one and two", add_special_tokens=False).ids
    answer = AnswerText(StreamDetokenizer(TOKENIZER), stop=["nd"], include_stop=True)
    assert answer.feed(answer_tokens(ids, FinishReason.LENGTH)) == "one and"
    answer = AnswerText(StreamDetokenizer(TOKENIZER), stop_token_ids=[ids[-1]], include_stop=True)
    assert answer.feed(answer_tokens(ids, FinishReason.STOP)) == "one and two"
    assert answer.stop_reason == ids[-1]


def test_a_stop_token_has_no_text_and_is_the_stop_reason() -> None:
    """The token that ended the answer counts as a token but shows no text; end-of-sequence gives no
    reason."""
    ids = TOKENIZER.encode("ab", add_special_tokens=False).ids
    for last, stop_reason in ((ids[1], ids[1]), (EOS, None)):
        answer = AnswerText(StreamDetokenizer(TOKENIZER), stop_token_ids=[ids[1]])
        assert answer.feed(answer_tokens([ids[0], last], FinishReason.STOP)) == "a"
        assert (answer.num_tokens, answer.stop_reason) == (2, stop_reason)
        assert answer.finish_reason is FinishReason.STOP


def test_stop_strings_wait_for_min_tokens() -> None:
    """A stop string that is complete too early is ordinary text."""
    ids = TOKENIZER.encode("a.b.c.", add_special_tokens=False).ids
    answer = AnswerText(StreamDetokenizer(TOKENIZER), stop=["."], min_tokens=4)
    assert answer.feed(answer_tokens(ids, FinishReason.LENGTH)) == "a.b"
    assert answer.num_tokens == 4


@pytest.mark.parametrize("per_batch", [1, 1000])
def test_a_stop_string_may_begin_before_min_tokens(per_batch: int) -> None:
    """What counts is where it is complete."""
    ids = TOKENIZER.encode("x.b.c.", add_special_tokens=False).ids
    assert len(ids) == 6
    answer = AnswerText(StreamDetokenizer(TOKENIZER), stop=[".c", "x."], min_tokens=5)
    found = feed_all(answer, ids, per_batch=per_batch, finish=FinishReason.LENGTH)
    assert found == ("x.b", 5, FinishReason.STOP, ".c")


def test_the_last_token_brings_what_was_held_back() -> None:
    """It was the beginning of a stop string that never came."""
    answer = AnswerText(StreamDetokenizer(TOKENIZER), stop=["bc"])
    ids = TOKENIZER.encode("ab", add_special_tokens=False).ids
    assert answer.feed(answer_tokens(ids)) == "a"
    assert not answer.finish_reason
    assert answer.feed(answer_tokens([EOS], FinishReason.STOP, first=2)) == "b"
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_reason is None


# --- single tokens ------------------------------------------------------------------------------


def test_pieces_of_all_tokens_join_to_the_bytes_of_the_text() -> None:
    """Each token knows its bytes, also inside a character."""
    model = tiny_text_model()
    ids = TOKENIZER.encode("the 🦊 and\n", add_special_tokens=False).ids
    assert b"".join(model.piece(token_id).data for token_id in ids) == "the 🦊 and\n".encode()
    assert model.piece(EOS) == ("<eos>", b"<eos>")
    assert model.piece(VOCAB_SIZE - 1) == ("", b"")
    model.close()


def test_a_token_of_broken_bytes_is_named_by_them() -> None:
    """The completions format has no bytes field, so the name tells them."""
    model = tiny_text_model()
    fox = TOKENIZER.encode("🦊", add_special_tokens=False).ids
    assert model.piece(fox[0]).completion_name == "bytes:\\xf0"
    model.close()


def test_pieces_of_a_sentencepiece_tokenizer() -> None:
    """The space mark is a space, byte tokens are bytes."""
    model = TextModel(sentencepiece_style(), None)
    assert model.piece(257) == (" fox", b" fox")
    assert model.piece(0xE2).data == b"\xe2"
    model.close()


def test_an_id_far_beyond_all_others_costs_no_time() -> None:
    """A damaged tokenizer.json had every id up to it written out: minutes and gigabytes."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1 << 26}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    begin = time.process_time()
    TextModel(tokenizer, None).close()
    assert time.process_time() - begin < 0.3


async def test_a_long_text_is_tokenized_on_a_thread_with_the_same_result() -> None:
    """Off the loop or on it, the ids are the same."""
    model = tiny_text_model()
    text = "the fox and the hen. " * (INLINE_CHARS // 20 + 1)
    assert len(text) > INLINE_CHARS
    wanted = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert await model.encode(text, add_special_tokens=False) == wanted
    assert await model.decode_all([wanted], skip_special=False) == [text]
    model.close()


async def test_very_long_texts_are_tokenized_one_at_a_time_and_hold_up_no_others() -> None:
    """Two of 4 MiB at once took more memory than a container has."""
    model = tiny_text_model()
    num_running, most, may_end = 0, 0, threading.Event()

    def large() -> None:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        assert may_end.wait(10)
        num_running -= 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(model.offload(large, LARGE_CHARS + 1))
        for _ in range(3):
            assert await model.offload(lambda: "short", LARGE_CHARS) == "short"
        may_end.set()
    assert most == 1
    model.close()


async def test_what_a_very_long_text_took_is_given_back_to_the_system() -> None:
    """A gateway kept 700 MB after one of 4 MiB."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    model = tiny_text_model()
    before = resident()
    assert await model.encode(". " * (512 << 10), add_special_tokens=False)
    assert resident() - before < 64 << 20
    model.close()


@pytest.mark.parametrize("wrong", ['"temperature": -5', '"top_p": 0', '"top_k": Infinity'])
def test_defaults_that_no_request_may_have_are_refused_at_the_start(
    tmp_path: Path, wrong: str
) -> None:
    """They are the model's fault; each request that left them out was told that it was its own."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "generation_config.json").write_text(f"{{{wrong}}}")
    with pytest.raises(ModelError, match=r"generation_config\.json: t(emp|op)"):
        load(GatewayConfig(model=str(folder)))


async def test_as_many_long_texts_wait_as_requests_are_let_in() -> None:
    """A burst of long prompts is refused where it fills the queue of requests, not before."""
    config = GatewayConfig(model=str(DEMO_FOLDER), max_running=290, max_waiting=10)
    _, model = load(config)
    texts = ["x" * (INLINE_CHARS + 1) for _ in range(301)]
    num_refused = 0

    async def encode(text: str) -> None:
        nonlocal num_refused
        try:
            await model.encode(text, add_special_tokens=False)
        except Overloaded:
            num_refused += 1

    async with asyncio.TaskGroup() as tasks:
        for text in texts:
            tasks.create_task(encode(text))
    assert num_refused == 1
    model.close()


async def test_a_template_of_ones_own(tmp_path: Path) -> None:
    """In place of the folder's; what cannot be read is said with its name."""
    path = tmp_path / "own.jinja"
    path.write_text("<{{ messages[0].content }}>")
    _, model = load(GatewayConfig(model=str(DEMO_FOLDER), chat_template=path))
    assert await model.render([{"role": "user", "content": "hi"}]) == "<hi>"
    model.close()
    for wrong in (b"\xff", b"{% if"):
        path.write_bytes(wrong)
        with pytest.raises(ModelError):
            load(GatewayConfig(model=str(DEMO_FOLDER), chat_template=path))
    with pytest.raises(ModelError, match=r"no\.jinja: No such file"):
        load(GatewayConfig(model=str(DEMO_FOLDER), chat_template=tmp_path / "no.jinja"))


def test_of_a_hub_name_a_gateway_wants_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no use for them, and its host may have no room."""
    hub = FakeHub(DEMO_FOLDER, monkeypatch)
    _, model = load(GatewayConfig(model="org/name"))
    model.close()
    assert hub.asked == [("org/name", ["*.json", "*.jinja"])]


def test_a_template_may_come_through_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that nobody writes to a line says so."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(pipe.write_text, "{{ messages[0].content }}")
        assert read_template(pipe) == "{{ messages[0].content }}"
        written.result()
    monkeypatch.setattr("shared.model_folder.PIPE_WITHIN_S", 0.05)
    with pytest.raises(ModelError, match="nobody writes to this pipe"):
        read_template(pipe)


async def test_a_long_text_leaves_the_loop_to_others() -> None:
    """While it is tokenized or decoded the loop turns: answers of others go on."""
    model = TextModel.load(ModelFolder(DEMO_FOLDER))
    text = "The code of the red door is 4821. " * 20_000

    async def share_stood_still(work: Coroutine[Any, Any, list[Any]]) -> tuple[float, list[Any]]:
        began = turned = time.perf_counter()
        longest = 0.0
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            while not task.done():
                await asyncio.sleep(0.001)
                longest = max(longest, time.perf_counter() - turned)
                turned = time.perf_counter()
        return longest / (turned - began), task.result()

    share, (ids,) = await share_stood_still(model.encode_all([text], add_special_tokens=False))
    assert share < 0.5
    share, decoded = await share_stood_still(model.decode_all([ids * 4], skip_special=True))
    assert share < 0.5
    assert decoded == [text * 4]
    model.close()


@pytest.mark.parametrize("of_many_parts", ["messages", "tools"])
async def test_what_is_long_to_render_leaves_the_loop(
    of_many_parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools and earlier calls count, too: contents may be short beside them."""
    model = tiny_text_model()
    threads: list[str] = []
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *_, **__: threads.append(threading.current_thread().name)
    )
    call = {"function": {"name": "write", "arguments": {"lines": ["the and"] * 1000}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": f"tool_{i}"}} for i in range(1000)]
    if of_many_parts == "messages":
        await model.render([said])
    else:
        await model.render([{"role": "user", "content": "the"}], Rendering(tools=tools))
    await model.render([{"role": "user", "content": "the"}], Rendering(tools=tools[:2]))
    assert [name.startswith("tokenize") for name in threads] == [True, False]
    model.close()


# --- chat templates -----------------------------------------------------------------------------


CONTINUED = Rendering(continue_final_message=True)


def render(
    source: str, *, max_chars: int = 1000, arguments: dict[str, object] | None = None
) -> str:
    """Render one user message."""
    template = ChatTemplate(
        source,
        SpecialTokens(bos="<s>", eos="</s>"),
        max_chars=max_chars,
        now=lambda: datetime.datetime(2026, 2, 1, tzinfo=datetime.UTC),
    )
    rendering = Rendering(arguments=arguments or {})
    return template.render([{"role": "user", "content": "<hi>"}], rendering)


def test_the_names_that_templates_expect_are_there() -> None:
    """Special tokens, tojson without HTML escapes, strftime_now, generation blocks and loop
    controls."""
    assert render("{{ bos_token }}{{ messages[0] | tojson }}{{ eos_token }}") == (
        '<s>{"role": "user", "content": "<hi>"}</s>'
    )
    assert render("{{ strftime_now('%d %b %Y') }}") == "01 Feb 2026"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "<hi>"
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(loop) == "01"
    assert render("{% if tools is none and add_generation_prompt %}y{% endif %}") == "y"


def test_arguments_reach_the_template_but_replace_nothing() -> None:
    """A client's template arguments cannot stand in for messages or special tokens, and are not
    dropped without a word."""
    assert render("{{ enable_thinking }}", arguments={"enable_thinking": False}) == "False"
    assert render("{{ documents[0] }}", arguments={"documents": ["a"]}) == "a"
    for name in ("messages", "bos_token", "add_generation_prompt"):
        with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
            render("", arguments={name: None})


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "content", "due"),
    [
        (CHATML, "Sure, ", "<user>Sure,<end>\n<assistant>Sure,"),
        (CHATML.replace(" | trim", ""), "Sure, ", "<user>Sure,<end>\n<assistant>Sure, "),
        (CHATML, "", "<user><end>\n<assistant>"),
        ("{{ messages | tojson }}", 'a"', '[{"role": "user", "content": "Sure,"}, {"role": "assist'
         'ant", "content": "a\\"'),
    ],
)  # fmt: skip
def test_a_final_message_is_continued(source: str, content: str, due: str) -> None:
    """The prompt ends where its content does, with the space at its end as the template has it,
    and other messages of the same text stay whole."""
    messages = [
        {"role": "user", "content": content.strip() if "trim" in source else "Sure,"},
        {"role": "assistant", "content": content},
    ]
    if source == CHATML.replace(" | trim", ""):
        messages[0]["content"] = "Sure,"
    text = ChatTemplate(source, SpecialTokens()).render(messages, CONTINUED)
    assert text == due


def test_a_message_that_the_template_hides_cannot_be_continued() -> None:
    """Its end is not in the prompt."""
    template = ChatTemplate("{{ messages[0].role }}", SpecialTokens())
    with pytest.raises(InvalidRequest, match="cannot be continued") as caught:
        template.render([{"role": "user", "content": "a"}], CONTINUED)
    assert caught.value.param == "continue_final_message"


async def test_a_clients_template_is_its_own_fault() -> None:
    """It knows the special tokens, needs no model's template, and its errors name its field."""
    model = tiny_text_model(None)
    hi = [{"role": "user", "content": "hi"}]
    assert await model.render(hi, Rendering(chat_template="{{ messages[0].content }}!")) == "hi!"
    deep = "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}"
    for broken in (
        *("{% if %}", "{% break %}", "{{ f(a=1, a=2) }}", deep, "{{ 10 ** 5000 }}"),
        *("{{ raise_exception('no') }}", "{{ 1 / 0 }}", r"{{ '\ud800' }}", "{{ '%c' % 55296 }}"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await model.render(hi, Rendering(chat_template=broken))
        assert caught.value.param == "chat_template"
    model.close()


@pytest.mark.slow
async def test_a_clients_template_may_take_neither_the_gateways_time_nor_its_memory() -> None:
    """It is refused with the limit's name; others' are rendered meanwhile, and after it."""
    hi = [{"role": "user", "content": "hi"}]
    plain = Rendering(chat_template="{{ messages[0].content }}")
    loop = "{% for i in range(9999) %}"
    endless = loop * 3 + "{% endfor %}" * 3
    with closing(tiny_text_model(None)) as model:
        assert await model.render(hi, plain) == "hi"  # its process is there
        async with asyncio.TaskGroup() as tasks:
            slow = [tasks.create_task(refusal_of(model, hi, endless)) for _ in range(2)]
            assert await model.render(hi, plain) == "hi"
            assert not any(one.done() for one in slow)
        assert all("0.5 s of processor time" in one.result() for one in slow)
        assert "0.5 s of" in await refusal_of(model, hi, "{{ 3 ** (10 ** 8) }}")
        assert "2 GiB of memory" in await refusal_of(model, hi, "{{ 'x' * 10 ** 10 }}")
        assert await model.render(hi, plain) == "hi"


async def refusal_of(model: TextModel, messages: list[dict[str, str]], template: str) -> str:
    """What is said of a client's template."""
    with pytest.raises(InvalidRequest) as caught:
        await model.render(messages, Rendering(chat_template=template))
    assert caught.value.param == "chat_template"
    return caught.value.message


def test_bad_words_are_tokens_with_and_without_a_space_before() -> None:
    """As vLLM takes them: after a space only where that changes but the first token."""
    model = tiny_text_model()
    ids = {text: tuple(tiny_tokenizer().encode(text).ids) for text in ("the", " the", "and", "x y")}
    assert len(ids[" the"]) == len(ids["the"]) == 1
    assert model.bad_words(["the"]) == (ids["the"], ids[" the"])
    assert model.bad_words([" the", "the"]) == (ids["the"], ids[" the"])
    assert model.bad_words(["and"]) == (ids["and"],)
    assert model.bad_words(["x y"]) == (ids["x y"],)
    model.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% for i in range(1000000) %}x{% endfor %}", "OverflowError"),
        ("{% for i in range(2000) %}x{% endfor %}", "too long: .* more than 1000 characters"),
    ],
)
def test_what_a_template_cannot_render_is_the_requests_fault(source: str, words: str) -> None:
    """Refusals, errors, breakouts and endless output are 400s, never 500s."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    """A broken template is found at start, not at the first request."""
    for source in ("{% if %}", "{% break %}", "{{ f(a=1, a=2) }}"):
        with pytest.raises(ModelError, match="chat template"):
            ChatTemplate(source, SpecialTokens())


async def test_a_model_without_a_template_refuses_chat() -> None:
    """The error says what to use instead."""
    model = tiny_text_model(None)
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        await model.render([{"role": "user", "content": "hi"}])
    model.close()


def test_a_template_that_puts_arguments_together_as_text() -> None:
    """It gets them as JSON, as DeepSeek's want them; a fault of another kind is a refusal."""
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ 'f:' + c.function.arguments }}"
    template = ChatTemplate(source + "{% endfor %}{% endfor %}", SpecialTokens())
    calls = [
        {"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": "é"}, "no {")
    ]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    assert template.render([said]) == 'f:{"a": "é"}f:no {'
    with pytest.raises(InvalidRequest, match="cannot render"):
        ChatTemplate("{{ 1 + 'a' }}", SpecialTokens()).render([said])


async def test_many_small_texts_leave_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they take as long as a large one."""
    model = tiny_text_model()
    sizes: list[int] = []
    offload = model.offload

    async def noted(run: Any, size: int) -> Any:
        sizes.append(size)
        return await offload(run, size)

    monkeypatch.setattr(model, "offload", noted)
    texts = ["the and"] * 1000
    encoded = await model.encode_all(texts, add_special_tokens=False)
    assert encoded == [await model.encode("the and", add_special_tokens=False)] * 1000
    assert await model.decode_all(encoded, skip_special=True) == texts
    assert max(sizes) == sum(map(len, texts)) > INLINE_CHARS
    model.close()


async def test_the_demo_model_loads_and_renders() -> None:
    """The bundled folder has a tokenizer and a template that fit together."""
    model = TextModel.load(ModelFolder(DEMO_FOLDER))
    prompt = await model.render([{"role": "user", "content": "Tell me a story."}])
    ids = await model.encode(prompt, add_special_tokens=False)
    assert await model.decode_all([ids], skip_special=False) == [prompt]
    assert await model.decode_all([ids], skip_special=True) != [prompt]
    model.close()
