"""Receipts, metric definitions, loop lag and logs."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from shared import log
from shared.telemetry.definitions import RequestOutcome, Slo, attainment, goodput, percentile
from shared.telemetry.lifetime import TTFT_PHASES, Marks, Receipt, receipt_of
from shared.telemetry.loop_lag import INTERVAL_S, watch_loop_lag
from tests.support.house import ROOT
from tests.support.virtual_loop import run_virtual

GAP = st.floats(0, 100)
_LOGGING = re.compile(
    r"(self\._)?note|log(_often)?|_?log\.(debug|info|warning|error|exception|log)"
)


@given(st.lists(GAP, min_size=6, max_size=6), GAP, GAP)
def test_phases_add_up_to_ttft(gaps: list[float], queue_s: float, prefill_s: float) -> None:
    """Whatever the gateway measured and the workers claim, the phases sum to TTFT, none below
    zero."""
    at = [1000.0]
    for gap in gaps:
        at.append(at[-1] + gap)
    receipt = receipt_of(
        Marks(
            arrived_at=at[0],
            admitted_at=at[1],
            dispatched_at=at[2],
            last_dispatched_at=at[3],
            first_token_at=at[4],
            second_token_at=at[5],
            last_token_at=at[6],
            ended_at=at[6],
            prefill_queue_s=queue_s,
            prefill_s=prefill_s,
        ),
        output_tokens=3,
    )
    assert receipt.ttft_s is not None
    assert math.isclose(sum(receipt.ttft_phases), receipt.ttft_s, abs_tol=1e-6)
    assert min(receipt.ttft_phases) >= -1e-9
    record = receipt.as_dict()
    assert math.isclose(sum(record[name] for name in TTFT_PHASES), record["ttft_s"], abs_tol=1e-9)


def test_receipt_of_a_plain_request() -> None:
    """Each mark ends its phase."""
    receipt = receipt_of(
        Marks(
            arrived_at=10.0,
            admitted_at=10.1,
            dispatched_at=10.3,
            last_dispatched_at=10.3,
            first_token_at=10.9,
            second_token_at=11.0,
            last_token_at=11.3,
            ended_at=11.4,
            prefill_queue_s=0.2,
            prefill_s=0.3,
        ),
        output_tokens=5,
        lane="sysv",
        attempts=1,
    )
    record = receipt.as_dict()
    assert [record[name] for name in TTFT_PHASES] == [0.1, 0.2, 0.0, 0.2, 0.3, 0.1]
    assert (record["ttft_s"], record["first_step_s"], record["tpot_s"]) == (0.9, 0.1, 0.1)
    assert (record["e2e_s"], record["lane"]) == (1.4, "sysv")
    assert json.loads(receipt.as_json()) == record


def test_receipt_of_a_request_that_was_refused() -> None:
    """Without a token there is no TTFT, and phases that never began are zero."""
    receipt = receipt_of(Marks(arrived_at=5.0, ended_at=7.0), errors=("overloaded",))
    record = receipt.as_dict()
    assert "ttft_s" not in record
    assert record["queue_s"] == record["prefill_s"] == 0.0
    assert record["e2e_s"] == 2.0
    assert record["errors"] == ["overloaded"]
    assert isinstance(receipt, Receipt)


def test_metrics_of_one_request() -> None:
    """TTFT, TBT, TPOT and E2E are what their definitions say."""
    outcome = RequestOutcome(10.0, [10.5, 10.6, 10.8, 11.1])
    assert outcome.ttft_s == 0.5
    assert outcome.tbt_s == pytest.approx([0.1, 0.2, 0.3])
    assert outcome.tpot_s == pytest.approx(0.2)
    assert outcome.e2e_s == pytest.approx(1.1)
    assert RequestOutcome(10.0, [10.5]).tpot_s == 0.0
    assert RequestOutcome(10.0).ttft_s is None


def test_refused_requests_count_as_missed() -> None:
    """Attainment is over all submitted requests."""
    slo = Slo(ttft_s=1.0, tpot_s=0.15)
    good, slow = RequestOutcome(0.0, [0.5, 0.6]), RequestOutcome(0.0, [0.5, 0.9])
    cut = RequestOutcome(0.0, [0.5], is_complete=False)
    assert attainment([good, slow, cut, RequestOutcome(0.0)], slo) == 0.25
    assert attainment([], slo) == 1.0


def test_goodput_is_the_knee() -> None:
    """The highest rate below the first miss counts; a lucky run above it does not."""
    runs = [(4.0, 0.95), (1.0, 1.0), (2.0, 0.93), (3.0, 0.5)]
    assert goodput(runs) == 2.0
    assert goodput(runs, num_gpus=4) == 0.5
    assert goodput([(1.0, 0.2)]) == 0.0


def test_percentile_is_nearest_rank() -> None:
    """A percentile is one of the values."""
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, q) for q in (0, 20, 50, 99, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_idle_loop_is_never_late() -> None:
    """On virtual time nothing is late."""
    seen: list[float] = []

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await watch_loop_lag(seen.append, asyncio.get_running_loop().time)

    run_virtual(main())
    assert len(seen) >= 99
    assert max(seen) < 1e-6


def test_lag_is_what_the_stopwatch_says() -> None:
    """Not the loop's clock: that one is too coarse on uvloop. A timer that is early is not late."""
    seen: list[float] = []
    readings = iter([5.0, 5.0 + INTERVAL_S + 0.003, 7.0, 7.0 + INTERVAL_S / 2, 9.0])

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5 * INTERVAL_S):
                await watch_loop_lag(seen.append, lambda: next(readings))

    run_virtual(main())
    assert seen == [pytest.approx(0.003), 0.0]


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Logs as JSON into memory; whatever was configured before is back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    before = structlog.get_config()
    stream = io.StringIO()
    log.configure_logs(service="test", level="info", form="json", stream=stream)
    yield stream
    structlog.configure(**before)
    root.handlers = handlers
    root.setLevel(level)


