"""Masks of answers that follow a grammar: what they allow, and who has the tokens has the state."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.gateway.text.grammars import Structure, text_of
from shared.engine.fake import FakeEngine
from shared.engine.sampling.guides import Guides, Masks
from shared.errors import InvalidRequest, LocalProtocolError
from shared.request import SamplingParams
from shared.step import Guide, SampleSpec, StepRow
from shared.worker.grammar_waits import wait_for_grammar
from tests.support.cores import Worker, a_sequence
from tests.support.grammars import PERSON, a_grammar, needs_library
from tests.support.guided_engine import tiny_guides
from tests.support.tiny_tokenizer import EOS, NUM_TOKENS, VOCAB_SIZE, tiny_tokenizer

pytestmark = needs_library

TOKENIZER = tiny_tokenizer()


@pytest.fixture(name="guides")
def _guides() -> Guides:
    return tiny_guides(VOCAB_SIZE, (EOS,))


def a_row(guide: Guide | None, index: int, last: int = 8) -> StepRow:
    """A decode row: ``last`` is token ``index - 1`` of the answer."""
    params = SamplingParams(grammar="x" if guide else "")
    return StepRow([last], 10, [0], SampleSpec(params, index, (), (), guide))


def masks_of(guides: Guides, rows: Sequence[StepRow]) -> Masks:
    begun = guides.begin(rows)
    assert begun is not None
    return begun.result()


def allowed(masks: Masks) -> Any:
    """Which tokens may come, bool ``[rows, VOCAB_SIZE]``."""
    return np.unpackbits(masks.bits, axis=1, bitorder="little", count=VOCAB_SIZE) == 1


def walk(guides: Guides, guide: Guide, source: random.Random, most: int = 400) -> list[int]:
    """A whole answer, each token any of those that are allowed."""
    answer: list[int] = list(guide.output)
    while len(answer) < most and (not answer or answer[-1] != EOS):
        masks = masks_of(guides, [a_row(guide, len(answer), answer[-1] if answer else 8)])
        assert not masks.failures
        answer.append(source.choice(np.flatnonzero(allowed(masks)[0]).tolist()))
    return answer


def test_whatever_is_chosen_the_answer_matches(guides: Guides) -> None:
    """Random choices among allowed tokens give JSON of the schema, and nothing after its end."""
    grammar = a_grammar(PERSON)
    for seed in range(5):
        answer = walk(guides, Guide(grammar, ()), random.Random(seed))
        assert answer[-1] == EOS
        value = json.loads(TOKENIZER.decode(answer[:-1]))
        assert set(value) == {"name", "age", "tags"}
        assert 0 <= value["age"] <= 150


@pytest.mark.parametrize("eos", [(EOS, NUM_TOKENS), (EOS, VOCAB_SIZE + 3), (VOCAB_SIZE + 3,), ()])
def test_an_end_of_answers_that_the_tokenizer_lacks_is_left_out(eos: tuple[int, ...]) -> None:
    """Or, without one, the tokenizer's own: else every answer under a grammar would be refused."""
    answer = walk(tiny_guides(VOCAB_SIZE, eos), Guide(a_grammar(PERSON), ()), random.Random(0))
    assert set(json.loads(TOKENIZER.decode(answer[:-1]))) == {"name", "age", "tags"}


def test_who_has_the_tokens_has_the_state(guides: Guides) -> None:
    """After a failover anywhere in the answer the masks are those of who never failed."""
    grammar, source = a_grammar(PERSON), random.Random(3)
    answer = walk(guides, Guide(grammar, ()), source)
    undisturbed = Guide(grammar, ())
    for index, last in enumerate([8, *answer[:-1]]):
        own = allowed(masks_of(guides, [a_row(undisturbed, index, last)]))[0]
        moved = Guide(grammar, answer[:index])
        other = tiny_guides(VOCAB_SIZE, (EOS,))
        assert (allowed(masks_of(other, [a_row(moved, index, last)]))[0] == own).all()
        # The token that prefill has sampled comes with the first step.
        if index:
            joined = Guide(grammar, answer[: index - 1])
            assert (allowed(masks_of(guides, [a_row(joined, index, last)]))[0] == own).all()


def test_a_step_that_is_done_again_takes_no_token_twice(guides: Guides) -> None:
    """A preempted answer is computed anew, and asks for the same token again."""
    guide = Guide(a_grammar("(ab)+", "regex"), ())
    first = allowed(masks_of(guides, [a_row(guide, 0)]))[0]
    again = allowed(masks_of(guides, [a_row(guide, 0)]))[0]
    assert (first == again).all()
    with pytest.raises(LocalProtocolError):
        masks_of(guides, [a_row(guide, 5)])


def test_only_guided_rows_have_masks(guides: Guides) -> None:
    """Rows without a grammar, and rows that sample nothing, stand between them."""
    assert guides.begin([a_row(None, 0)]) is None
    chunk = StepRow([1, 2], 0, [0])
    ab, cd = (Guide(a_grammar(text, "choice"), ()) for text in (["ab"], ["cd"]))
    rows = [a_row(None, 0), chunk, a_row(ab, 0), a_row(None, 3), a_row(cd, 0)]
    masks = masks_of(guides, rows)
    assert list(masks.places) == [1, 3]
    starts = [{TOKENIZER.decode([one]) for one in np.flatnonzero(row)} for row in allowed(masks)]
    assert starts == [{"a"}, {"c"}]
    assert sorted(masks.by_row(rows)) == [2, 4]


