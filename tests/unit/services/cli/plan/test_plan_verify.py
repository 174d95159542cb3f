"""``pdmesh plan verify``: a replay of what a gateway tells, beside what it tells."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli import main
from services.gateway.core.routing.routing import POLICIES
from tests.support.recent import recent
from tests.support.stub_gateway import StubGateway

PATH = "/cluster/requests"


def verified(
    body: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, dict[str, Any]]:
    """The exit code, and the facts."""
    with StubGateway({PATH: body}) as gateway:
        code = main(["plan", "verify", "--url", gateway.url, "--json", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("mesh", ["1P+1D", "1M"])
def test_a_mesh_that_does_what_it_reports_is_predicted(
    mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a simulated mesh the replay is the run itself: cached prompts, queues, transfers and
    messages; only what is learned of the gateway's own time is a quantile."""
    code, facts = verified(recent(mesh), capsys)
    assert (code, facts["is_kept"], facts["mesh"], facts["num_requests"]) == (0, True, mesh, 60)
    assert {it["name"] for it in facts["figures"]} == {
        *("attainment", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    }
    assert all(abs(it["error"]) < 0.005 for it in facts["figures"])
    assert all(it["seen"] == pytest.approx(it["predicted"], abs=2e-4) for it in facts["terms"])
    assert facts["worst"] == {"TTFT": None, "TPOT": None}
    assert facts["notes"] == []


def test_workers_that_may_be_either_are_borrowed(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of ``pdmesh up --workers``, whatever they are at home; fixed ones are not."""
    body = recent("1P+2D", rate=60.0, num=120, moves=True)
    code, facts = verified(body, capsys)
    assert (code, facts["mesh"]) == (0, "1P+2D")
    assert all(abs(it["error"]) < 0.005 for it in facts["figures"])
    for it in body["workers"]:
        it["moves"] = False
    assert verified(body, capsys)[0] == 1


def test_prompts_share_a_step_as_far_as_workers_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are computed one after the other are replayed so; the flag says otherwise."""
    body = recent(rate=30.0, batch_tokens=16)
    code, facts = verified(body, capsys)
    assert code == 0
    assert all(abs(it["error"]) < 0.005 for it in facts["figures"])
    code, facts = verified(body, capsys, "--batch-tokens", "0")
    assert code == 1
    assert facts["worst"]["TTFT"] in ("prefill", "prefill_queue")


def test_times_that_are_given_leave_the_workers_their_kv(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model of another size would have its KV cross the mesh's link, and fill its blocks."""
    body = recent(num=6, link_bytes_s=1e6)
    _, facts = verified(body, capsys)
    first, *_ = (it["predicted"] for it in facts["figures"] if it["name"] == "TPOT p50")
    times = ("--base", "4ms", "--prompt-token", "0us", "--decode-row", "0us", "--context-token")
    _, facts = verified(body, capsys, *times, "0us")
    (given,) = (it["predicted"] for it in facts["figures"] if it["name"] == "TPOT p50")
    assert 0.004 <= given < 0.004 + first


def test_steps_are_as_large_as_workers_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Of workers that decode two answers at once, the third waits; one that does not say so, of an
    earlier release, is taken to decode 256."""
    body = recent(rate=30.0, max_running=2)
    code, facts = verified(body, capsys)
    assert code == 0
    assert all(abs(it["error"]) < 0.005 for it in facts["figures"])
    for it in body["workers"]:
        del it["max_running"]
    assert verified(body, capsys)[0] == 1


def test_steps_that_take_longer_than_reported_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both time models are off by half, and that is said, with the exit code 1; --slower mends
    it."""
    body = recent(slower=1.5, rate=2.0)
    code, facts = verified(body, capsys)
    assert code == 1
    assert facts["worst"] == {"TTFT": "prefill", "TPOT": "later_gaps"}
    with StubGateway({PATH: body}) as gateway:
        assert main(["plan", "verify", "--url", gateway.url]) == 1
    said = capsys.readouterr().out
    assert "TTFT is off most in prefill: the time model of prompts" in said
    assert "TPOT is off most in later gaps" in said


def test_a_replay_waits_at_the_gateway_as_its_requests_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One place where two requests overlap: the second waits for it, as the gateway says it did."""
    limits = {"max_running": 1, "max_waiting": 64, "max_wait_s": 10.0, "overload": "off"}

    def waited_s(body: dict[str, Any]) -> float:
        _, facts = verified(body, capsys)
        return next(it["predicted"] for it in facts["terms"] if it["name"] == "gateway")

    told = recent(rate=30.0, num=20)
    assert waited_s({**told, **limits}) > 10 * waited_s(told)


@pytest.fixture
def own_policy() -> Iterator[str]:
    """A name that no release has; what ``--policy`` loads stays in its process, here until the
    test's end.
    """
    name = "services.gateway.core.routing.routing:Random"
    yield name
    POLICIES.pop(name, None)


def test_a_policy_that_only_the_gateway_names_imports_nothing(
    own_policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever answers as a gateway would choose which module runs here; the user may say it."""
    body = {**recent(rate=2.0), "policy": own_policy}
    with StubGateway({PATH: body}) as gateway:
        asked = ["plan", "verify", "--url", gateway.url]
        assert main(asked) == 2
        assert f"the mesh routes by {own_policy}" in capsys.readouterr().err
        assert main([*asked, "--policy", own_policy]) != 2


def test_without_what_was_cached_the_replay_is_another_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Receipts that tell of no cached tokens make prompts that are computed whole."""
    body = recent(rate=2.0)
    for it in body["requests"]:
        it["receipt"]["cached_tokens"] = 0
    _, facts = verified(body, capsys)
    (prefill,) = [it for it in facts["terms"] if it["name"] == "prefill"]
    assert prefill["predicted"] > 1.05 * prefill["seen"]


def test_a_prompt_whose_beginning_is_older_than_all_that_is_told_finds_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its cached tokens are computed before the replay begins."""
    body = recent(rate=2.0)
    body["requests"] = body["requests"][2:]
    code, facts = verified(body, capsys)
    assert code == 0
    assert all(abs(it["error"]) < 0.01 for it in facts["figures"])


def test_what_is_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests without a token, those that go on, those that were tried twice, workers that have
    gone, tiers that nobody told of."""
    body = recent()
    refused, going, retried, elsewhere = body["requests"][:4]
    refused["receipt"] |= {"ttft_s": None, "attempts": 0}
    refused["error"] = "overloaded"
    going["ended"] = False
    retried["receipt"]["attempts"] = 2
    elsewhere["receipt"] |= {"prefill": "f" * 16, "ssd_tokens": 16}
    _, facts = verified(body, capsys)
    assert facts["num_requests"] == 59
    said = "; ".join(facts["notes"])
    words = ("no token: 1", "go on: 1", "more than one attempt: 1", "no longer: 1", "knows none: 1")
    assert all(word in said for word in words)
    _, facts = verified(body, capsys, "--ssd-cache", "1GB")
    assert "knows none" not in "; ".join(facts["notes"])


@pytest.mark.slow
def test_what_was_kept_is_replayed_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--keep writes what the gateway told, and the file gives the same figures; --output writes the
    report of pdmesh bench, with both runs."""
    kept, folder = tmp_path / "seen.json", tmp_path / "out"
    _, facts = verified(recent(), capsys, "--keep", str(kept))
    assert main(["plan", "verify", str(kept), "--json", "--output", str(folder)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["figures"] == facts["figures"]
    report = json.loads((folder / "report.json").read_text())
    assert report["verify"]["figures"] == facts["figures"]
    seen, predicted = report["runs"]
    assert seen["ttft_s"]["p50"] == pytest.approx(predicted["ttft_s"]["p50"], rel=0.01)
    assert seen["tpot_s"]["p99"] == pytest.approx(predicted["tpot_s"]["p99"], rel=0.01)
    assert seen["itl_s"] is None
    assert (folder / "report.svg").exists()
    # What a verified run writes is a folder of a run, too.
    assert main(["plan", "verify", str(folder), "--mesh", "1P+1D", "--times", "fake"]) in (0, 1)
    capsys.readouterr()
    assert main(["plan", "verify", str(kept), "--last", "35s", "--json"]) == 0
    assert 20 < json.loads(capsys.readouterr().out)["num_requests"] < 40


ROWS = (
    "run,rate,index,end,due_s,ttft_s,tpot_s,input,input_asked,cached,output",
    "0,2.0,0,complete,0.0,0.12,0.02,100,100,0,5",
    "0,2.0,1,complete,0.5,0.12,0.02,100,100,0,5",
    "0,2.0,2,complete,1.0,0.12,0.02,100,100,0,5",
)


def _folder(path: Path, rows: Sequence[str]) -> Path:
    path.mkdir()
    (path / "requests.csv").write_text("\n".join(rows) + "\n")
    (path / "report.json").write_text(json.dumps({"endpoints": [{"model": "m"}], "mesh": None}))
    return path


def test_a_folder_of_bench_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the mesh and the times that the flags give; the client's view has no terms."""
    folder = str(_folder(tmp_path / "report", ROWS))
    times = [
        "--base",
        "20ms",
        "--prompt-token",
        "1ms",
        "--decode-row",
        "0s",
        "--context-token",
        "0s",
    ]
    code = main(["plan", "verify", folder, "--mesh", "1P+1D", *times, "--wire", "1us", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert (code, facts["num_requests"], facts["terms"]) == (0, 3, [])
    assert facts["figures"][1]["predicted"] == pytest.approx(0.12, abs=1e-3)
    assert "a client's" in facts["notes"][0]
    assert main(["plan", "verify", folder]) == 2
    assert "say what served with --mesh" in capsys.readouterr().err
    assert main(["plan", "verify", folder, "--mesh", "1P+1D"]) == 2
    assert "give a time model" in capsys.readouterr().err
    assert main(["plan", "verify", folder, "--run", "7"]) == 2
    assert "has the runs 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((*ROWS[:2], ROWS[3]), "requests.csv:3: request 1 is missing: the run has a hole"),
        ((*ROWS[:2], ROWS[2].replace("0.5", "-1")), ":3: arrives 1 s before the line above"),
        ((ROWS[0], ROWS[1].replace("100", "many")), ":2: Expected `int`"),
        (("TIMESTAMP,ContextTokens", "1,2"), "is no folder of `pdmesh bench --output`"),
        (ROWS[:1], "is no folder of `pdmesh bench --output`"),
        ([row.replace("input_asked", "asked") for row in ROWS], "no column input_asked"),
    ],
)
def test_a_run_with_holes_is_refused_by_its_line(
    rows: Sequence[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is what is no run at all."""
    folder = _folder(tmp_path / "report", rows)
    assert main(["plan", "verify", str(folder), "--mesh", "1P+1D"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--last", "0s"], "--last must be above 0"),
        (["--last", "soon"], "--last must be a number with a unit"),
        (["--policy", "fifo"], "--policy must be one of"),
        (["--slo-tpot", "0ms"], "must be above 0"),
        (["--batch-tokens", "-1"], "--batch-tokens must be 0"),
        (["--mesh", "3Q"], "is no part of a mesh"),
        (["--kv-tokens", "100"], "give --kv-tokens of the workers"),
        (["--profile", "none.json"], "none.json: no such file"),
        (["--mesh", "1P(tp2)+1D"], "--mesh of a replay has equal workers"),
        (["none.json"], "none.json: no such file"),
        (["--run", "0"], "--run is of a folder"),
        ([".", "--last", "60s"], "--last is of a gateway"),
        (["pyproject.toml", "--keep", "seen.json"], "--keep is of a gateway"),
        (["pyproject.toml"], "neither a file of `pdmesh plan verify --keep` nor"),
    ],
)
def test_flags_that_cannot_be(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the remedy, exit code 2."""
    with StubGateway({PATH: recent(num=6)}) as gateway:
        assert main(["plan", "verify", *arguments, "--url", gateway.url]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_gateways_that_tell_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody there, another server, no request yet, no worker, none that knows its steps."""

    def said(body: dict[str, Any] | None) -> tuple[int, str]:
        with StubGateway({} if body is None else {PATH: body}) as gateway:
            code = main(["plan", "verify", "--url", gateway.url])
        return code, capsys.readouterr().err

    assert main(["plan", "verify", "--url", "http://127.0.0.1:1"]) == 1
    assert "start a mesh with `pdmesh up`" in capsys.readouterr().err
    for body, code, words in (
        (None, 1, "is no pdmesh gateway"),
        ({"requests": 3}, 1, "use the pdmesh of its release"),
        (recent(num=4, requests=[]), 1, "remembers no request with a token"),
        (recent(num=4, workers=[]), 2, "tells of no worker"),
    ):
        found = said(body)
        assert found[0] == code
        assert words in found[1]
    body = recent(num=4)
    body["requests"][2]["receipt"]["queue_s"] = "long"
    code, words = said(body)
    assert code == 1
    assert "Expected `float`, got `str` - at `$.queue_s`): use the pdmesh of its release" in words
    body = recent(num=4)
    body["requests"] = body["requests"][:1]
    assert "remembers one request with a token" in said(body)[1]
    body = recent(num=4)
    for it in body["requests"]:
        it["ended"] = False
    assert "all 4 requests go on: ask again" in said(body)[1]
    body = recent(num=4)
    for worker in body["workers"]:
        worker["answer_steps"]["num_steps"] = 0
    assert "give a time model" in said(body)[1]
    body = recent(num=4)
    del body["workers"][1]
    assert "can serve nothing" in said(body)[1]


def test_a_profile_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it is said to be the same one under another name."""
    steps = {
        "constant_s": 0.02, "token_s": 1e-4, "attended_s": 1e-8, "error": 0.01, "num_steps": 9,
        "most_tokens": 9999, "most_attended": 1 << 40,
    }  # fmt: skip
    answers = {**steps, "token_s": 5e-4, "attended_s": 1e-7}
    profile = {
        "pdmesh_profile": 1, "version": "1", "date": "2026-01-01", "machine": {}, "model": "other",
        "fingerprint": "", "dtype": "float32", "max_model_len": 4096, "token_bytes": 4096,
        "kv_tokens": 32768, "prompts": steps, "answers": answers,
    }  # fmt: skip
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    with StubGateway({PATH: recent()}) as gateway:
        asked = ["plan", "verify", "--url", gateway.url, "--profile", str(path)]
        assert main(asked) == 2
        assert "is a profile of other, and" in capsys.readouterr().err
        assert main([*asked, "--model", "other"]) == 0
