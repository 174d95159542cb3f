"""``pdmesh tour`` with real processes: what it tells is what the page tells, in a true order."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.tour import Walk, show, walk
from services.cli.tour_stops import STOPS, place_of
from shared.telemetry.lifetime import TTFT_PHASES
from shared.telemetry.moments import Moment
from tests.support.house import ROOT

pytestmark = [pytest.mark.process, pytest.mark.ucx]

PAGE = ROOT / "docs" / "tour.md"

BEFORE = [
    (Moment.ARRIVED, Moment.PARSED),
    (Moment.PARSED, Moment.TOKENIZED),
    (Moment.TOKENIZED, Moment.ADMITTED),
    (Moment.ADMITTED, Moment.ROUTED),
    (Moment.ROUTED, Moment.DISPATCHED),
    (Moment.ROUTED, Moment.RESERVED),
    (Moment.ROUTED, Moment.QUEUED),
    (Moment.QUEUED, Moment.OPENED),
    (Moment.RESERVED, Moment.OPENED),
    (Moment.QUEUED, Moment.PLANNED),
    (Moment.PLANNED, Moment.LAYERS_WRITTEN),
    (Moment.OPENED, Moment.FRAME_POSTED),
    (Moment.FRAME_POSTED, Moment.FRAME_SENT),
    (Moment.LAYERS_WRITTEN, Moment.FRAME_SENT),
    (Moment.FRAME_SENT, Moment.FRAME_PLACED),
    (Moment.SAMPLED, Moment.COMMITTED),
    (Moment.SAMPLED, Moment.EMITTED),
    (Moment.RESERVED, Moment.EMITTED),
    (Moment.EMITTED, Moment.WRITTEN),
    (Moment.COMMITTED, Moment.JOINED),
    (Moment.ACKNOWLEDGED, Moment.PREFILL_CLOSED),
    (Moment.JOINED, Moment.STEPPED),
    (Moment.STEPPED, Moment.DECODE_CLOSED),
]
"""What must come before what, across processes too: true only if their clock is one."""


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """One run for all tests here."""
    return asyncio.run(walk(tmp_path_factory.mktemp("tour") / "log"))


def stops_of_page() -> list[tuple[str, str]]:
    """(process, moment) of every stop of the page, in order."""
    return re.findall(r"^\d+\. \*\*(\w+) · .*?\*\* \(`(.+?)`\)", PAGE.read_text(), re.MULTILINE)


def test_the_page_tells_the_stops_that_a_real_request_made(walked: Walk) -> None:
    """None is missing, none is invented, each is told of its own process."""
    made = {(h.process, h.stop.moment.value) for h in walked[0]}
    assert made == set(stops_of_page())
    assert stops_of_page() == [(stop.process, stop.moment.value) for stop in STOPS]


def test_every_moment_there_is_has_a_stop() -> None:
    """A new moment needs a sentence and two places."""
    assert [stop.moment for stop in STOPS] == list(Moment)


def test_causes_come_before_effects_in_all_three_processes(walked: Walk) -> None:
    """The times of three processes are of one clock."""
    first = {h.stop.moment: h.at_s for h in walked[0] if h.number == 1}
    wrong = [(a.value, b.value) for a, b in BEFORE if first[a] > first[b]]
    assert not wrong
    last = {h.stop.moment: h.at_s for h in walked[0] if h.number == h.count}
    assert last[Moment.FRAME_PLACED] <= first[Moment.JOINED]
    assert last[Moment.FRAME_PLACED] <= first[Moment.ACKNOWLEDGED]  # before or after it joins
    assert last[Moment.STEPPED] <= first[Moment.ENDED]  # it ends at both workers, in any order


def test_each_frame_leaves_after_its_own_layers_are_written(walked: Walk) -> None:
    """Eight frames: a layer of a step each, two steps, four layers."""
    layers = [h for h in walked[0] if h.stop.moment is Moment.LAYERS_WRITTEN]
    sent = {h.number: h for h in walked[0] if h.stop.moment is Moment.FRAME_SENT}
    assert sorted(sent) == list(range(1, 9))
    planned = [h.at_s for h in walked[0] if h.stop.moment is Moment.PLANNED]
    assert len(planned) == 2
    for number, happening in sent.items():
        step, layer = divmod(number - 1, 4)
        assert f"layers [{layer}, {layer + 1})" in happening.facts
        written = [
            h.at_s for h in layers if h.at_s >= planned[step] and _num_layers(h.facts) > layer
        ]
        assert min(written) <= happening.at_s


def _num_layers(facts: str) -> int:
    return int(facts.removeprefix("layers [0, ").partition(")")[0])


def test_the_receipt_agrees_with_the_moments(walked: Walk) -> None:
    """Its phases add up to TTFT, which is when token 1 was let go; each further token is a step."""
    receipt = walked[1].receipt
    assert sum(receipt[name] for name in TTFT_PHASES) == pytest.approx(receipt["ttft_s"], abs=1e-5)
    emitted = next(h for h in walked[0] if h.stop.moment is Moment.EMITTED)
    assert emitted.at_s == pytest.approx(receipt["ttft_s"], abs=0.25)
    steps = [h for h in walked[0] if h.stop.moment is Moment.STEPPED]
    assert len(steps) + 1 == receipt["output_tokens"]


def test_the_command_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    """Its log goes; standard output is plain where it is no terminal."""
    ended = subprocess.run(
        [sys.executable, "-m", "services.cli", "tour"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert "The code of the old library is 1986." in ended.stdout
    assert "\x1b" not in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_no_word_of_prompt_or_answer_is_in_what_was_logged(walked: Walk) -> None:
    """The tour shows the answer; the moments do not."""
    told = " ".join(happening.facts for happening in walked[0])
    assert "1986" in walked[1].text
    assert "library" not in told


@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_prints_every_stop_with_its_places(walked: Walk, *, is_terminal: bool) -> None:
    """Plain or with colours: sentence, deciding line and acting line of each stop, then the
    receipt."""
    out = io.StringIO()
    show(walked, Console(file=out, force_terminal=is_terminal, width=120, highlight=False))
    text = re.sub(r"\x1b(\[[\d;]*m|\]8;[^\x1b]*\x1b\\)", "", out.getvalue())
    assert ("\x1b" in out.getvalue()) is is_terminal
    for stop in STOPS:
        for name in (stop.decides, stop.acts):
            file, line = place_of(name)
            assert f"{file}:{line}" in text
    assert "= first token" in text
