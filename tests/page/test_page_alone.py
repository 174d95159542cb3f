"""The page against a gateway whose mesh does what the test says: streams, keys, errors."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from services.gateway.front.auth import KeyRing, hash_key
from shared.errors import Overloaded, WorkerLost
from shared.telemetry.lifetime import Marks, receipt_of
from tests.support.scripted_mesh import ScriptedMesh, failing_after, saying
from tests.support.tiny_tokenizer import tiny_tokenizer

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
expect = playwright.expect

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

HOSTILE = (
    '<img src="https://elsewhere.invalid/x.png" onerror="document.title=1">'
    "<script>document.title='owned'</script>&lt;b&gt; **bold** \"quoted\"\n"
    "<style>*{display:none}</style>"
)
FAILED = "Failed to load resource"
"""What Chromium writes to the console of every answer that is not 2xx."""


LOOK_AWAY = """isHidden => {
  Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""

COUNT = "one two three four"
PER_BATCH = 4
WITHIN_MS = 30_000


def shown(num_batches: int) -> str:
    """What is to be seen of COUNT after so many batches."""
    tokenizer = tiny_tokenizer()
    return tokenizer.decode(tokenizer.encode(COUNT).ids[: num_batches * PER_BATCH])


async def none_runs(mesh: ScriptedMesh) -> None:
    async with asyncio.timeout(WITHIN_MS / 1000):
        await mesh.wait_running(0)


@pytest.mark.quick
async def test_an_answer_is_shown_as_it_comes(visit: Any, serve: Any) -> None:
    """Every batch of tokens is on the page before the next one exists."""
    gate = asyncio.Semaphore(0)
    mesh = ScriptedMesh(saying(COUNT, per_batch=PER_BATCH, gate=gate))
    tab = await visit(await serve(mesh))
    await tab.open()
    answer = await tab.send("Count!")
    await expect(answer).to_have_attribute("aria-busy", "true")
    await expect(tab.page.locator("#stop")).to_be_visible()
    await expect(tab.page.locator("#send")).to_be_hidden()
    for number in (1, 2, 3):
        gate.release()
        await expect(answer.locator(".text")).to_have_text(shown(number))
    assert shown(3) != COUNT
    for _ in range(3):
        gate.release()
    await tab.ended(answer)
    await expect(answer.locator(".text")).to_have_text(COUNT)
    await expect(tab.page.locator("#send")).to_be_visible()
    assert await tab.page.locator("#question").input_value() == ""


async def test_thinking_is_shown_until_the_answer_begins(visit: Any, serve: Any) -> None:
    """Then it is folded, to be opened again; what ended within it is not nothing."""
    gate = asyncio.Semaphore(0)
    mesh = ScriptedMesh(saying("<think>hm <i></think>four", per_batch=1, gate=gate))
    tab = await visit(await serve(mesh, reasoning_parser="think"))
    await tab.open()
    answer = await tab.send("What is two and two?")
    thought = answer.locator("details.thought")
    for _ in tiny_tokenizer().encode("<think>hm <i>").ids:
        gate.release()
    await expect(thought.locator("p")).to_contain_text("hm")
    await expect(thought).to_have_attribute("open", "")
    await tab.audit()
    for _ in range(100):
        gate.release()
    await tab.ended(answer)
    await expect(answer.locator(".text")).to_have_text("four")
    await expect(thought).not_to_have_attribute("open", "")
    await expect(thought.locator("p")).to_have_text("hm <i>")
    mesh.script = saying("<think>hm")
    answer = await tab.ask("And three?")
    await expect(answer.locator("details.thought")).to_have_attribute("open", "")
    await expect(answer.locator(".aside")).to_have_count(0)


async def test_html_in_question_and_answer_is_text(visit: Any, serve: Any) -> None:
    """Nothing that a model or a person writes becomes an element, a request or a script."""
    tab = await visit(await serve(ScriptedMesh(saying(HOSTILE))))
    await tab.open()
    answer = await tab.ask(HOSTILE)
    assert await answer.locator(".text").text_content() == HOSTILE
    assert await tab.page.locator(".turn.question .text").text_content() == HOSTILE
    assert await tab.page.locator(".turn img, .turn script, .turn style").count() == 0
    assert await tab.page.title() == "pdmesh"


async def test_stop_cancels_the_answer_in_the_mesh(visit: Any, serve: Any) -> None:
    """What came stays, is remembered, and nothing runs any more."""
    gate = asyncio.Semaphore(1)
    mesh = ScriptedMesh(saying(COUNT, per_batch=PER_BATCH, gate=gate))
    tab = await visit(await serve(mesh))
    await tab.open()
    answer = await tab.send("Count!")
    await expect(answer.locator(".text")).to_have_text(shown(1))
    await mesh.wait_running(1)
    await tab.page.click("#stop")
    await none_runs(mesh)
    await tab.ended(answer)
    await expect(answer.locator(".aside")).to_have_text("Stopped. The mesh has dropped the rest.")
    await expect(answer.locator(".text")).to_have_text(shown(1))
    mesh.script = saying("four")
    await tab.ask("Go on!")
    assert len(mesh.requests[1].token_ids) > len(mesh.requests[0].token_ids)


async def test_a_new_chat_stops_what_runs_and_forgets_the_old_one(visit: Any, serve: Any) -> None:
    """The next question is asked as the first one was."""
    mesh = ScriptedMesh(saying("one two", gate=asyncio.Semaphore(1)))
    tab = await visit(await serve(mesh))
    await tab.open()
    await tab.send("Count!")
    await mesh.wait_running(1)
    await tab.page.click("#reset")
    await none_runs(mesh)
    assert await tab.page.locator(".turn").count() == 0
    await expect(tab.page.locator("#welcome")).to_be_visible()
    mesh.script = saying("one two")
    await tab.ask("Count!")
    first, second = mesh.requests
    assert first.token_ids == second.token_ids


async def test_with_keys_the_page_asks_for_one_and_keeps_it_in_the_tab(
    visit: Any, serve: Any, tmp_path: Path
) -> None:
    """The page itself loads without a key; what it shows needs one; a wrong one is said to be."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    tab = await visit(await serve(ScriptedMesh(), KeyRing(path)))
    tab.expected.append(f"{FAILED}: the server responded with a status of 401")
    await tab.open("locked")
    page = tab.page
    dialog, reason = page.locator("#settings"), page.locator("#key-wanted")
    await expect(dialog).to_be_visible()
    await expect(reason).to_have_text("This gateway needs an API key.")
    await expect(page.locator("#api-key")).to_be_focused()
    await tab.audit()

    await page.fill("#api-key", "wrong")
    await page.press("#api-key", "Enter")
    await expect(reason).to_have_text("This key is not known to the gateway.")
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    answer = await tab.ask("hi")  # the chat asks for the key as well
    await expect(answer.locator("[role=alert]")).to_contain_text("401")
    await expect(dialog).to_be_visible()

    await page.fill("#api-key", "secret")
    await page.click("#settings-form button[type=submit]")
    await tab.status("ready")
    await answer.get_by_role("button", name="Ask again").click()
    await expect(page.locator(".turn.answer .text").last).to_have_text("hello and the end")
    assert await page.locator(".turn.answer").count() == 1
    kept = (
        "[Object.values(sessionStorage).includes('secret'), localStorage.length, document.cookie]"
    )
    assert await page.evaluate(kept) == [True, 0, ""]
    assert "secret" not in page.url

    other = await visit(tab.url)  # another tab knows nothing of it
    other.expected = tab.expected
    await other.open("locked")


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        (
            Overloaded("500 requests run and 10 wait", code="queue_full", retry_after_s=2.5),
            ["503 queue_full", "500 requests run and 10 wait.", "Try again in 3 seconds."],
        ),
        (
            WorkerLost("no pair of workers can take it", code="no_pair", retry_after_s=1.0),
            ["503 no_pair", "No pair of workers can take it.", "Try again in 1 second."],
        ),
    ],
)
async def test_a_refusal_is_readable_and_can_be_asked_again(
    visit: Any, serve: Any, error: Exception, texts: list[str]
) -> None:
    """Status, code, the gateway's own sentence and its hint; a failed turn is not remembered."""
    mesh = ScriptedMesh()
    mesh.refusal = error
    tab = await visit(await serve(mesh))
    tab.expected.append(FAILED)
    await tab.open()
    answer = await tab.ask("hi")
    alert = answer.locator("[role=alert]")
    said = (await alert.inner_text()).replace("\u00a0", " ")
    for text in texts:
        assert text in said
    await tab.audit()
    mesh.refusal = None
    await answer.get_by_role("button", name="Ask again").click()
    await expect(tab.page.locator(".turn.answer .text")).to_have_text("hello and the end")
    assert mesh.requests[0].token_ids == mesh.requests[1].token_ids


async def test_an_error_amid_an_answer_is_said_under_what_came(visit: Any, serve: Any) -> None:
    """A stream that has begun fails with a word of why; the model does not remember the torso."""
    mesh = ScriptedMesh(failing_after("half an", WorkerLost("the worker is gone", code="gone")))
    tab = await visit(await serve(mesh))
    await tab.open()
    answer = await tab.ask("hi")
    await expect(answer.locator(".text")).to_have_text("half an")
    await expect(answer.locator("[role=alert]")).to_contain_text("gone The worker is gone.")
    mesh.script = saying("whole")
    await tab.ask("hi")
    assert mesh.requests[0].token_ids == mesh.requests[1].token_ids


async def test_a_retried_answer_shows_what_the_retry_cost(visit: Any, serve: Any) -> None:
    """The lost attempt is a phase of its own; its transfer is told but has no place on the axis."""
    marks = Marks(
        arrived_at=0.0,
        admitted_at=0.001,
        dispatched_at=0.002,
        last_dispatched_at=0.502,
        first_token_at=0.602,
        second_token_at=0.652,
        last_token_at=0.702,
        ended_at=0.702,
        prefill_s=0.08,
    )
    receipt = receipt_of(
        marks,
        output_tokens=3,
        attempts=2,
        errors=("worker_lost",),
        transfer_bytes=3 << 20,
        transfer_s=0.05,
        lane="tcp",
        mode="layerwise",
    )
    mesh = ScriptedMesh()
    mesh.receipt = receipt.as_dict()
    tab = await visit(await serve(mesh))
    await tab.open()
    answer = await tab.ask("hi")
    kinds = "parts => parts.map(part => part.dataset.kind)"
    shown = await answer.locator("[data-row=ttft] .segment").evaluate_all(kinds)
    assert shown == ["queue", "route", "retry", "prefill", "handover"]
    retry = answer.locator(".segment[data-kind=retry]")
    await expect(retry).to_have_attribute(
        "data-words", re.compile("^retry: 500\u00a0ms, 83\u00a0%")
    )
    await expect(answer.locator("[data-row=transfer]")).to_have_count(0)
    await expect(answer.locator("[data-fact=transfer]")).to_contain_text("3.0\u00a0MiB")
    await expect(answer.locator("[data-fact=attempts] dd")).to_have_text("2 (worker_lost)")
    await tab.audit()


async def test_a_mesh_without_workers_says_why_it_is_not_ready(visit: Any, serve: Any) -> None:
    """The page works before the first worker does, and notices when it is there."""
    mesh = ScriptedMesh(model=None)
    model = ScriptedMesh().model
    tab = await visit(await serve(mesh))
    await tab.open("waiting")
    await expect(tab.page.locator("#alert")).to_have_text("Not ready: no worker has joined yet.")
    mesh.model, mesh.not_ready_reason = model, ""
    await tab.status("ready")
    await expect(tab.page.locator("#alert")).to_be_hidden()
    await expect(tab.page.locator("#model")).to_have_text("tiny")
    await expect(tab.page.locator("#demo-note")).to_be_hidden()


async def test_settings_go_with_every_request_and_survive_a_reload(visit: Any, serve: Any) -> None:
    """System prompt, temperature and the most tokens; what is empty is left to the model."""
    mesh = ScriptedMesh()
    tab = await visit(await serve(mesh))
    await tab.open()
    await tab.ask("hi")
    await tab.page.click("#open-settings")
    await tab.audit()
    await tab.page.fill("#system", "Be brief.")
    await tab.page.fill("#temperature", "0.5")
    await tab.page.fill("#max-tokens", "3")
    await tab.page.click("#settings-form button[type=submit]")
    await tab.page.reload()
    await tab.status("ready")
    answer = await tab.ask("hi")
    await expect(answer.locator(".aside")).to_contain_text("Cut off")
    plain, wanted = mesh.requests
    assert (plain.sampling.temperature, plain.sampling.max_tokens > 3) == (1.0, True)
    assert (wanted.sampling.temperature, wanted.sampling.max_tokens) == (0.5, 3)
    assert len(wanted.token_ids) > len(plain.token_ids)


async def test_the_cluster_is_asked_each_second_and_only_while_somebody_looks(
    visit: Any, serve: Any
) -> None:
    """A tab in the background asks nothing; back in front it asks at once."""
    tab = await visit(await serve(ScriptedMesh()))
    await tab.page.clock.install()
    await tab.open()

    async def next_ask() -> None:
        async with tab.page.expect_response("**/cluster"):
            await tab.page.clock.fast_forward(1000)

    await next_ask()
    await next_ask()
    num_asked = tab.paths.count("/cluster")
    await tab.page.evaluate(LOOK_AWAY, True)
    for _ in range(3):
        await tab.page.evaluate("fetch('health').then(answer => answer.text())")  # a round trip
        await tab.page.clock.fast_forward(60_000)
    assert tab.paths.count("/cluster") == num_asked
    async with tab.page.expect_response("**/cluster"):
        await tab.page.evaluate(LOOK_AWAY, False)


async def test_another_page_has_nothing_computed(visit: Any, serve: Any) -> None:
    """A browser sends a plain-text POST of a page from elsewhere, and it is refused."""
    mesh = ScriptedMesh()
    url, elsewhere = await serve(mesh), await serve(ScriptedMesh())  # two ports are two origins
    tab = await visit(url)
    tab.expected = [elsewhere, FAILED]
    await tab.page.goto(elsewhere + "/health")
    forge = """url => fetch(url, { method: "POST", mode: "no-cors",
      body: '{"messages": [{"role": "user", "content": "hi"}]}' }).then(answer => answer.type)"""
    assert await tab.page.evaluate(forge, url + "/v1/chat/completions") == "opaque"  # it was sent
    assert not mesh.requests
