"""How long steps take: what is learned, how soon it follows, and what it says of its own error."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.predict.step_time import MIN_STEPS, StepFit, StepTimeModel, attended

STEPS = [(1, 100), (16, 200), (64, 2080), (256, 33_000), (512, 140_000), (128, 140_000)]


def real_s(num_tokens: int, num_attended: int) -> float:
    """What the steps of these tests take."""
    return 0.004 + 30e-6 * num_tokens + 2e-9 * num_attended


def a_model(*, slower: float = 1.0, times: int = 3) -> StepTimeModel:
    """One that has seen every kind of step."""
    model = StepTimeModel()
    for step in STEPS * times:
        model.observe(*step, slower * real_s(*step))
    return model


def test_attended_counts_every_position() -> None:
    """Token i of a sequence attends to i + 1 positions."""
    for start, stop in ((0, 1), (0, 7), (3, 9), (5, 5)):
        assert attended(start, stop) == sum(i + 1 for i in range(start, stop))


def test_exact_steps_are_predicted_exactly() -> None:
    """Also those of sizes that were never seen; and the fit that is sent says the same."""
    model = a_model()
    fit = model.fit()
    assert fit.is_known
    for step in ((40, 900), (1024, 524_800), (2, 3)):
        assert model.predict(*step) == pytest.approx(real_s(*step), rel=0.01)
        assert fit.seconds(*step) == pytest.approx(model.predict(*step))
    assert fit.error_p90 < 0.01
    assert (fit.most_tokens, fit.most_attended) == (512, 140_000)


def test_nothing_is_predicted_from_a_few_steps() -> None:
    """Nor is such a fit known."""
    model = StepTimeModel()
    for _ in range(MIN_STEPS - 1):
        assert model.predict(1, 1) == 0.0
        assert not model.fit().is_known
        model.observe(1, 1, 0.01)
    model.observe(1, 1, 0.01)
    assert model.predict(1, 1) == pytest.approx(0.01, rel=1e-3)


def test_steps_without_duration_are_none() -> None:
    """Those of an engine that makes its times up as 0."""
    model = StepTimeModel()
    for _ in range(20):
        model.observe(1, 1, 0.0)
    assert not model.fit().is_known
    assert model.predict(100, 100) == 0.0


def test_a_machine_that_slows_down_is_followed() -> None:
    """Within 30 steps of one shape, and for the other shapes with it: half as fast is half as
    fast."""
    model = a_model()
    model.profiled()
    for _ in range(30):
        model.observe(64, 2080, 2 * real_s(64, 2080))
    assert model.predict(64, 2080) == pytest.approx(2 * real_s(64, 2080), rel=0.05)
    assert model.predict(512, 140_000) == pytest.approx(2 * real_s(512, 140_000), rel=0.25)


def test_a_profile_that_was_disturbed_heals_with_the_first_steps() -> None:
    """Nor do steps count twice once the shape is fitted to them, too: they did, and a machine that
    had been measured at a third of its speed passed for one of twice its speed for twenty steps."""
    model = a_model(slower=3.0)
    model.profiled()
    for number in range(40):
        model.observe(64, 2080, real_s(64, 2080))
        predicted_s = model.predict(64, 2080)
        assert predicted_s == pytest.approx(real_s(64, 2080), rel=0.01), number
    assert model.fit().mean_ratio == pytest.approx(1.0, abs=0.01)


def test_a_profile_is_not_forgotten() -> None:
    """After hours of single tokens a long prompt is still predicted as it was measured."""
    model = a_model()
    model.profiled()
    for _ in range(5000):
        model.observe(1, 100, real_s(1, 100))
    assert model.predict(512, 140_000) == pytest.approx(real_s(512, 140_000), rel=0.05)


def test_errors_are_those_of_predictions_made_before() -> None:
    """Half of the steps take 30 % longer than the others: so it says, though the fit is as good as
    it can be."""
    model, draws = StepTimeModel(), random.Random(1)
    for _ in range(300):
        model.observe(64, 2080, real_s(64, 2080) * draws.choice((1.0, 1.3)))
    fit = model.fit()
    assert 0.08 < fit.error_p50 < 0.25
    assert fit.error_p50 <= fit.error_p90 < 0.32


def test_the_mean_counts_what_the_ordinary_step_does_not() -> None:
    """Every fourth step takes twice as long: what is predicted is one of the others, and the mean
    is told beside it."""
    model, draws = a_model(), random.Random(1)
    model.profiled()
    assert model.fit().mean_ratio == 1.0
    for _ in range(600):
        model.observe(64, 2080, real_s(64, 2080) * draws.choice((1, 1, 1, 2)))
    fit = model.fit()
    assert fit.seconds(64, 2080) == pytest.approx(real_s(64, 2080), rel=0.02)
    assert fit.mean_ratio == pytest.approx(1.25, abs=0.06)


def test_a_long_prompt_is_cut_into_steps() -> None:
    """Each has its constant; what the cache has is not computed but attended to."""
    fit = StepFit(1.0, 0.01, 0.0001, num_steps=100)
    assert fit.prompt_seconds(0, 100, 0) == pytest.approx(1.0 + 1.0 + 0.0001 * attended(0, 100))
    whole = sum(
        fit.seconds(stop - start, attended(start, stop)) for start, stop in ((50, 90), (90, 130))
    )
    assert fit.prompt_seconds(50, 130, 40) == pytest.approx(whole)
    assert fit.prompt_seconds(100, 100, 40) == 0.0


@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.integers(1, 10**7), st.floats(1e-5, 100)),
        min_size=MIN_STEPS,
        max_size=60,
    )
)
def test_predictions_grow_with_both(steps: list[tuple[int, int, float]]) -> None:
    """Whatever was seen: a larger step is never predicted to be quicker, nor anything below 0; the
    search for a chunk's size relies on it."""
    model = StepTimeModel()
    for step in steps:
        model.observe(*step)
    fit = model.fit()
    assert min(fit[:3]) >= 0
    assert 0 <= model.predict(1, 1) <= model.predict(2, 1) <= model.predict(2, 1000)


def test_steps_that_were_all_alike_say_nothing_of_longer_ones() -> None:
    """They took so long for a reason that is not known: not for what they attended to, by which a
    longer context would seem to keep no limit. Batches of first tokens: not either."""
    alike, firsts = StepTimeModel(), StepTimeModel()
    for _ in range(MIN_STEPS):
        alike.observe(1, 1, 0.010)
    for num_rows in (1, 4, 16) * 3:
        firsts.observe(num_rows, num_rows, real_s(num_rows, 0))
    assert alike.predict(1, 160) == pytest.approx(0.010, rel=0.03)
    assert alike.predict(8, 8000) < 0.02
    assert firsts.predict(4, 4000) == pytest.approx(real_s(4, 0), rel=0.05)