def test_what_follows_no_grammar_is_a_failure_of_its_row_alone(guides: Guides) -> None:
    """Tokens of an earlier attempt that the grammar does not know: others go on."""
    good, bad = Guide(a_grammar(["ab"], "choice"), ()), Guide(a_grammar(["ab"], "choice"), (20, 20))
    masks = masks_of(guides, [a_row(bad, 2), a_row(good, 0)])
    assert list(masks.failures) == [0]
    assert allowed(masks)[0].all()
    assert not allowed(masks)[1].all()


def test_a_tokenizer_that_the_library_cannot_read_is_a_failure_of_its_rows() -> None:
    """No step fails for it."""
    guides = Guides(lambda: "{}", VOCAB_SIZE, (EOS,))
    masks = masks_of(guides, [a_row(Guide(a_grammar(PERSON), ()), 0)])
    assert masks.failures[0]
    assert masks.bits.all()


def test_a_tokenizer_that_is_gone_is_a_failure_of_its_rows(tmp_path: Path) -> None:
    """A model folder that was removed while its worker runs ends answers that follow grammars, and
    no worker: each in turn would get the request. Once it is back, so are they."""
    path = tmp_path / "tokenizer.json"
    guides, row = Guides(path.read_text, VOCAB_SIZE, (EOS,)), a_row(Guide(a_grammar(PERSON), ()), 0)
    masks = masks_of(guides, [row])
    assert "no such file" in masks.failures[0]
    assert str(tmp_path) not in masks.failures[0]
    path.write_text(TOKENIZER.to_str())
    assert not masks_of(guides, [row]).failures
    guides.close()


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 264, NUM_TOKENS - 1])
def test_of_a_tokenizer_with_more_tokens_than_the_model_has_the_last_never_come(
    vocab_size: int,
) -> None:
    """Some have a token for images beside a model of text. The others are held to the grammar."""
    guides, text = tiny_guides(vocab_size, (EOS,)), a_grammar("[ a-z]+", "regex")
    masks = masks_of(guides, [a_row(Guide(it, ()), 0) for it in (text, a_grammar(PERSON))])
    assert not masks.failures
    assert masks.bits.shape == (2, -(-vocab_size // 32) * 4)
    same = masks_of(tiny_guides(VOCAB_SIZE, (EOS,)), [a_row(Guide(text, ()), 0)])
    wanted = allowed(same)[0, :vocab_size]
    found = np.unpackbits(masks.bits, axis=1, bitorder="little")
    assert (found[0, :vocab_size] == wanted).all()
    assert not found[:, vocab_size:].any()
    assert walk(guides, Guide(a_grammar(PERSON), ()), random.Random(1))[-1] == EOS


def test_ready_grammars_are_few(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go; an answer that has begun keeps its own."""
    monkeypatch.setattr("shared.engine.sampling.guides.MAX_READY", 2)
    guide = Guide(a_grammar(["ab"], "choice"), ())
    masks_of(guides, [a_row(guide, 0)])
    for number in range(5):
        guides.expect(a_grammar([f"x{number}"], "choice"))
    assert not masks_of(guides, [a_row(guide, 0)]).failures


def test_what_waited_for_its_grammar_has_it_in_its_first_step(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others were made ready since: a step never compiles what was expected."""
    monkeypatch.setattr("shared.engine.sampling.guides.MAX_READY", 2)
    sequence = a_sequence(grammar=a_grammar(PERSON))
    guides.expect(sequence.sampling.grammar).result()
    wait_for_grammar(sequence, guides.expect, Worker().scheduler, lambda: None)
    for number in range(5):
        guides.expect(a_grammar([f"x{number}"], "choice")).result()
    monkeypatch.setattr("shared.engine.sampling.guides.matcher", None)
    assert not masks_of(guides, [a_row(sequence.guide, 0)]).failures


def test_an_engine_without_a_tokenizer_says_so() -> None:
    """One typed error, before any work."""
    with pytest.raises(InvalidRequest) as refused:
        FakeEngine().expect(a_grammar(True))
    assert refused.value.code == "unsupported"


def test_a_closed_engine_leaves_no_thread_of_grammars(guides: Guides) -> None:
    """A process that ends would wait for a grammar that nobody wants any more."""
    before = {*threading.enumerate()}
    engine = FakeEngine(guides=guides)
    engine.expect(a_grammar(PERSON)).result()
    own = {*threading.enumerate()} - before
    assert own
    engine.close()
    for thread in own:
        thread.join(30)
        assert not thread.is_alive()


def test_a_mark_may_come_as_one_token_or_spelled(guides: Guides) -> None:
    """The grammar of a call allows both, at its beginning and its end; special tokens stay out."""
    tokenizer = tiny_tokenizer()
    marks = ["<tool_call>", "</tool_call>"]
    tokenizer.add_tokens(marks)
    begin, end = map(tokenizer.token_to_id, marks)
    marked = Guides(tokenizer.to_str, VOCAB_SIZE, (EOS,))
    begin_of_call = "<tool_call>a"
    tag = {"trigger": marks[0], "begin": begin_of_call, "schema": {"const": 1}, "end": marks[1]}
    grammar = text_of(
        Structure(kind="tags", value=[tag], param="f"), dict(zip(marks, marks, strict=True))
    )
    spelled = [TOKENIZER.encode(mark).ids for mark in marks]
    a, one, special = map(TOKENIZER.token_to_id, ("a", "1", "<a>"))
    for opened in ([begin], spelled[0]):
        for closed in ([end], spelled[1]):
            guide, answer = Guide(grammar, ()), list[int]()
            for chosen in (*opened, a, one, *closed, EOS):
                last = answer[-1] if answer else 8
                (may,) = allowed(masks_of(marked, [a_row(guide, len(answer), last)]))
                assert may[chosen]
                assert not may[special]
                if chosen == one:
                    assert not may[begin]
                answer.append(chosen)
