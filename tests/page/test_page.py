"""The page against `pdmesh up` with the bundled model: a chat, its receipts, and the cluster."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest
import pytest_asyncio

from shared.telemetry.lifetime import TTFT_PHASES

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
expect = playwright.expect

pytestmark = [
    pytest.mark.browser,
    pytest.mark.process,
    pytest.mark.ucx,
    pytest.mark.torch,
    pytest.mark.asyncio(loop_scope="module"),
]

RECALL = (
    "The code of the red door is 4821. The cat sleeps in the garden. The code of the blue box is "
    "1111. What is the code of the red door?"
)


GREEDY = """
sessionStorage.getItem("pdmesh.settings") ??
  sessionStorage.setItem("pdmesh.settings", JSON.stringify({temperature: "0"}));
"""
"""As a visitor would set it. At the default temperature of 1 about one answer in 500 is another."""

KEEP_ANSWERS = """
const ask = window.fetch;
window.fetch = async (path, options) => {
  const response = await ask(path, options);
  if (path.endsWith("completions")) {
    const id = response.headers.get("x-request-id");
    window.lastAnswer = response.clone().text().then((text) => [id, text]);
  }
  return response;
};
"""


@pytest_asyncio.fixture(loop_scope="module")
async def visit(visit: Any) -> Any:
    """Open tabs that ask for the likeliest answer."""

    async def open_tab(url: str, **options: Any) -> Any:
        tab = await visit(url, **options)
        await tab.page.add_init_script(GREEDY)
        return tab

    return open_tab


async def segments(answer: Any, row: str) -> dict[str, float]:
    """The seconds of each segment of a row, by kind."""
    read = "parts => parts.map(part => [part.dataset.kind, Number(part.dataset.seconds)])"
    found = answer.locator(f"[data-row={row}] .segment")
    return dict(await found.evaluate_all(read))


def receipt_in(stream: str) -> dict[str, Any]:
    """The receipt that the event stream carried."""
    events = [
        json.loads(event[6:]) for event in stream.split("\n\n") if event.startswith("data: {")
    ]
    return next(event["receipt"] for event in events if "receipt" in event)


async def test_an_answer_comes_with_a_receipt_that_adds_up(visit: Any, running_up: Any) -> None:
    """The phases drawn are those of the receipt that the API sent, and add up to TTFT."""
    tab = await visit(running_up.url)
    await tab.page.add_init_script(KEEP_ANSWERS)
    await tab.open()
    answer = await tab.ask(RECALL)
    await expect(answer.locator(".text")).to_have_text("The code of the red door is 4821.")
    request_id, stream = await tab.page.evaluate("lastAnswer")
    receipt = receipt_in(stream)
    phases = await segments(answer, "ttft")
    assert list(phases.values()) == [receipt[name] for name in TTFT_PHASES if receipt[name] > 0]
    assert sum(phases.values()) == pytest.approx(receipt["ttft_s"], abs=5e-6)
    whole = await segments(answer, "answer")
    assert sum(whole.values()) == pytest.approx(receipt["e2e_s"], abs=1e-9)
    assert whole["first"] == receipt["ttft_s"]
    facts = dict(
        await answer.locator(".facts > div").evaluate_all(
            "parts => parts.map(part => [part.dataset.fact, part.querySelector('dd').textContent])"
        )
    )
    facts = {name: text.replace("\u00a0", " ") for name, text in facts.items()}
    assert facts["request"] == request_id
    await answer.locator(".why button").click()
    taken = answer.locator(".why tr[data-taken=true]")
    await expect(taken).to_have_count(2)
    # One pair, and a chosen score of each side; the prompt's is a sum.
    prefill = taken.first.locator("td")
    await expect(prefill.nth(2)).to_have_text(re.compile(r"[\d.]+"))
    await expect(prefill.nth(3)).to_have_text(re.compile(r"wait.* \+ compute"))
    await expect(answer.locator(".why")).to_contain_text("policy conductor")
    await expect(answer.locator(".why")).to_contain_text("Expected: queue")
    names = {role: f"{role} {receipt[role][:6]}" for role in ("prefill", "decode")}
    assert facts["workers"] == (
        f"{names['prefill']} ({receipt['prefill_pool']} pool) → "
        f"{names['decode']} ({receipt['decode_pool']} pool)"
    )
    assert facts["attempts"] == "1"
    num_tokens, _, speed = facts["answer"].partition(", ")
    assert num_tokens == f"{receipt['output_tokens']} tokens"
    assert bool(speed) == bool(receipt["tpot_s"])  # no speed if all came in one instant
    assert re.match(r"\d+ tokens(, none cached|; cached: (prefill|decode) \d+)", facts["prompt"])
    if receipt["transfer_bytes"]:
        assert f"{receipt['transfer_bytes'] / 1024:.0f} KiB" in facts["transfer"]
        assert receipt["lane"] in facts["transfer"]
        moved = await segments(answer, "transfer")
        assert moved == {"transfer": receipt["transfer_s"]}


async def test_a_receipt_is_read_with_the_keyboard(visit: Any, running_up: Any) -> None:
    """The chart is one tab stop; arrows walk its phases, and each is said in words."""
    tab = await visit(running_up.url)
    await tab.open()
    answer = await tab.ask(RECALL)
    chart, readout = answer.locator(".chart"), answer.locator(".readout")
    await expect(readout).to_contain_text("First token after")
    assert await chart.locator("[tabindex='0']").count() == 1
    first = chart.locator(".segment").first
    await first.focus()
    await expect(readout).to_have_text(await first.get_attribute("aria-label") or "?")
    await tab.page.keyboard.press("ArrowRight")
    second = chart.locator(".segment").nth(1)
    await expect(second).to_be_focused()
    await expect(readout).to_have_text(await second.get_attribute("aria-label") or "?")
    assert await chart.locator("[tabindex='0']").count() == 1
    await tab.page.locator("#question").focus()
    await expect(readout).to_contain_text("First token after")


async def test_a_conversation_remembers_its_turns(visit: Any, running_up: Any) -> None:
    """The second question is answered from the first one; a new chat does not know it. What this
    model cannot do is said beforehand."""
    tab = await visit(running_up.url)
    await tab.open()
    await expect(tab.page.locator("#demo-note")).to_contain_text("All else is nonsense")
    await tab.ask(RECALL)
    answer = await tab.ask("What is the code of the blue box?")
    await expect(answer.locator(".text")).to_have_text("The code of the blue box is 1111.")
    await expect(answer.locator(".receipt")).to_be_visible()
    assert await tab.page.locator(".receipt").count() == 2


async def test_the_cluster_shows_what_the_api_tells(visit: Any, running_up: Any) -> None:
    """Both kinds of workers with their blocks, the transfers, and the percentiles."""
    tab = await visit(running_up.url)
    await tab.open()
    await tab.ask("What is 17 + 25? The code of the old tower is 7350.")
    page = tab.page
    await expect(page.locator(".worker[data-role=prefill]")).to_have_count(1)
    await expect(page.locator(".worker[data-role=decode]")).to_have_count(2)
    await expect(page.locator(".state[data-state=usable]")).to_have_count(3)
    await expect(page.locator("#ttft")).to_have_text(re.compile(r"^[\d.]+\u00a0m?s$"))
    await expect(page.locator("#ttft-more")).to_have_text(
        re.compile(r"^p90\u00a0[\d.]+\u00a0m?s · p99")
    )
    await expect(page.locator("#transfers tr").first).to_be_visible()
    await expect(page.locator("#running")).to_have_text("0")
    view = await page.evaluate("fetch('cluster').then(answer => answer.json())")
    for worker in view["workers"]:
        shown = page.locator(f".worker[data-key='{worker['incarnation']}']")
        await expect(shown.locator(".address")).to_have_text(worker["address"])
        await expect(shown.locator("[data-part=room]")).to_have_text("0 / 256 blocks")
        await expect(shown.locator(".blocks")).to_have_attribute(
            "aria-label", "KV blocks: 256 free or only cached, of 256"
        )
    assert await page.locator("#prefixes tr").count() == len(view["hot_prefixes"])
    assert {row["lane"] for row in view["transfers"]}
    assert await page.locator("#transfers tr").count() == len(view["transfers"])


async def test_a_killed_gateway_is_said_to_be_gone_until_it_is_back(
    visit: Any, running_up: Any
) -> None:
    """The page says that nothing answers, keeps what it knew, and comes back by itself."""
    tab = await visit(running_up.url)
    tab.expected.append("net::ERR_")
    await tab.open()
    number = await tab.page.locator(".worker").count()
    # `pdmesh up` restarts it within a second; stopped first, the page cannot miss that it is gone.
    pid = running_up.gateway_pid()
    os.kill(pid, signal.SIGSTOP)
    await tab.status("unreachable")
    alert = tab.page.locator("#alert")
    await expect(alert).to_contain_text("Gateway unreachable")
    assert await tab.page.locator(".worker").count() == number
    await tab.audit()
    os.kill(pid, signal.SIGKILL)
    await tab.status("ready")
    await expect(alert).to_be_hidden()
    answer = await tab.ask(RECALL)
    await expect(answer.locator(".text")).to_have_text("The code of the red door is 4821.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_names_roles_and_contrast(visit: Any, running_up: Any, scheme: str) -> None:
    """Everything that can be used has a name, and all text has AA contrast, in light and dark."""
    tab = await visit(running_up.url, color_scheme=scheme)
    await tab.open()
    await tab.audit()
    await tab.ask(RECALL)
    await tab.audit()


async def test_a_phone_shows_all_of_it_without_scrolling_sideways(
    visit: Any, running_up: Any
) -> None:
    """360 pixels are enough for chat, receipt and cluster."""
    tab = await visit(running_up.url, viewport={"width": 360, "height": 740}, has_touch=True)
    await tab.open()
    answer = await tab.ask(RECALL)
    await expect(answer.locator(".receipt")).to_be_visible()
    for place in ("#chat", "#cluster"):
        await tab.page.click(f"nav a[href='{place}']")
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await tab.page.evaluate(wide) == 0
    await expect(tab.page.locator("#cluster-title")).to_be_in_viewport()
