"""What TLS costs a gateway: CPU of its process, under a Python client that is the same with and
without."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import aiohttp

from bench.gateway.subjects import MODEL, STEP_MS, Subject

STREAMS = 64
TOKENS = 128
CONNECTIONS = 200


def certificate_settings(folder: Path) -> dict[str, str]:
    """Make a certificate of the usual kind (ECDSA, P-256); return a gateway's settings for it."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-subj", "/CN=127.0.0.1", "-days", "2", "-keyout", str(key), "-out", str(cert)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return {"PDMESH_TLS_CERT": str(cert), "PDMESH_TLS_KEY": str(key)}


async def tls_figures(subject: Subject, scheme: str) -> dict[str, float]:
    """Return us of CPU: of a token of paced streams, of one flat out, and of a new connection with
    one small request."""
    url = f"{scheme}://127.0.0.1:{subject.port}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    figures: dict[str, float] = {}
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for is_paced, what in (
            (True, f"a token, {STREAMS} streams, a step every {STEP_MS} ms"),
            (False, f"a token, {STREAMS} streams, flat out"),
        ):
            subject.set_pace(is_paced=is_paced)
            await _answers(session, url, rounds=1)  # opens the connections
            rounds = 1 if is_paced else 8
            before = subject.cpu_s()
            num_tokens = await _answers(session, url, rounds=rounds)
            figures[what] = (subject.cpu_s() - before) / num_tokens * 1e6
    before = subject.cpu_s()
    for _ in range(CONNECTIONS):
        connector = aiohttp.TCPConnector(ssl=context)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"{url}/health") as response,
        ):
            assert response.status == 200
    spent_s = subject.cpu_s() - before
    figures["a new connection and a small request"] = spent_s / CONNECTIONS * 1e6
    return figures


async def _answers(session: aiohttp.ClientSession, url: str, *, rounds: int) -> int:
    """Stream STREAMS answers at once, so often; return how many tokens came."""

    async def one(number: int) -> int:
        body = {
            "model": MODEL, "prompt": "What was said in the meeting of last week?", "seed": number,
            "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with session.post(f"{url}/v1/completions", json=body) as response:
            text = await response.read()
        if f'"completion_tokens":{TOKENS}'.encode() not in text or b"[DONE]" not in text:
            raise RuntimeError(f"not a whole answer: {text[-300:]!r}")
        return TOKENS

    num_tokens = 0
    for _ in range(rounds):
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(number)) for number in range(STREAMS)]
        num_tokens += sum(task.result() for task in running)
    return num_tokens
