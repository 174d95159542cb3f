"""What ``pdmesh top`` makes of the gateway's answer, and of a gateway that answers otherwise."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
from typing import Any

import pytest
from rich.console import Console

from services.cli import main, words
from services.cli.top import leaving_keys
from services.cli.top_view import block_bar, frame, sparkline
from shared.version import VERSION
from tests.support.stub_gateway import PREFILL, StubGateway, a_view


def drawn(view: dict[str, Any] | None, trouble: str = "", width: int = 150) -> list[str]:
    """The lines of one frame."""
    out = io.StringIO()
    Console(file=out, width=width).print(frame("http://gw", view, trouble, width=width))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_a_frame_tells_all_that_the_gateway_tells() -> None:
    """Workers, queue, blocks by state, rates, percentiles, transfers."""
    lines = drawn(a_view())
    assert lines[0] == "pdmesh top http://gw m (2,048 tokens) 1.2.3 up 61 s ● ready"
    text = "\n".join(lines)
    assert "running 5 out 1,234 tokens/s" in text
    assert "queued 7 in 100 tokens/s TTFT 100.0 ms 250.0 ms 1.50 s" in text
    assert "refused 11 ended 42 in 60 s, 1 failed ITL - - -" in text
    (prefill,) = (line for line in lines if line.startswith("prefill 10.0.0.1:1"))
    assert prefill.startswith("prefill 10.0.0.1:1 usable 3 2 12,345 12.5 ms ")
    assert prefill.endswith(" 60 of 100, 10 in quarantine 1")
    assert any(line.startswith("decode 10.0.0.2:2 suspect") for line in lines)
    assert "10.0.0.1:1 → 10.0.0.2:2 sysv 9 3.0 MiB 8.2 GB/s 300 MB/s 1.0 ms 2.0 ms" in lines
    assert "00c0ffee00c0ffee 12,032 38% 3" in lines


@pytest.mark.parametrize(
    ("gb_per_s", "text"),
    [(25.0, "25.0 GB/s"), (0.3, "300 MB/s"), (0.0025, "2.5 MB/s"), (0.0001, "0.1 MB/s")],
)
def test_a_slow_links_rate_is_not_none(gb_per_s: float, text: str) -> None:
    """1 Mbit/s is 0.1 MB/s."""
    assert words.speed(gb_per_s) == text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_frame_fits_a_narrow_terminal(width: int) -> None:
    """A worker and a transfer keep their line, and no word or number is cut, with addresses and
    counts as long as they get."""
    view = a_view(window={**a_view()["window"], "output_tokens_each_s": [1] * 60})
    for number, worker in enumerate(view["workers"]):
        worker["address"] = f"192.168.100.20{number}:54321"
        worker["running"], worker["step_s"] = 256, 1.2345
        worker["state"] = "connecting"
    view["transfers"][0]["lane"] = "cuda_ipc"
    lines = drawn(view, width=width)
    assert not any("…" in line for line in lines)
    assert lines[0] == "pdmesh top http://gw"
    assert lines[1] == "m (2,048 tokens) 1.2.3 up 61 s ● ready"
    (worker_line,) = (line for line in lines if line.startswith("prefill 192"))
    assert worker_line.startswith("prefill 192.168.100.200:54321 connecting 256 2 1234.5 ms █")
    assert worker_line.endswith(" 60%")
    pair = "192.168.100.200:54321 → 192.168.100.201:54321 cuda_ipc 8.2 GB/s 1.0 ms"
    assert pair in lines
    assert "queued 7 in 100 tokens/s TTFT 100.0 ms 250.0 ms 1.50 s" in lines
    assert "refused 11 ended 42 in 60 s, 1 failed ITL - - -" in lines
    assert len(lines) == len(drawn(view)) + 1


def test_what_prefix_caches_had_is_a_column() -> None:
    """Of the last minute's prompts; nothing where none was read."""
    view = a_view()
    for worker, (tokens, cached) in zip(view["workers"], ((30, 16), (0, 0)), strict=True):
        worker["prompts"] |= {"tokens": tokens, "cached_tokens": cached}
    (head,) = (line for line in drawn(view) if line.startswith("role"))
    assert " cached " in head
    lines = drawn(view)
    (prefill,) = (line for line in lines if line.startswith("prefill 10"))
    (decode,) = (line for line in lines if line.startswith("decode 10"))
    assert " 53% " in prefill
    view["workers"][0]["prompts"] |= {"dram_tokens": 3, "ssd_tokens": 9}
    (prefill,) = (line for line in drawn(view) if line.startswith("prefill 10"))
    assert " 53%, dram 10, ssd 30 " in prefill
    assert "%" not in decode.split("█")[0]


def test_a_mesh_without_anything_is_a_frame_too() -> None:
    """No model, no worker, no traffic; and before the first answer, only the trouble."""
    nothing = a_view(
        ready=False, not_ready_reason="no prefill worker has joined", model=None, workers=[],
        transfers=[],
    )  # fmt: skip
    text = "\n".join(drawn(nothing))
    assert "no model yet" in text
    assert "● not ready: no prefill worker has joined" in text
    assert drawn(None, "nothing answers")[1:3] == ["nothing answers", "Trying again …"]
    kept = "What is below was before that. Trying again …"
    assert drawn(nothing, "nothing answers")[1:3] == ["nothing answers", kept]


