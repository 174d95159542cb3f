"""What a client may ask for: ranges, defaults, context length, seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import limits
from services.gateway.limits import SamplingForm
from services.gateway.mesh import ServedModel
from shared import wire
from shared.errors import InvalidRequest
from shared.messages.codec import sampling_from_wire, sampling_to_wire
from shared.request import SamplingParams

"""No test depends on speed."""

MODEL = ServedModel(name="m", vocab_size=100, max_model_len=64, created=0)


def resolve(form: SamplingForm, *, prompt: int = 10, **given: Any) -> SamplingParams:
    """Resolve a form for a prompt of this length."""
    options: dict[str, Any] = {"default_max_tokens": None, "defaults": {}, "seed": 5, **given}
    return limits.sampling_params(form, model=MODEL, num_prompt_tokens=prompt, **options)


def test_an_empty_form_samples_at_temperature_one_to_the_end_of_the_context() -> None:
    """The defaults of the OpenAI API, and the request's random seed."""
    assert resolve(SamplingForm()) == SamplingParams(max_tokens=54, temperature=1.0, seed=5)


def test_the_models_defaults_come_before_ours_and_after_the_clients() -> None:
    """Request value, else generation_config.json, else 1.0."""
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    params = resolve(SamplingForm(top_p=0.5), defaults=defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)
    assert params.repetition_penalty == 1.1
    assert resolve(SamplingForm(temperature=0.0), defaults=defaults).temperature == 0.0


def test_completions_default_is_cut_to_the_room_there_is() -> None:
    """A default never makes a request fail."""
    assert resolve(SamplingForm(), default_max_tokens=16).max_tokens == 16
    assert resolve(SamplingForm(), default_max_tokens=16, prompt=60).max_tokens == 4


def test_asking_for_more_than_the_context_tells_the_numbers() -> None:
    """The error has the code, the words and the numbers that agents look for."""
    with pytest.raises(InvalidRequest) as caught:
        resolve(SamplingForm(max_tokens=55, max_tokens_param="max_completion_tokens"))
    error = caught.value
    assert (error.code, error.param) == ("context_length_exceeded", "max_completion_tokens")
    for words in ("64 tokens", "65 tokens", "10 in the prompt", "55 for the completion"):
        assert words in error.message
    # Claude Code asks for a shorter answer by these numbers.
    assert "input length and `max_tokens` exceed context limit: 10 + 55 > 64." in error.message
    with pytest.raises(InvalidRequest, match=r"^prompt is too long: 64 tokens > 63 maximum"):
        limits.checked_prompt([1] * 64, MODEL, param="prompt")


def test_customary_ways_to_say_off() -> None:
    """top_k -1 and one beyond the vocabulary are off; a vanishing temperature is greedy."""
    assert resolve(SamplingForm(top_k=-1)).top_k == 0
    assert resolve(SamplingForm(top_k=100)).top_k == 0
    assert resolve(SamplingForm(temperature=1e-6)).temperature == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", 55),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 5e-324),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(65))),
        ("logit_bias", ((100, 1.0),)),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", tuple((1, 0.0) for _ in range(301))),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: Any) -> None:
    """Each bound is checked, and the error says which field broke it."""
    with pytest.raises(InvalidRequest) as caught:
        resolve(replace(SamplingForm(), **{field: value}))
    assert caught.value.param == field
    assert field in caught.value.message


def over_the_wire(params: SamplingParams) -> SamplingParams:
    """Return what a worker gets. Raises: it would refuse it, as if the gateway broke the rules."""
    return sampling_from_wire(wire.SamplingParams.parse(bytes(sampling_to_wire(params))))


@pytest.mark.parametrize("name", [name for name in limits.NUMBERS if name != "logit_bias"])
def test_the_ends_of_every_range_are_within_the_workers_rules(name: str) -> None:
    """What the gateway lets pass, workers take: else a client's value reads as a broken peer."""
    for value in limits.NUMBERS[name]:
        params = over_the_wire(resolve(SamplingForm(**{name: value})))
        assert math.isclose(getattr(params, name), value, rel_tol=1e-6)


@given(
    st.builds(
        SamplingForm,
        max_tokens=st.none() | st.integers(-(2**70), 2**70),
        min_tokens=st.none() | st.integers(-5, 80),
        temperature=st.none() | st.floats(),
        top_k=st.none() | st.integers(-(2**70), 2**70),
        top_p=st.none() | st.floats(),
        min_p=st.none() | st.floats(),
        repetition_penalty=st.none() | st.floats(),
        presence_penalty=st.none() | st.floats(),
        frequency_penalty=st.none() | st.floats(),
        seed=st.none() | st.integers(-(2**70), 2**70),
        logprobs=st.none() | st.integers(-5, 30),
    )
)
def test_whatever_is_accepted_is_within_the_workers_rules(form: SamplingForm) -> None:
    """Any form is refused or becomes values that the workers' own check lets pass."""
    try:
        params = resolve(form)
    except InvalidRequest:
        return
    assert 1 <= params.max_tokens <= 54
    assert 0 <= params.min_tokens <= params.max_tokens
    assert 0.0 <= params.temperature <= 2.0
    assert 0 <= params.top_k < MODEL.vocab_size
    assert 0.0 < params.top_p <= 1.0
    assert 0.0 <= params.min_p <= 1.0
    assert 0.01 <= params.repetition_penalty <= 10.0
    assert abs(params.presence_penalty) <= 2.0
    assert abs(params.frequency_penalty) <= 2.0
    assert 0 <= params.seed < 1 << 64
    over_the_wire(params)


def test_a_prompt_must_have_tokens_of_the_vocabulary_and_leave_room() -> None:
    """Empty, too long and foreign prompts are told apart by their codes."""
    cases = {"empty_prompt": [], "context_length_exceeded": [1] * 64, "bad_token_id": [1, 100]}
    for code, ids in cases.items():
        with pytest.raises(InvalidRequest) as caught:
            limits.checked_prompt(ids, MODEL, param="prompt")
        assert (caught.value.code, caught.value.param) == (code, "prompt")
    assert limits.checked_prompt([1] * 63, MODEL, param="prompt") == (1,) * 63


@pytest.mark.parametrize("stop", [[""], ["x" * 65], [str(n) for n in range(17)]])
def test_stop_strings_are_bounded(stop: list[str]) -> None:
    """Empty, too long and too many stop strings are refused."""
    with pytest.raises(InvalidRequest, match="stop"):
        limits.checked_stop(stop)


@pytest.mark.parametrize("label", ["x" * 129, "a b", "a\n", "ü", "a/b", "http://x:1"])
def test_a_label_is_nothing_but_a_label(label: str) -> None:
    """What could break a log line, or be mistaken for an address, is refused."""
    with pytest.raises(InvalidRequest):
        limits.checked_label(label, param="x-request-id")


def test_the_first_choice_has_the_clients_seed_and_no_two_share_one() -> None:
    """Choices are independent, yet a function of the client's seed."""
    seeds = [
        limits.seed_of_choice(seed, choice) for seed in (0, 1, 2**64 - 1) for choice in range(8)
    ]
    assert len(set(seeds)) == 24
    assert seeds[0] == 0
    assert all(0 <= seed < 1 << 64 for seed in seeds)
