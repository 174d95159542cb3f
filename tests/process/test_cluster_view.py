"""GET /cluster tells the truth about a real mesh after known traffic: processes, TCP and UCX."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import aiohttp
import pytest

from tests.support.process_mesh import ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx]

NUM_BLOCKS = 256
BLOCK_SIZE = 16


async def view_of(gateway: ServiceProcess) -> dict[str, Any]:
    url = f"http://127.0.0.1:{gateway.facts['http_port']}/cluster"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        return await response.json()


async def view_when(mesh: ProcessMesh, gateway: ServiceProcess, condition: Any) -> dict[str, Any]:
    """Look until the view is as wanted: what workers report lags by a heartbeat."""
    view: dict[str, Any] = {}

    async def is_so() -> bool:
        nonlocal view
        view = await view_of(gateway)
        return condition(view)

    try:
        await mesh.until(is_so)
    except TimeoutError:
        raise AssertionError(f"the view is {view}") from None
    return view


def states(view: dict[str, Any]) -> list[tuple[str, str]]:
    return [(worker["role"], worker["state"]) for worker in view["workers"]]


async def test_counts_are_exact_and_workers_that_left_are_gone() -> None:
    """Answers, tokens, transfers and blocks equal what was asked and what the receipts say."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            empty = await view_of(gateway)
            assert (empty["ready"], empty["model"], empty["workers"]) == (False, None, [])
            assert empty["not_ready_reason"]

            prefill = await mesh.add("prefill", num_blocks=NUM_BLOCKS, fake_step_s=0.005)
            decodes = [
                await mesh.add("decode", num_blocks=NUM_BLOCKS, fake_step_s=0.005) for _ in "ab"
            ]
            await mesh.paired(gateway, 2)
            view = await view_of(gateway)
            assert (view["ready"], view["model"]["id"]) == (True, "fake")
            assert states(view) == [("prefill", "usable"), *[("decode", "usable")] * 2]
            ids = [worker["incarnation"] for worker in view["workers"]]
            assert view["workers"][0]["paired"] == sorted(ids[1:])
            assert view["window"]["requests"] == 0
            assert view["window"]["ttft_s"] is None

            prompts = [a_prompt(20 + 10 * number, start=number) for number in range(8)]
            answers = [await mesh.ask(gateway, prompt, 12) for prompt in prompts]
            for answer in answers:
                answer.require_whole(12)
            refused = await mesh.ask(gateway, a_prompt(4000), 12)
            assert refused.status == 400  # never came to the mesh

            view = await view_when(
                mesh,
                gateway,
                lambda view: all(w["blocks"]["free"] == NUM_BLOCKS for w in view["workers"]),
            )
            window, receipts = view["window"], [answer.receipt for answer in answers]
            assert (window["requests"], window["failed"]) == (8, 0)
            assert window["output_tokens"] == 8 * 12
            assert window["prompt_tokens"] == sum(len(prompt) for prompt in prompts)
            assert sum(window["output_tokens_each_s"]) <= 8 * 12
            ttfts = sorted(receipt["ttft_s"] for receipt in receipts)
            assert window["ttft_s"]["p50"] == pytest.approx(ttfts[3], rel=0.03)
            assert window["ttft_s"]["p99"] == pytest.approx(ttfts[7], rel=0.03)
            assert 0 < window["itl_s"]["p50"] <= window["itl_s"]["p99"]
            assert view["gateway"]["running"] == view["gateway"]["queued"] == 0

            for transfers in view["transfers"]:
                pair = (transfers["prefill"], transfers["decode"], transfers["lane"])
                own = [r for r in receipts if (r["prefill"], r["decode"], r["lane"]) == pair]
                assert transfers["count"] == len(own)
                assert transfers["bytes"] == sum(receipt["transfer_bytes"] for receipt in own)
                rates = [receipt["gb_per_s"] for receipt in own]
                # Receipts round to 1e-6 GB/s, which is coarse for the fake engine's few bytes.
                assert min(rates) * 0.97 - 1e-6 <= transfers["gb_per_s"]["p50"]
                assert transfers["gb_per_s"]["p50"] <= max(rates) * 1.03 + 1e-6
            assert sum(transfers["count"] for transfers in view["transfers"]) == 8
            assert {transfers["prefill"] for transfers in view["transfers"]} == {ids[0]}
            assert view["transfers"][0]["lane"]
            for worker in view["workers"]:
                blocks = worker["blocks"]
                assert blocks["total"] == NUM_BLOCKS
                assert blocks["reserved"] == blocks["quarantined"] == 0

            decodes[0].send(signal.SIGKILL)
            view = await view_when(mesh, gateway, lambda view: len(view["workers"]) == 2)
            assert states(view) == [("prefill", "usable"), ("decode", "usable")]
            assert view["ready"]
            prefill.send(signal.SIGTERM)
            view = await view_when(mesh, gateway, lambda view: len(view["workers"]) == 1)
            assert (view["ready"], view["not_ready_reason"]) == (
                False,
                "no prefill worker has joined",
            )


async def test_a_running_answer_shows_while_it_runs() -> None:
    """Requests, blocks and tokens of an answer that is not over; after the client left, none."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            await mesh.add("prefill", num_blocks=NUM_BLOCKS)
            decode = await mesh.add("decode", num_blocks=NUM_BLOCKS, fake_step_s=0.01)
            await mesh.paired(gateway, 1)
            prompt = a_prompt(64)
            async with asyncio.TaskGroup() as tasks:
                client = tasks.create_task(mesh.ask(gateway, prompt, 1500))
                view = await view_when(
                    mesh,
                    gateway,
                    lambda view: (
                        view["workers"][-1]["running"] == 1 and view["window"]["output_tokens"] > 3
                    ),
                )
                assert view["gateway"]["running"] == 1
                assert view["window"]["requests"] == 0
                assert view["window"]["prompt_tokens"] == 64
                blocks = view["workers"][-1]["blocks"]
                assert blocks["reserved"] > 64 // BLOCK_SIZE
                assert blocks["free"] + blocks["reserved"] == NUM_BLOCKS
                client.cancel()
            view = await view_when(mesh, gateway, lambda view: view["gateway"]["running"] == 0)
            assert (view["window"]["requests"], view["window"]["failed"]) == (1, 0)

            # A pair that dies fails its answer, and that is counted.
            async with asyncio.TaskGroup() as tasks:
                doomed = tasks.create_task(mesh.ask(gateway, prompt, 1500))
                await view_when(mesh, gateway, lambda view: view["gateway"]["running"] == 1)
                decode.send(signal.SIGKILL)
            doomed.result().require_one_error()
            view = await view_when(mesh, gateway, lambda view: view["window"]["requests"] == 2)
            assert view["window"]["failed"] == 1