def test_a_worker_that_has_left_keeps_its_transfers() -> None:
    """Under its incarnation."""
    assert any(f"{PREFILL} (gone) →" in line for line in drawn(a_view(workers=[])))


@pytest.mark.parametrize(
    ("reserved", "quarantined", "bar"),
    [
        (0, 0, "░░░░░░░░░░"),
        (1000, 0, "██████████"),
        (500, 0, "█████░░░░░"),
        (1, 1, "█▓░░░░░░░░"),
        (999, 1, "█████████▓"),
        (500, 500, "█████▓▓▓▓▓"),
        (0, 1000, "▓▓▓▓▓▓▓▓▓▓"),
    ],
)
def test_a_bar_keeps_its_width_and_shows_the_least_share(
    reserved: int, quarantined: int, bar: str
) -> None:
    """One block in quarantine is seen among a thousand."""
    blocks = {
        "total": 1000, "free": 1000 - reserved - quarantined,
        "reserved": reserved, "quarantined": quarantined,
    }  # fmt: skip
    assert block_bar(blocks, 10).plain == bar


def test_a_sparkline_is_relative_to_its_largest() -> None:
    """Something is never blank, nothing always is."""
    assert sparkline([0, 1, 50, 100]) == " ▁▄█"
    assert sparkline([0, 0]) == "  "
    assert sparkline([]) == ""
    assert sparkline([0.25, 0.5]) == "▄█"


# --- commands against a stub --------------------------------------------------------------------


def test_one_frame_is_printed_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With or without --once, its lines whole; --json gives the gateway's own words."""
    monkeypatch.delenv("COLUMNS", raising=False)  # whoever runs tests side by side may set it
    with StubGateway({"/cluster": a_view()}) as gateway:
        assert main(["top", "--url", gateway.url]) == 0
        assert "● ready" in capsys.readouterr().out
        assert main(["top", "--once", "--url", f"{gateway.url}/v1"]) == 0
        assert "10.0.0.1:1 → 10.0.0.2:2" in capsys.readouterr().out
        assert main(["top", "--json", "--url", gateway.url]) == 0
        assert json.loads(capsys.readouterr().out) == a_view()


def test_the_key_comes_from_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where other users cannot see it."""
    with StubGateway({"/cluster": a_view(), "/v1/models": {"data": []}}, key="secret") as gateway:
        for command in (["top", "--once"], ["models"], ["chat"]):
            assert main([*command, "--url", gateway.url]) == 1
            out, err = capsys.readouterr()
            assert out == ""
            assert "PDMESH_API_KEY" in err
            assert err.count("\n") == 1
        monkeypatch.setenv("PDMESH_API_KEY", "secret")
        assert main(["top", "--once", "--url", gateway.url]) == 0
        assert main(["models", "--url", gateway.url]) == 0
        assert "no model yet" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["top --once", "top --json", "models", "models --json", "chat"])
def test_something_that_is_no_gateway_is_called_so(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages, JSON of another form, and statuses without our errors."""
    bodies: list[Any] = ["<html>", {}, [], {"data": None, "workers": 3}]
    for answers in ({}, *({"/cluster": it, "/v1/models": it} for it in bodies)):
        with StubGateway(answers) as gateway:
            assert main([*command.split(), "--url", gateway.url]) == 1
            assert "is no pdmesh gateway" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["top --once --url", "doctor --gateway"])
def test_a_gateway_of_another_release_is_told_as_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose view of its mesh lacks what this one looks for."""
    view = {name: it for name, it in a_view().items() if name not in ("transfers", "window")}
    with StubGateway({"/cluster": {**view, "version": "0.0.1"}}) as gateway:
        assert main([*command.split(), gateway.url]) == 1
        told = " ".join("".join(capsys.readouterr()).split())
    assert f"{gateway.url} runs release 0.0.1 and this is {VERSION}" in told


def test_models_of_another_server_need_no_context(capsys: pytest.CaptureFixture[str]) -> None:
    with StubGateway({"/v1/models": {"data": [{"id": "m", "max_model_len": None}]}}) as gateway:
        assert main(["models", "--url", gateway.url]) == 0
    assert "not said" in capsys.readouterr().out


async def test_a_terminal_that_hangs_up_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keyboard is read to its end once, and not set back."""
    terminal, keyboard = pty.openpty()
    leave = asyncio.Event()
    with open(keyboard) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with leaving_keys(leave):
            os.close(terminal)
            async with asyncio.timeout(5.0):
                await leave.wait()


def test_a_width_of_nothing_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some terminals say COLUMNS=0, by which no text can be set."""
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["plan", "kv", "llama-3-70b"]) == 0
    assert "327.680 kB" in capsys.readouterr().out
