"""Makes the pictures in docs/images from a mesh that really runs, under real traffic.

``python tools/screenshots.py`` needs playwright and a Chromium (PDMESH_CHROMIUM, or one of its
usual names). It starts `pdmesh up` with the bundled model, keeps a few clients asking, has a
conversation on the page in light, in dark and on a phone, and draws one frame of `pdmesh top`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import struct
import sys
import zlib
from collections.abc import AsyncGenerator
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
from playwright.async_api import async_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from services.cli.top_view import frame  # noqa: E402
from tools.demo_model.data import recall_prompt  # noqa: E402

FOLDER = ROOT / "docs" / "images"
MAX_BYTES = 200_000
START_WITHIN_S = 120.0
ANSWERS_WITHIN_MS = 60_000
NUM_CLIENTS = 3
LOOKED_AT_S = 45.0
"""Traffic before the first picture, so that a minute's view has something to show."""

UP = (
    *(sys.executable, "-m", "services.cli", "up", "--device", "cpu"),
    *(
        "--port",
        "0",
        "--prefill",
        "2",
        "--decode",
        "2",
        "--num-blocks",
        "256",
        "--block-size",
        "16",
    ),
)
FIRST = (
    "The code of the red door is 4821. The cat sleeps in the garden. The code of the blue box is "
    "1111. The code of the old tower is 7350. What is the code of the red door?"
)
SECOND = "What is the code of the old tower?"

DESKTOP = {"viewport": {"width": 1280, "height": 1020}}
PICTURES: dict[str, dict[str, Any]] = {
    "page-light": {**DESKTOP, "color_scheme": "light"},
    "page-dark": {**DESKTOP, "color_scheme": "dark"},
    "page-phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "color_scheme": "light",
        "has_touch": True,
    },
}


@contextlib.asynccontextmanager
async def running_mesh() -> AsyncGenerator[str]:
    """Run `pdmesh up`; gives its URL. Raises RuntimeError: it did not start."""
    up = await asyncio.create_subprocess_exec(
        *UP, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert up.stdout is not None
    try:
        async with asyncio.TaskGroup() as tasks:
            async with asyncio.timeout(START_WITHIN_S):
                async for line in up.stdout:
                    if found := re.match(rb"ready: (http://\S+)/ ", line):
                        break
                else:
                    raise RuntimeError("pdmesh up ended before it was ready")
            drain = tasks.create_task(up.stdout.read())
            yield found[1].decode()
            drain.cancel()
    finally:
        up.terminate()
        await up.wait()


async def keep_asking(url: str, number: int) -> None:
    """Be one client for ever: questions of all lengths, with pauses."""
    source = random.Random(number)
    async with aiohttp.ClientSession() as session:
        while True:
            seed = source.randrange(1_000_000)
            prompt = recall_prompt(seed=seed, num_facts=6, approx_tokens=source.choice([200, 600]))
            body = {"prompt": prompt.text, "max_tokens": 200, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.read()
            await asyncio.sleep(source.uniform(0.2, 1.5))


async def picture(browser: Any, url: str, options: dict[str, Any]) -> bytes:
    """Have a conversation and take the picture while other answers run; returns the PNG."""
    context = await browser.new_context(**options)
    context.set_default_timeout(ANSWERS_WITHIN_MS)
    page = await context.new_page()
    await page.goto(url)
    await page.locator("#status[data-state=ready]").wait_for()
    for number, question in enumerate((FIRST, SECOND)):
        await page.fill("#question", question)
        await page.press("#question", "Enter")
        await page.locator(".receipt").nth(number).wait_for()
    await page.locator("#running", has_text=re.compile("[2-9]")).wait_for()
    png = await page.screenshot()
    await context.close()
    return png


def save(name: str, content: bytes) -> None:
    """Write a picture. Raises RuntimeError: it is too large for a repository."""
    path = FOLDER / name
    path.write_bytes(content)
    print(f"{path.relative_to(ROOT)}: {len(content):,} bytes")
    if len(content) > MAX_BYTES:
        raise RuntimeError(f"{name} is larger than {MAX_BYTES:,} bytes")


def repacked(png: bytes) -> bytes:
    """Return the same picture a fifth smaller: the filters that Chromium gives its rows suit
    photographs, and text packs better without."""
    header, packed, place = png[:33], b"", 33
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        if png[place + 4 : place + 8] == b"IDAT":
            packed += png[place + 8 : place + 8 + length]
        place += length + 12
    width, height, depth, kind = struct.unpack_from(">IIBB", header, 16)
    if (depth, kind) != (8, 2):
        raise RuntimeError("the screenshot is not 8-bit RGB")
    data, row_bytes = zlib.decompress(packed), 3 * width
    rows: list[bytes] = []
    above = bytearray(row_bytes)
    for start in range(0, height * (row_bytes + 1), row_bytes + 1):
        row = bytearray(data[start + 1 : start + 1 + row_bytes])
        for i in range(row_bytes):
            left, corner = (row[i - 3], above[i - 3]) if i >= 3 else (0, 0)
            row[i] = (row[i] + _predicted(data[start], left, above[i], corner)) & 0xFF
        rows.append(b"\0" + row)
        above = row
    body = b"IDAT" + zlib.compress(b"".join(rows), 9)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return header + chunk + png[-12:]


def _predicted(kind: int, left: int, above: int, corner: int) -> int:
    """Return what a row filter of the PNG format expects."""
    if kind == 4:
        return min((left, above, corner), key=lambda value: abs(left + above - corner - value))
    return (0, left, above, (left + above) // 2)[kind]


async def draw_top(url: str) -> bytes:
    """Return one frame of `pdmesh top` as SVG, without the web font that rich would fetch."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/cluster") as response:
                view = await response.json()
            if view["gateway"]["running"] > 1:
                break
            await asyncio.sleep(0.05)
    console = Console(
        record=True, width=128, file=StringIO(), force_terminal=True, legacy_windows=False
    )
    console.print(frame(url, view))
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("font-family: Fira Code, monospace", "font-family: monospace")
    return console.export_svg(title="pdmesh top", code_format=form, unique_id="top").encode()


async def main() -> None:
    """Make all pictures."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    chromium = os.environ.get("PDMESH_CHROMIUM") or next(
        filter(None, map(shutil.which, names)), None
    )
    if chromium is None:
        sys.exit("no Chromium: apt-get install chromium, or set PDMESH_CHROMIUM")
    FOLDER.mkdir(parents=True, exist_ok=True)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with running_mesh() as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=arguments)
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(keep_asking(url, n)) for n in range(NUM_CLIENTS)]
            print(f"{url}: {LOOKED_AT_S:g} s of traffic first")
            await asyncio.sleep(LOOKED_AT_S)
            taken = {
                name: await picture(browser, url, options) for name, options in PICTURES.items()
            }
            frame_of_top = await draw_top(url)
            for client in clients:
                client.cancel()
        await browser.close()
    for name, png in taken.items():
        save(f"{name}.png", repacked(png))
    save("top.svg", frame_of_top)


if __name__ == "__main__":
    asyncio.run(main())
