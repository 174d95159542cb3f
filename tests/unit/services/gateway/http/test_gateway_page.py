"""The page's files: who may have them, with which headers, and what they may not contain."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from services.gateway.front.auth import KeyRing, hash_key
from services.gateway.http.page_files import page_routes
from services.gateway.http.server import Policy
from tests.support.scripted_mesh import ScriptedMesh, http_gateway

FOLDER = resources.files("services.gateway.http") / "page"
FILES = {entry.name: entry.read_text("utf-8") for entry in FOLDER.iterdir()}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def test_the_page_is_for_everybody_and_nothing_else_is_in_its_table() -> None:
    """``/`` and the files that lie in the folder, each by its own route: no path is looked up."""
    routes = page_routes()
    names = {"/" if name == "index.html" else f"/page/{name}" for name in FILES}
    assert {route.path for route in routes} == names
    assert {(route.method, route.policy) for route in routes} == {("GET", Policy.ANYBODY)}


async def test_every_file_is_served_with_its_type_and_the_policy(tmp_path: Path) -> None:
    """Without a key, even where keys are needed; and no other file is."""
    keys = tmp_path / "keys"
    keys.write_text(hash_key("alice", "secret"))
    async with (
        http_gateway(ScriptedMesh(), KeyRing(keys)) as url,
        aiohttp.ClientSession() as session,
    ):
        for name, text in FILES.items():
            path = "/" if name == "index.html" else f"/page/{name}"
            async with session.get(url + path) as response:
                assert response.status == 200
                assert await response.text() == text
                headers = response.headers
            assert headers["Content-Type"] == TYPES[name.rpartition(".")[2]]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
        for path in ("/page/", "/page/nothing.js", "/page/../auth.py", "/page/%2e%2e/auth.py"):
            async with session.get(URL(url + path, encoded=True)) as response:
                assert response.status == 404


async def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    """The tag is of the content; a browser always asks whether it still holds."""
    async with http_gateway(ScriptedMesh()) as url, aiohttp.ClientSession() as session:

        async def get(path: str, **headers: str) -> Any:
            async with session.get(url + path, headers=headers) as response:
                return response.status, response.headers, await response.read()

        status, headers, body = await get("/page/main.js")
        assert (status, headers["Cache-Control"]) == (200, "no-cache")
        tag = headers["ETag"]
        status, headers, again = await get("/page/main.js", **{"If-None-Match": tag})
        assert (status, again, headers["ETag"]) == (304, b"", tag)
        status, _, again = await get("/page/main.js", **{"If-None-Match": '"another"'})
        assert (status, again) == (200, body)
        assert (await get("/page/frame.css"))[1]["ETag"] != tag


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_reaches_out_or_makes_html_of_text(name: str) -> None:
    """No address of elsewhere, no inline script or style, no way from text to elements."""
    text = FILES[name].replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|//[a-z0-9.-]+\.[a-z]{2,}/", text)
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in text
    if name.endswith(".html"):
        assert not re.search(r"\son[a-z]+\s*=|\sstyle\s*=|<style|javascript:", text)
        assert re.findall(r"<script[^>]*>([^<]*)</script>", text) == [""]


def test_every_file_is_used_and_every_file_used_is_there() -> None:
    """What the page names lies in its folder, and nothing else does."""
    used = {"index.html", *re.findall(r'(?:href|src)="page/([\w.]+)"', FILES["index.html"])}
    for text in FILES.values():
        used |= set(re.findall(r'from "\./([\w.]+)"', text))
    assert used == set(FILES)


def test_every_id_that_a_script_asks_for_is_in_the_page() -> None:
    """A renamed element would otherwise be noticed by a visitor."""
    ids = set(re.findall(r'\sid="([\w-]+)"', FILES["index.html"]))
    for name, text in FILES.items():
        if name.endswith(".js"):
            asked = set(re.findall(r'byId\("([\w-]+)"\)', text))
            assert asked <= ids, name
