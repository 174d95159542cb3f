"""What a request's log line takes of the gateway's loop, without a request.

The call that writes it (``services/gateway/front/calls.py``), with the receipt of one answer, into
a file. A thread writes what has gathered, in other time than this.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.gateway.front import calls
from shared import log
from shared.ids import RequestId
from shared.telemetry.lifetime import Marks, receipt_of

LINES = 100
"""Of a window; they are in the file before the next."""


def line_us(file: Path, num_windows: int) -> list[float]:
    """CPU time of this thread for a line, in each of some windows."""
    marks = Marks(0.0, 0.001, 0.002, 0.002, 0.25, 0.26, 1.5, 1.5, 0.05, 0.18)
    workers = {"prefill": f"{1 << 60:016x}", "decode": f"{1 << 61:016x}"}
    receipt = receipt_of(marks, output_tokens=128, attempts=1, prompt_tokens=512, **workers)
    answers: Any = SimpleNamespace(
        usage=SimpleNamespace(prompt_tokens=512, completion_tokens=128),
        receipts=lambda: [receipt.as_dict()],
    )
    caller: Any = SimpleNamespace(
        request_id=RequestId(bytes(16)),
        label="",
        key=SimpleNamespace(name="anybody"),
        span=SimpleNamespace(context=""),
    )
    call = calls.Call(caller, outcome="ok", status=200, answers=answers, first_token_s=0.25)
    found: list[float] = []
    with file.open("w") as stream:
        log.configure_logs(service="gateway", form="json", stream=stream)
        often = log._often
        assert often is not None
        for _ in range(num_windows + 1):
            began_at = time.thread_time()
            for _ in range(LINES):
                calls._log("/v1/chat/completions", call, 1.5)
            found.append((time.thread_time() - began_at) / LINES * 1e6)
            often._out.drain()
    if len(file.read_text().splitlines()) != LINES * len(found):
        raise RuntimeError("not every line was written")
    return found[1:]