def test_only_allowed_fields_are_logged(lines: io.StringIO) -> None:
    """A field that is not on the list leaves its name, never its value."""
    structlog.get_logger("x").info("hello", peer="p", prompt="the secret", seconds=1.5)
    record = orjson.loads(lines.getvalue())
    assert record["event"] == "hello"
    assert (record["service"], record["peer"], record["seconds"]) == ("test", "p", 1.5)
    assert record["refused_fields"] == "prompt"
    assert "secret" not in lines.getvalue()


def test_every_field_that_we_log_is_allowed() -> None:
    """Else its value would be missing, and only who reads the log would notice."""
    refused: list[str] = []
    num_calls = 0
    for module in (*ROOT.glob("services/**/*.py"), *ROOT.glob("shared/**/*.py")):
        for call in ast.walk(ast.parse(module.read_text())):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            if _LOGGING.fullmatch(ast.unparse(call.func)):
                num_calls += 1
                names = {word.arg for word in call.keywords if word.arg not in (None, "exc_info")}
                refused += [f"{module}:{call.lineno}: {n}" for n in names - log.ALLOWED_FIELDS]
    assert num_calls > 50
    assert refused == []


def test_control_characters_cannot_forge_lines(lines: io.StringIO) -> None:
    """A newline or an escape sequence in a field is escaped, in pretty logs, too."""
    for form in ("json", "pretty"):
        log.configure_logs(service="test", form=form, stream=lines)
        structlog.get_logger("x").info("hello", label='a\n{"event":"forged"}\x1b[2J')
    text = lines.getvalue()
    assert len(text.splitlines()) == 2
    assert "\x1b[2J" not in text


def test_request_is_one_line_with_its_receipt(lines: io.StringIO) -> None:
    """A finished request is one line that holds its receipt."""
    receipt = receipt_of(Marks(arrived_at=0.0, first_token_at=0.25))
    log.log_often("request", request_id="ab", receipts=[receipt.as_dict()])
    (record,) = gathered(lines)
    assert (record["event"], record["request_id"]) == ("request", "ab")
    assert (record["service"], record["level"]) == ("test", "info")
    assert record["receipts"][0]["ttft_s"] == 0.25
    assert datetime.fromisoformat(record["timestamp"]).tzinfo is UTC


def gathered(lines: io.StringIO) -> list[dict[str, Any]]:
    """Return the lines of ``log_often`` so far."""
    assert log._often is not None
    assert log._often._out.drain()
    return [orjson.loads(line) for line in lines.getvalue().splitlines()]


def test_no_line_waits_for_who_reads_the_log(lines: io.StringIO) -> None:
    """Neither those of requests nor a warning: behind the first that waits all would stand."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as told, os.fdopen(writing, "w") as stream:
        log.configure_logs(service="test", level="info", form="json", stream=stream)
        for number in range(100):
            structlog.get_logger("x").warning("odd", number=number, reason="r" * 1500)
            log.log_often("request", number=number)
        numbers = [orjson.loads(told.readline())["number"] for _ in range(200)]
    assert numbers == [number for number in range(100) for _ in range(2)]


def test_no_client_can_forge_a_request_line(lines: io.StringIO) -> None:
    """What is not printable is escaped, as in every other line; pretty logs have the line, too."""
    log.log_often("request", label='a\n{"event":"forged"}\x9b2J')
    log.configure_logs(service="test", form="pretty", stream=lines)
    log.log_often("request", label='a\n{"event":"forged"}\x9b2J')
    text = lines.getvalue()
    assert len(text.splitlines()) == 2
    assert "\x9b" not in text


def test_exceptions_are_logged_with_their_traceback(lines: io.StringIO) -> None:
    """A logged exception has its traceback in one field of one line."""
    try:
        raise KeyError("x")
    except KeyError:
        structlog.get_logger("x").exception("failed")
    record = orjson.loads(lines.getvalue())
    assert "KeyError" in record["exception"]
    assert record["level"] == "error"


def test_level_is_respected_and_libraries_are_heard(lines: io.StringIO) -> None:
    """Below the level nothing is written; a library's warning is a line like ours."""
    structlog.get_logger("x").debug("quiet")
    logging.getLogger("grpclib").info("chatter")
    logging.getLogger("grpclib").warning("%d things", 3)
    (line,) = lines.getvalue().splitlines()
    assert orjson.loads(line)["event"] == "3 things"


def test_large_ids_are_written_as_hex(lines: io.StringIO) -> None:
    """64-bit incarnations do not lose digits in readers that know only doubles."""
    structlog.get_logger("x").info("hello", incarnation=0xFFEEDDCCBBAA9988, peer=b"\x01\x02")
    record = orjson.loads(lines.getvalue())
    assert record["incarnation"] == "ffeeddccbbaa9988"
    assert record["peer"] == "0102"
