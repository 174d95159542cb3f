"""The fake engine: exact, independent of how work is cut, and sensitive to every byte of KV."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shared.engine.fake import DEFAULT_MODEL, FakeEngine, FakeModel, FakeTiming
from shared.errors import LocalProtocolError
from shared.messages.columns import pack_u32
from shared.request import FinishReason, SamplingParams
from shared.step import RowResult, SampleSpec, StepRow
from tests.support.fake_reference import fake_answer, fake_continuation, fake_prompt_logprobs

MODEL = FakeModel(vocab_size=97, num_layers=3, num_kv_heads=2, head_dim=4)
PROMPT = [5, 3, 96, 1, 5, 44, 0, 2, 9, 9, 31, 7]
GREEDY = SamplingParams()


def an_engine(**kwargs: Any) -> FakeEngine:
    """A small engine."""
    return FakeEngine(**{"model": MODEL, "num_blocks": 32, "block_size": 4, **kwargs})


def sample(index: int = 0, **params: Any) -> SampleSpec:
    """Sample with these parameters, without history."""
    return SampleSpec(SamplingParams(**params), index, (), ())


def prefill(
    engine: FakeEngine,
    tokens: Sequence[int],
    table: Sequence[int],
    cuts: Sequence[int] = (),
    **params: Any,
) -> RowResult:
    """Compute a prompt in chunks that end at the cuts and at its end; return the last result."""
    result, start = RowResult(-1), 0
    for stop in (*cuts, len(tokens)):
        spec = sample(**params) if stop == len(tokens) else None
        (result,) = engine.step([StepRow(tokens[start:stop], start, table, spec)])
        start = stop
    return result


def generate(engine: FakeEngine, tokens: list[int], table: Sequence[int], num: int) -> list[int]:
    """Decode greedily from a computed prompt and its first token."""
    for index in range(1, num):
        row = StepRow(tokens[-1:], len(tokens) - 1, table, sample(index))
        tokens.append(engine.step([row])[0].token_id)
    return tokens


@pytest.mark.parametrize("cuts", [(), (1,), (4, 8), (3, 5, 11), tuple(range(1, 12))])
def test_chunks_do_not_change_the_answer(cuts: tuple[int, ...]) -> None:
    """However a prompt is cut, the token after it is the reference's."""
    assert (
        prefill(an_engine(), PROMPT, [7, 2, 9], cuts).token_id
        == (fake_continuation(PROMPT, 1, model=MODEL)[0])
    )


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_do_not_change_the_answer(block_size: int) -> None:
    """Block size and the order of blocks are nobody's business."""
    engine = an_engine(block_size=block_size, num_blocks=64)
    table = list(range(63, 63 - -(-32 // block_size), -1))
    first = prefill(engine, PROMPT, table).token_id
    tokens = generate(engine, [*PROMPT, first], table, 20)
    assert tokens[len(PROMPT) :] == fake_continuation(PROMPT, 20, model=MODEL)


def test_rows_of_a_step_do_not_disturb_each_other() -> None:
    """Prompt chunks and decode rows share a step in any order."""
    engine, table, other = an_engine(), [0, 1, 2, 3], [4, 5, 6]
    first = prefill(engine, PROMPT, table).token_id
    rows = [
        StepRow(PROMPT[:5], 0, other, None),
        StepRow([first], len(PROMPT), table, sample(1)),
    ]
    chunk, token = engine.step(rows)
    assert chunk == RowResult(-1)
    assert [first, token.token_id] == fake_continuation(PROMPT, 2, model=MODEL)
    (last,) = engine.step([StepRow(PROMPT[5:], 5, other, sample())])
    assert last.token_id == first


def test_kv_moves_between_engines() -> None:
    """Gathered frames, layer group by layer group, scattered into other blocks: same answer."""
    source, target = an_engine(), an_engine(block_size=5)
    first = prefill(source, PROMPT, [3, 1, 4]).token_id
    table = [9, 8, 7, 6, 5, 4]
    for start, stop in ((0, 7), (7, 12)):
        for layers in ((0, 2), (2, 3)):
            num_bytes = (stop - start) * (layers[1] - layers[0]) * MODEL.layout.token_layer_bytes
            frame = bytearray(num_bytes + 8)  # staging slots are larger than frames
            source.gather([3, 1, 4], start, stop, *layers, frame)
            assert bytes(frame[num_bytes:]) == bytes(8)
            target.scatter(table, start, stop, *layers, memoryview(frame))
    tokens = generate(target, [*PROMPT, first], table, 8)
    assert tokens[len(PROMPT) :] == fake_continuation(PROMPT, 8, model=MODEL)


def test_the_wire_layout_is_the_documented_one() -> None:
    """[layers, key/value, tokens, heads, dim], so two frames of one layer are one frame of two."""
    engine = an_engine()
    prefill(engine, PROMPT, [0, 1, 2])
    whole, parts = engine.new_buffer(12 * MODEL.layout.token_bytes), []
    engine.gather([0, 1, 2], 0, 12, 0, 3, whole)
    for layer in range(3):
        parts.append(engine.new_buffer(12 * MODEL.layout.token_layer_bytes))
        engine.gather([0, 1, 2], 0, 12, layer, layer + 1, parts[-1])
    assert b"".join(bytes(part) for part in parts) == bytes(whole)
    shaped = np.asarray(whole).reshape(3, 2, 12, 2, 4)
    one = engine.new_buffer(MODEL.layout.token_layer_bytes)
    engine.gather([0, 1, 2], 7, 8, 1, 2, one)
    assert bytes(one) == shaped[1, :, 7].tobytes()


def test_every_byte_counts() -> None:
    """Flip any one byte of the context's KV, in any layer, and the next token changes."""
    engine, table = an_engine(model=FakeModel(vocab_size=1 << 30)), [0, 1, 2, 3]
    layout = engine.layout
    first = prefill(engine, PROMPT, table).token_id
    row = StepRow([first], len(PROMPT), table, sample(1))
    expected = engine.step([row])[0].token_id
    good = engine.new_buffer(len(PROMPT) * layout.token_bytes)
    engine.gather(table, 0, len(PROMPT), 0, layout.num_layers, good)
    for byte in range(0, good.size, 7):
        bad = good.copy()
        bad[byte] ^= 1
        engine.scatter(table, 0, len(PROMPT), 0, layout.num_layers, bad)
        assert engine.step([row])[0].token_id != expected, f"byte {byte} does not count"
    engine.scatter(table, 0, len(PROMPT), 0, layout.num_layers, good)
    assert engine.step([row])[0].token_id == expected


def test_misplaced_and_foreign_blocks_change_the_answer() -> None:
    """Swapped blocks, another request's block, an old block: all are seen."""
    engine = an_engine(model=FakeModel(vocab_size=1 << 30))
    first = prefill(engine, PROMPT, [0, 1, 2, 3]).token_id
    prefill(engine, [8, *PROMPT[1:]], [4, 5, 6])
    answers = {
        engine.step([StepRow([first], 12, table, sample(1))])[0].token_id
        for table in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 5, 2, 3], [0, 1, 9, 3], [0, 1, 1, 3])
    }
    assert len(answers) == 5


def test_a_damaged_past_spoils_what_is_computed_on_it() -> None:
    """A chunk continues from what the pool holds, not from what it should hold."""
    engine = an_engine(model=FakeModel(vocab_size=1 << 30))
    engine.step([StepRow(PROMPT[:8], 0, [0, 1, 2])])
    engine.scatter([0, 1, 2], 7, 8, 1, 2, bytes(engine.layout.token_layer_bytes))
    (result,) = engine.step([StepRow(PROMPT[8:], 8, [0, 1, 2], sample())])
    assert result.token_id != fake_continuation(PROMPT, 1, model=engine.model)[0]


def test_layers_are_written_in_order() -> None:
    """A gather before its layer is done gets the bytes of before."""
    engine = an_engine()
    seen: list[tuple[int, list[bool]]] = []

    def on_layer(layer: int) -> None:
        written: list[bool] = []
        for other in range(MODEL.num_layers):
            frame = engine.new_buffer(MODEL.layout.token_layer_bytes)
            engine.gather([0, 1, 2], 11, 12, other, other + 1, frame)
            written.append(bool(frame.any()))
        seen.append((layer, written))

    engine.step([StepRow(PROMPT, 0, [0, 1, 2], sample())], on_layer)
    assert seen == [
        (0, [True, False, False]),
        (1, [True, True, False]),
        (2, [True, True, True]),
    ]


def test_sampling_is_a_function_of_seed_and_index() -> None:
    """A request that moves to another worker continues with the tokens it would have had."""
    params = SamplingParams(temperature=0.7, seed=11)
    whole = fake_continuation(PROMPT, 10, params, model=MODEL)
    moved = fake_continuation(
        [*PROMPT, *whole[:4]], 6, params, num_prompt_tokens=len(PROMPT), model=MODEL
    )
    assert moved == whole[4:]
    others = [
        SamplingParams(temperature=0.7, seed=12),
        SamplingParams(temperature=0.8, seed=11),
        SamplingParams(temperature=0.7, seed=11, top_p=0.9),
        SamplingParams(temperature=0.7, seed=11, top_k=5),
        SamplingParams(temperature=0.7, seed=11, min_p=0.1),
        GREEDY,
    ]
    assert all(fake_continuation(PROMPT, 10, other, model=MODEL) != whole for other in others)


def test_greedy_ignores_what_greedy_ignores() -> None:
    """Seed and filters change nothing at temperature 0."""
    odd = SamplingParams(seed=5, top_k=3, top_p=0.5)
    assert fake_continuation(PROMPT, 5, odd, model=MODEL) == (
        fake_continuation(PROMPT, 5, model=MODEL)
    )


def test_parameters_survive_32_bit_floats() -> None:
    """The wire rounds them; the answer is the same."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", 0.7))
    ours, theirs = (
        fake_continuation(PROMPT, 5, SamplingParams(temperature=value, top_p=value), model=MODEL)
        for value in (0.7, rounded)
    )
    assert ours == theirs


def test_penalties_and_biases_count() -> None:
    """A lost history or bias is seen as another answer."""
    plain = fake_continuation(PROMPT, 5, model=MODEL)
    for params in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(logit_bias=((3, 1.0),)),
    ):
        assert fake_continuation(PROMPT, 5, params, model=MODEL) != plain
    history = SamplingParams(repetition_penalty=1.1)
    assert fake_continuation(PROMPT, 5, history, num_prompt_tokens=3, model=MODEL) != (
        fake_continuation(PROMPT, 5, history, model=MODEL)
    )


def test_masks_are_kept() -> None:
    """No token but allowed ones, no bad word, also where a part of the answer is there already."""
    plain = fake_continuation(PROMPT, 40, model=MODEL)
    few = SamplingParams(allowed_token_ids=pack_u32(range(1, 7)))
    answer = fake_continuation(PROMPT, 40, few, model=MODEL)
    assert set(answer) == set(range(1, 7))
    words = tuple(itertools.pairwise(plain))
    whole = fake_continuation(PROMPT, 40, SamplingParams(bad_words=words), model=MODEL)
    assert not set(itertools.pairwise(whole)) & set(words)
    moved = fake_continuation(
        [*PROMPT, *plain[:5]],
        1,
        SamplingParams(bad_words=words),
        num_prompt_tokens=len(PROMPT),
        model=MODEL,
    )
    assert moved != plain[5:6]


def test_an_answer_ends_only_by_rule() -> None:
    """No end-of-sequence unless asked for, then about every k-th token."""
    never = fake_continuation(PROMPT, 500, model=MODEL)
    assert 0 not in never
    model = FakeModel(vocab_size=97, eos_token_ids=(6,), eos_every=10)
    answer, reason = fake_answer(PROMPT, SamplingParams(max_tokens=400), model=model)
    assert (answer[-1], reason) == (6, FinishReason.STOP)
    assert 6 not in answer[:-1]
    assert fake_answer(PROMPT, SamplingParams(max_tokens=3), model=MODEL) == (
        never[:3],
        FinishReason.LENGTH,
    )


def test_an_answer_ends_at_the_models_length() -> None:
    """Prompt and answer together are at most max_model_len."""
    model = FakeModel(max_model_len=15)
    answer, reason = fake_answer(PROMPT, SamplingParams(max_tokens=99), model=model)
    assert (len(answer), reason) == (3, FinishReason.LENGTH)


def test_logprobs_are_fixed_and_exact_on_the_wire() -> None:
    """The chosen token leads its alternatives, which are distinct and falling."""
    result = prefill(an_engine(), PROMPT, [0, 1, 2], logprobs=4)
    logprobs = result.logprobs
    assert logprobs is not None
    assert logprobs.top[0] == (result.token_id, logprobs.logprob)
    values = [value for _, value in logprobs.top]
    assert len({token for token, _ in logprobs.top}) == 4
    assert values == sorted(values, reverse=True)
    assert values[0] < 0
    assert struct.unpack("<4f", struct.pack("<4f", *values)) == tuple(values)
    assert prefill(an_engine(), PROMPT, [0, 1, 2]).logprobs is None


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    """Each chunk gives those of the targets it is told."""
    engine, got = an_engine(), []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        row = StepRow(
            PROMPT[start:stop],
            start,
            [0, 1, 2],
            prompt_logprobs=2,
            prompt_targets=PROMPT[start + 1 : stop + 1],
        )
        got += engine.step([row])[0].prompt_logprobs
    assert got == fake_prompt_logprobs(PROMPT, 2, model=MODEL)
    assert len(got) == len(PROMPT) - 1


def test_step_time_is_modelled() -> None:
    """Base, prompt tokens, decode rows and the context they read; nothing for nothing."""
    timing = FakeTiming(base_s=1.0, prefill_token_s=0.1, decode_row_s=0.01, context_token_s=0.001)
    engine = an_engine(timing=timing)
    rows = [StepRow(PROMPT[:10], 0, [0, 1, 2]), StepRow([1], 9, [3, 4, 5], sample(1))]
    assert engine.step_seconds(rows) == pytest.approx(1.0 + 1.0 + 0.01 + 0.01)
    assert engine.step_seconds([]) == 0.0


def test_real_time_takes_its_time() -> None:
    """The modelled time is really spent, which tests of overlap need."""
    engine = an_engine(real_time=True, timing=FakeTiming(base_s=0.02))

    begin = time.perf_counter()
    prefill(engine, PROMPT, [0, 1, 2])
    assert time.perf_counter() - begin >= 0.02


def test_a_step_outside_its_table_is_refused() -> None:
    """A table that is too short is our bug, not a wrong answer."""
    with pytest.raises(LocalProtocolError):
        prefill(an_engine(), PROMPT, [0, 1])
    with pytest.raises(LocalProtocolError):
        an_engine().gather([0], 0, 4, 0, 3, bytearray(10))


@pytest.mark.parametrize(
    "model",
    [
        {"head_dim": 3},
        {"eos_every": 3, "eos_token_ids": ()},
        {"eos_token_ids": (1024,)},
        {"vocab_size": 1},
    ],
)
def test_an_impossible_model_is_refused(model: dict[str, Any]) -> None:
    """Said at construction, not in the middle of an answer."""
    with pytest.raises(LocalProtocolError):
        FakeModel(**model)


def test_different_models_have_different_fingerprints() -> None:
    """Two workers compare them before KV flows."""
    other = FakeModel(vocab_size=98, num_layers=3, num_kv_heads=2, head_dim=4)
    assert MODEL.spec.fingerprint != other.spec.fingerprint
    assert len(DEFAULT_MODEL.spec.fingerprint) == 32
    engine = an_engine()
    assert (engine.spec, engine.layout) == (MODEL.spec, MODEL.layout)
    assert (engine.num_blocks, engine.block_size) == (32, 4)
    engine.close()
