"""Pages of other origins: what a browser is told."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from services.gateway.front.auth import KeyRing
from tests.support.http_client import HI
from tests.support.scripted_mesh import ScriptedMesh, http_gateway

PAGE = "https://chat.example.org"
CHAT = "/v1/chat/completions"


async def asked(
    origins: set[str], method: str, path: str, origin: str, **options: Any
) -> tuple[int, dict[str, str]]:
    """Status and what the answer says to a browser that shows a page of ``origin``."""
    headers = {"Origin": origin, **options.pop("headers", {})}
    keys = options.pop("keys", None)
    async with (
        http_gateway(ScriptedMesh(), keys, origins=frozenset(origins)) as url,
        aiohttp.ClientSession() as session,
        session.request(method, url + path, headers=headers, **options) as response,
    ):
        await response.read()
        said = {name.lower(): value for name, value in response.headers.items()}
        return response.status, {
            name.removeprefix("access-control-"): value
            for name, value in said.items()
            if name.startswith("access-control-")
        }


@pytest.mark.parametrize("origins", [{PAGE}, {"https://other.org", PAGE}, {"*"}])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_allowed_page_may_read_answers_streams_and_errors(
    origins: set[str], is_stream: bool
) -> None:
    """Its origin is named, and our headers may be read."""
    for body, due in (({"messages": HI, "stream": is_stream}, 200), ({}, 400)):
        status, said = await asked(origins, "POST", CHAT, PAGE, json=body)
        assert status == due
        assert said["allow-origin"] == PAGE
        assert "x-request-id" in said["expose-headers"]


async def test_a_browser_that_asks_beforehand_is_told_what_it_may_send() -> None:
    """Without a key, for it cannot send one yet; and every header, for clients bring their own."""
    names = "authorization,x-api-key,anthropic-version,content-type,x-stainless-lang"
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
    status, said = await asked({PAGE}, "OPTIONS", CHAT, PAGE, headers=ask)
    assert status == 204
    assert said["allow-origin"] == PAGE
    assert "POST" in said["allow-methods"]
    assert said["allow-headers"] == names


@pytest.mark.parametrize("origins", [set[str](), {"https://other.org"}])
async def test_other_pages_are_told_nothing(origins: set[str]) -> None:
    """By default none may; an allowed one does not open the door to another."""
    status, said = await asked(origins, "GET", "/v1/models", PAGE)
    assert (status, said) == (200, {})
    ask = {"Access-Control-Request-Method": "POST"}
    status, said = await asked(origins, "OPTIONS", CHAT, PAGE, headers=ask)
    assert (status, said) == (405, {})


FORGED = {"Content-Type": "text/plain"}  # for which a browser does not ask beforehand
CROSS, SAME_SITE, SAME, TYPED = (
    {"Sec-Fetch-Site": site} for site in ("cross-site", "same-site", "same-origin", "none")
)


@pytest.mark.parametrize(
    "headers", [{}, CROSS, SAME_SITE, {"Origin": "null"}, {"Origin": "http://["}]
)
@pytest.mark.parametrize("path", [CHAT, "/cluster/workers/w/role"])
async def test_another_page_cannot_ask_in_its_visitors_name(
    headers: dict[str, str], path: str
) -> None:
    """A gateway without keys on the visitor's machine computes nothing and moves no role for it."""
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    status, _ = await asked(set(), "POST", path, PAGE, data=body, headers=FORGED | headers)
    assert status == 403


@pytest.mark.parametrize("headers", [SAME, TYPED])
async def test_our_own_page_may_ask_behind_a_proxy_that_names_another_host(
    headers: dict[str, str],
) -> None:
    """A browser's word counts before the Host that arrives."""
    status, _ = await asked(set(), "POST", CHAT, PAGE, json={"messages": HI}, headers=headers)
    assert status == 200


async def test_without_a_browsers_word_the_host_decides() -> None:
    """An old browser, or plain HTTP to another machine."""
    ours = {"Host": "mesh.internal:8000", "Authorization": "Bearer k"}
    for origin, due in (("http://mesh.internal:8000", 200), ("http://mesh.internal", 403)):
        status, _ = await asked(
            *(set(), "POST", CHAT, origin),
            **{"json": {"messages": HI}, "headers": ours, "keys": KeyRing(plain_key="k")},
        )
        assert status == due


@pytest.mark.parametrize("headers", [{}, SAME])
@pytest.mark.parametrize(
    ("host", "origins", "due"),
    [
        ("evil.example:8000", set[str](), 403),
        ("localhost.evil.example", set[str](), 403),
        ("127.0.0.1.evil.example:8000", set[str](), 403),
        ("mesh.internal:8000", {"http://mesh.internal:8000"}, 200),
        *((host, set[str](), 200) for host in ("127.0.0.1:8000", "[::1]:8000", "localhost")),
        ("pdmesh.localhost:8000", set[str](), 200),
    ],
)
async def test_a_page_whose_name_was_let_point_here_cannot_ask(
    host: str, origins: set[str], due: int, headers: dict[str, str]
) -> None:
    """DNS rebinding: its origin is then this gateway's, which listens on loopback without keys."""
    status, _ = await asked(
        *(origins, "POST", CHAT, f"http://{host}"),
        **{"json": {"messages": HI}, "headers": {"Host": host, **headers}},
    )
    assert status == due


async def test_what_is_no_browser_may_call_this_machine_what_it_likes() -> None:
    """A proxy on the same machine hands on the name that its clients used."""
    async with http_gateway(ScriptedMesh()) as url, aiohttp.ClientSession() as session:
        body, headers = {"messages": HI}, {"Host": "chat.example.org"}
        async with session.post(url + CHAT, json=body, headers=headers) as response:
            assert response.status == 200
