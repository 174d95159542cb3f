"""``pdmesh profile --from``: what workers have learned of their steps, as a file for plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.cli import main
from services.cli.plan.times_flags import TimesFlags
from services.planner.core.mesh_text import Unit
from shared.predict.step_time import NO_FIT
from shared.profile.step_profile import read_profile
from tests.support.recent import ANSWER_STEPS, PROMPT_STEPS, recent
from tests.support.stub_gateway import StubGateway, a_view


def profiled(body: dict[str, Any], path: Path, *more: str) -> int:
    """The exit code."""
    with StubGateway({"/cluster/requests": body, "/cluster": a_view()}) as gateway:
        return main(["profile", "--from", gateway.url, "-o", str(path), *more])


def a_mesh(*changes: dict[str, Any]) -> dict[str, Any]:
    """What a gateway tells of workers that report these changes, the prefill workers first."""
    body = recent(f"{len(changes) - 1}P+1D", num=2)
    for worker, changed in zip(body["workers"], changes, strict=True):
        worker |= changed
    return body


def test_a_profile_is_what_the_workers_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their lines in the mean, how far these hold, their errors and their KV; plans go by it."""
    path = tmp_path / "mesh.json"
    fit = PROMPT_STEPS._replace(mean_ratio=1.5, most_tokens=2048, most_attended=100_000)
    body = a_mesh({"prompt_steps": fit._asdict()}, {})
    assert profiled(body, path, "--json") == 0
    found = read_profile(path)
    assert json.loads(capsys.readouterr().out)["model"] == found.model == "m"
    assert found.prompts.constant_s == pytest.approx(1.5 * PROMPT_STEPS.constant_s)
    assert (found.prompts.most_tokens, found.prompts.most_attended) == (2048, 100_000)
    assert found.answers.token_s == ANSWER_STEPS.token_s
    assert (found.answers.error, found.kv_tokens) == (0.01, 2048 * 16)
    assert (found.max_model_len, found.token_bytes) == (2048, 4096)
    times = TimesFlags(profile=path).unit(Unit()).times
    assert times.step_s(4096, 0, 0, 0) == pytest.approx(1.5 * fit.seconds(4096, 0))
    assert "2.0 times beyond what was profiled" in times.warnings()[0]


def test_of_unequal_workers_one_is_taken_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean of two machines would be none."""
    path = tmp_path / "mesh.json"
    slow = PROMPT_STEPS._replace(constant_s=0.2, num_steps=300)
    assert profiled(a_mesh({}, {"prompt_steps": slow._asdict()}, {}), path) == 0
    assert "taken are those of 10.0.0.2:1, which has run most" in capsys.readouterr().err
    found = read_profile(path)
    assert found.prompts.constant_s == 0.2
    assert found.machine["prompts"] == "10.0.0.2:1"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt_steps": NO_FIT._asdict()}, "have not run enough steps of both kinds"),
        (
            {"prompt_steps": PROMPT_STEPS._replace(error_p50=0.4)._asdict()},
            "predictions are off by 40% or more",
        ),
    ],
)
def test_a_mesh_that_knows_nothing_gives_no_profile(
    changed: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what to do, and leaves no file."""
    path = tmp_path / "mesh.json"
    assert profiled(a_mesh(changed, {}), path) == 1  # no flag is wrong
    assert words in capsys.readouterr().err
    assert not path.exists()


def test_a_gateway_to_learn_from_needs_a_file_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    """And is an URL."""
    assert main(["profile", "--from", "http://127.0.0.1:1"]) == 2
    assert "--from needs --output" in capsys.readouterr().err
    assert main(["profile", "--from", "here", "-o", "x.json"]) == 2
    assert "--from must be http://host:port" in capsys.readouterr().err
