"""Time models from the command line: where they come from, and what each refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli import main
from services.cli.plan.times_flags import TimesFlags
from services.planner.core.mesh_text import Unit
from services.planner.distserve_data import DistServeData
from services.sim.baselines.distserve_times import Degree, first_stage_ms
from shared.engine.fake import FakeEngine
from shared.errors import EngineFailed, InvalidRequest
from shared.predict.fit_steps import StepSample, fit_steps
from shared.predict.times import FittedTimes
from shared.profile.measure_steps import fitted_profile
from shared.profile.step_profile import StepProfile, read_profile

DATA = Path(__file__).parents[2] / "sim" / "data"

PROMPTS = [StepSample(n, n * (n + 1) // 2, 1e-3 + n * 1e-5) for n in (16, 32, 64, 128, 256, 512)]
ANSWERS = [StepSample(n, n * 1000, 2e-3 + n * 1e-4) for n in (1, 2, 4, 8, 16)]


def a_profile() -> StepProfile:
    """Of steps that follow a line exactly."""
    return fitted_profile((PROMPTS, ANSWERS), FakeEngine(num_blocks=64), date="2026-01-01")


def test_a_fit_gives_lines_back() -> None:
    """Steps on a line: its coefficients, no error; the farthest step is known."""
    fit = fit_steps(PROMPTS)
    assert fit.constant_s == pytest.approx(1e-3, rel=1e-3)
    assert fit.token_s == pytest.approx(1e-5, rel=1e-2)
    assert fit.error < 1e-3
    assert (fit.num_steps, fit.most_tokens) == (6, 512)


def test_steps_that_follow_no_line_are_no_profile() -> None:
    """Too few steps, and steps at random, are refused."""
    engine = FakeEngine(num_blocks=64)
    wild = [StepSample(n, n, (1e-3, 1.0)[n % 2]) for n in range(1, 12)]
    with pytest.raises(EngineFailed, match="follow no line"):
        fitted_profile((wild, ANSWERS), engine, date="")
    with pytest.raises(InvalidRequest, match="5 are the least"):
        fitted_profile((PROMPTS, ANSWERS[:3]), engine, date="")


def test_a_profile_is_read_back_and_warns_beyond_its_range(tmp_path: Path) -> None:
    """The file holds the lines; a step beyond what was measured is told of."""
    path = tmp_path / "p.json"
    a_profile().write(path)
    assert read_profile(path) == a_profile()
    times = TimesFlags(profile=path).unit(Unit()).times
    assert isinstance(times, FittedTimes)
    assert times.step_s(100, 5050, 0, 0) == pytest.approx(2e-3, rel=0.01)
    assert times.warnings() == []
    assert times.step_s(0, 0, 64, 64_000) > 0
    assert "4.0 times beyond" in times.warnings()[0]


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    """None, of another kind, of another version."""
    path = tmp_path / "p.json"
    with pytest.raises(InvalidRequest, match="no such file"):
        read_profile(path)
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="no profile of pdmesh profile -o"):
        read_profile(path)
    path.write_text('{"pdmesh_profile": 7}')
    with pytest.raises(InvalidRequest, match="version 7, and this pdmesh reads 1"):
        read_profile(path)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    """--model says one thing, the file another."""
    path = tmp_path / "p.json"
    a_profile().write(path)
    assert TimesFlags(profile=path).kv.token_bytes == a_profile().token_bytes
    with pytest.raises(InvalidRequest, match="profile of fake, not of llama-3-8b"):
        assert TimesFlags(profile=path, model="llama-3-8b").kv


def test_a_roofline_is_bounded_by_weights_and_by_operations() -> None:
    """One token reads all weights; long prompts go by operations; more devices are quicker, and
    hold more KV."""
    one, four = (TimesFlags(device="h100", model="llama-3-8b").unit(Unit("", tp)) for tp in (1, 4))
    assert one.times.step_s(0, 0, 1, 1) == pytest.approx(0.002 + 16.06e9 / (3350e9 * 0.8), rel=0.01)
    prompt_s = one.times.step_s(8192, 0, 0, 0)
    assert prompt_s == pytest.approx(0.002 + 2 * 8.03e9 * 8192 / (989e12 * 0.6), rel=0.01)
    assert four.times.step_s(8192, 0, 0, 0) < 0.4 * prompt_s
    assert four.kv_tokens > 4 * one.kv_tokens


def test_stages_of_a_roofline_share_layers_and_rows() -> None:
    """A prompt goes through all of them, rows are in one each, weights and KV are divided."""
    flags = TimesFlags(device="h100", model="llama-3-8b")
    one, two = (flags.unit(Unit("", 1, pp)) for pp in (1, 2))
    hop_s = 8e-6 + 8192 * 4096 * 2 / 450e9
    assert two.times.step_s(8192, 0, 0, 0) - one.times.step_s(8192, 0, 0, 0) == pytest.approx(hop_s)
    rows_s = two.times.step_s(0, 0, 64, 64_000) - 8e-6 - 32 * 4096 * 2 / 450e9
    assert rows_s == pytest.approx(one.times.step_s(0, 0, 32, 32_000))
    assert two.kv_tokens == pytest.approx(2 * one.kv_tokens + 16.06e9 / 131072, rel=1e-3)
    # Of 32 layers the largest of three stages has 11.
    three = flags.unit(Unit("", 1, 3))
    assert three.kv_tokens == pytest.approx((72e9 * 32 / 11 - 16.06e9) / 131072, rel=1e-3)


def test_stages_of_distserve_are_those_of_its_simulator() -> None:
    """Each takes its part of the fit, and the first its share beside."""
    times = TimesFlags(times="distserve", data=DATA).unit(Unit("", 1, 2)).times
    fits = DistServeData(DATA, "distserve").phase("opt-13b", Degree(1, 2)).coefficients
    prompt_ms = 2 * fits.prefill_ms(512, 512**2, 2) + first_stage_ms(512)
    assert times.step_s(512, 512 * 513 // 2, 0, 0) == pytest.approx(prompt_ms / 1e3)
    rows_ms = 2 * fits.decode_ms(4, 4 * 101, 2) + first_stage_ms(4 * 100)
    assert times.step_s(0, 0, 8, 8 * 101) == pytest.approx(rows_ms / 1e3)


def test_published_times_are_read_from_their_files() -> None:
    """DistServe's fits of the tests' copies, near the affine default; another degree is quicker."""
    flags = TimesFlags(times="distserve", data=DATA)
    one, two = (flags.unit(Unit("", tp)).times for tp in (1, 2))
    usual = TimesFlags().unit(Unit()).times
    for step in ((1024, 1024 * 1025 // 2, 0, 0), (0, 0, 32, 32 * 1100)):
        assert one.step_s(*step) == pytest.approx(usual.step_s(*step), rel=0.15)
        assert two.step_s(*step) < one.step_s(*step)


@pytest.mark.parametrize("model", [None, "llama2-70b", "llama-2-70b"])
def test_splitwises_machine_has_its_models_kv(model: str | None) -> None:
    """Whichever of its two names the model is given by, and without one."""
    flags = TimesFlags(times="splitwise", data=DATA, model=model)
    assert flags.kv.name == "llama-2-70b"
    assert "llama2-70b on a100-80gb" in flags.unit(Unit()).times.source


def test_a_limit_without_a_unit_is_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """As those of ``pdmesh bench``, which have the same names; the time of a step must say it."""
    load = ("--num-requests", "10", "--no-what-if")
    assert main(["plan", "simulate", "1M", "--slo-ttft", "2", "--slo-tpot", "0.05", *load]) == 0
    assert "of TTFT 2 s and TPOT 50 ms" in capsys.readouterr().out
    assert main(["plan", "simulate", "1M", "--base", "20", *load]) == 2
    assert "--base must be a number with a unit" in capsys.readouterr().err


def test_only_steps_of_a_run_are_said_to_be_beyond_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not those that closed forms ask for, nor those that a worker measures before it joins."""
    a_profile().write(tmp_path / "profile.json")
    command = ["plan", "simulate", "1P+1D", "--profile", str(tmp_path / "profile.json")]
    command += ["--num-requests", "10", "--no-what-if", "--kv-tokens", "20000"]
    assert main([*command, "--scale-lengths", "0.02"]) == 0
    assert "extrapolated" not in capsys.readouterr().out
    assert main([*command, "--scale-lengths", "2"]) == 0
    assert "times beyond what was profiled" in capsys.readouterr().out
