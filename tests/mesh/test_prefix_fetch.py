"""Prefixes that another worker has are fetched from its cache, by the ordinary transfer, or
computed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import wire
from shared.address import Address
from shared.ids import MeshPeer
from shared.transfer.machine import Machine, SenderState
from shared.worker.core.lease import Lease, LeaseEvent
from tests.support.fake_gateway import FakeRequest
from tests.support.loopback import LoopbackSettings
from tests.support.tiers import few
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import RunningWorker, WorkerMesh, a_prompt, expected, worker_mesh

TWO: dict[str, Any] = {"num_prefill": 2, "prefill_blocks": 128, "decode_blocks": 256}
PROMPT = a_prompt(512, seed=1)


def source(of: RunningWorker, num_tokens: int, wait_s: float = 5.0) -> wire.PrefixSource:
    return wire.PrefixSource(incarnation=of.incarnation, num_tokens=num_tokens, wait_s=wait_s)


async def pair_up(mesh: WorkerMesh) -> None:
    """Have the second prefill worker make a pair with the first."""
    first, second = mesh.prefills
    second.worker.pairs.ask(MeshPeer(first.incarnation, Address(first.host, 9000)))
    await mesh.gateway.until(lambda: first.incarnation in second.worker.pairs.speeds)
    await mesh.gateway.until(lambda: second.incarnation in first.worker.pairs.speeds)


async def answered(request: FakeRequest, prompt: list[int], num: int = 8) -> wire.PrefillToken:
    assert await request.finished() == expected(prompt, num)
    assert request.token is not None
    return request.token


@virtual_time
async def test_a_prefix_comes_from_the_worker_that_has_it() -> None:
    """What one prefill worker has computed, another fetches, and computes only the rest; the answer
    is the same."""
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(PROMPT, p=0), PROMPT)
        longer = PROMPT + a_prompt(40, seed=2)
        token = await answered(
            mesh.start(longer, p=1, prefix=source(mesh.prefills[0], 512)), longer
        )
        assert (token.cached_tokens, token.fetched_tokens) == (512, 512)
        assert token.fetched_bytes > 0
        assert token.fetch_s > 0
        again = await answered(mesh.start(longer, p=1), longer)  # it stays
        assert (again.cached_tokens, again.fetched_tokens) == (544, 0)


@virtual_time
async def test_an_answer_serves_the_next_turn_of_its_conversation() -> None:
    """KV of an answer lies on the decode worker alone: prefill fetches it from there, whatever the
    sizes of their blocks."""
    async with worker_mesh(
        prefill_blocks=128, decode_blocks=256, decode_block_size=8, prefill_block_size=32
    ) as mesh:
        first = expected(PROMPT, 100)
        await answered(mesh.start(PROMPT, 100), PROMPT, 100)
        talk = PROMPT + first + a_prompt(20, seed=3)
        token = await answered(
            mesh.start(talk, prefix=source(mesh.decodes[0], len(PROMPT) + 100)), talk
        )
        assert token.cached_tokens == 608  # 611 have KV, in blocks of 32 that is 19
        assert token.fetched_tokens == 608 - 512


@virtual_time
async def test_a_stale_hint_costs_a_round_trip() -> None:
    """A source that has less, or nothing, sends what it has; the rest is computed."""
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(PROMPT[:256], p=0), PROMPT[:256])
        token = await answered(
            mesh.start(PROMPT, p=1, prefix=source(mesh.prefills[0], 500)), PROMPT
        )
        assert token.fetched_tokens == 256
        other = a_prompt(512, seed=9)
        token = await answered(mesh.start(other, p=1, prefix=source(mesh.prefills[0], 512)), other)
        assert (token.cached_tokens, token.fetched_tokens, token.fetched_bytes) == (0, 0, 0)
        assert token.fetch_s < 0.1


@virtual_time
async def test_who_has_more_than_the_source_fetches_nothing() -> None:
    """A hint that is no better than the own cache is not followed; one that the source cannot fill
    takes nothing away."""
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(PROMPT, p=1), PROMPT)
        await answered(mesh.start(PROMPT[:128], p=0), PROMPT[:128])
        longer = PROMPT + a_prompt(200, seed=4)
        token = await answered(
            mesh.start(longer, p=1, prefix=source(mesh.prefills[0], 400)), longer
        )
        assert (token.cached_tokens, token.fetch_s) == (512, 0.0)
        token = await answered(
            mesh.start(longer + longer, p=1, prefix=source(mesh.prefills[0], 1400)), longer + longer
        )
        assert token.cached_tokens == 704
        assert token.fetched_tokens == 0


@virtual_time
async def test_tenants_do_not_fetch_each_other_s_prefixes() -> None:
    """Another salt finds nothing at the source."""
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(PROMPT, p=0, salt=b"one"), PROMPT)
        for salt, num in ((b"two", 0), (b"one", 496)):
            request = mesh.start(PROMPT, p=1, salt=salt, prefix=source(mesh.prefills[0], 500))
            assert (await answered(request, PROMPT)).fetched_tokens == num


@virtual_time
async def test_without_a_pair_or_in_vain_the_prompt_is_computed() -> None:
    """A source that nobody is paired with, or that shares nothing, is not asked."""
    async with worker_mesh(**TWO) as mesh:
        await answered(mesh.start(PROMPT, p=0), PROMPT)
        token = await answered(
            mesh.start(PROMPT, p=1, prefix=source(mesh.prefills[0], 500)), PROMPT
        )
        assert (token.cached_tokens, token.fetch_s) == (0, 0.0)
    async with worker_mesh(**TWO, prefill={"share_prefixes": False}) as mesh:
        token = await answered(mesh.start(PROMPT, p=1, prefix=source(mesh.decodes[0], 500)), PROMPT)
        assert token.fetch_s == 0.0


@virtual_time
async def test_who_shares_nothing_but_takes_prompts_says_so() -> None:
    """A worker that may be either, without prefixes to give, is asked: it has nothing, and the KV
    that crosses the pair meanwhile arrives."""
    shares_not = {"movable": True, "share_prefixes": False}
    async with worker_mesh(prefill_blocks=128, decode_blocks=256, decode=shares_not) as mesh:
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e6)
        other = mesh.start(a_prompt(500, seed=5))
        await other.until(lambda it: it.token)
        token = await answered(mesh.start(PROMPT, prefix=source(mesh.decodes[0], 500)), PROMPT)
        assert (token.cached_tokens, token.fetched_tokens) == (0, 0)
        assert await other.finished() == expected(a_prompt(500, seed=5), 8)


@virtual_time
async def test_others_go_on_while_a_prompt_waits_for_its_prefix() -> None:
    """A prompt whose prefix is on its way keeps its place and holds nobody up; if it does not come
    in time, it is computed."""
    slow = LoopbackSettings(latency_s=0.0005, bytes_per_s=2e5)
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(PROMPT, p=0), PROMPT)
        mesh.fabric.settings = slow
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        waits = mesh.start(PROMPT, p=1, legs="p", prefix=source(mesh.prefills[0], 500, wait_s=0.3))
        other = mesh.start(a_prompt(64, seed=5), p=1, legs="p")
        await other.until(lambda it: it.token)
        assert loop.time() - began_at < 0.1
        assert waits.token is None
        await waits.until(lambda it: it.token)
        assert waits.token is not None
        assert 0.3 <= waits.token.fetch_s < 0.31
        assert waits.token.cached_tokens == 0
        mesh.fabric.settings = LoopbackSettings()
        waits.cancel_prefill()
        other.cancel_prefill()
        await mesh.gateway.until(lambda: not mesh.num_transfers)


@virtual_time
async def test_what_is_on_its_way_is_not_sent_twice() -> None:
    """Prompts that begin alike wait for one transfer, whether they name a source or not; if the
    first client leaves, the others have it all the same, and with the last one it ends."""
    hot = a_prompt(512, seed=1)
    prompts = [hot + a_prompt(40, seed=20 + number) for number in range(3)]
    for leaves in (False, True):
        async with worker_mesh(**TWO) as mesh:
            await pair_up(mesh)
            await answered(mesh.start(hot, p=0), hot)
            mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e7)
            first, *others = (
                mesh.start(prompt, p=1, prefix=hint)
                for prompt, hint in zip(
                    prompts,
                    (source(mesh.prefills[0], 552), source(mesh.prefills[0], 552), None),
                    strict=True,
                )
            )
            if leaves:
                await asyncio.sleep(0.002)
                first.cancel()
            else:
                token = await answered(first, prompts[0])
                assert token.fetched_tokens == 512
            for request, prompt in zip(others, prompts[1:], strict=True):
                token = await answered(request, prompt)
                assert token.cached_tokens == 512
                assert (token.fetched_tokens, token.fetched_bytes > 0) in (
                    ((512, True), (0, False)) if leaves else ((0, False),)
                )
                assert token.fetch_s > 0
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(hot, p=0), hot)
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e5)
        both = [mesh.start(it, p=1, prefix=source(mesh.prefills[0], 552)) for it in prompts[:2]]
        await asyncio.sleep(0.01)
        for request in both:
            request.cancel()
        mesh.fabric.settings = LoopbackSettings()
        await mesh.gateway.until(lambda: not mesh.num_transfers)


@virtual_time
async def test_no_more_is_told_as_fetched_than_was_used() -> None:
    """Whose beginning is a part of what came for another, who has left, had that part sent."""
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(PROMPT, p=0), PROMPT)
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e7)
        first = mesh.start(PROMPT, p=1, prefix=source(mesh.prefills[0], 512))
        shorter = PROMPT[:256] + a_prompt(40, seed=6)
        request = mesh.start(shorter, p=1)
        await asyncio.sleep(0.002)
        first.cancel()
        token = await answered(request, shorter)
        assert (token.cached_tokens, token.fetched_tokens) == (256, 256)


@virtual_time
async def test_what_is_given_up_holds_nobody_up() -> None:
    """A prompt that comes while a fetch which nobody wants any more is still being taken down is
    computed, and waits for nothing."""
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(PROMPT, p=0), PROMPT)
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e5)
        first = mesh.start(PROMPT, p=1, prefix=source(mesh.prefills[0], 500))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        assert mesh.num_transfers
        request = mesh.start(PROMPT, p=1, legs="p", is_pushed=False)
        await request.until(lambda it: it.token)
        assert request.token is not None
        assert request.token.fetch_s == 0.0
        mesh.fabric.settings = LoopbackSettings()
        await mesh.gateway.until(lambda: not mesh.num_transfers)


@virtual_time
async def test_what_there_is_no_room_for_is_forgotten() -> None:
    """A fetch that is refused at once, for the pool is full, leaves nothing behind."""
    async with worker_mesh(**TWO) as mesh:
        await pair_up(mesh)
        await answered(mesh.start(PROMPT, p=0), PROMPT)
        second = mesh.prefills[1]
        kept = second.pool.acquire(second.pool.new_chain(), (), 120 * 16, max_hit_tokens=0)
        hint = source(mesh.prefills[0], 500)
        request = mesh.start(PROMPT, p=1, legs="p", is_pushed=False, prefix=hint)
        await asyncio.sleep(0.01)
        second.pool.release(kept)
        second.worker.requests.blocks_freed()
        await request.until(lambda it: it.token)
        assert not second.worker.requests._prefixes._requests


async def settled(mesh: WorkerMesh) -> None:
    """Wait until no living worker holds a block for anybody, or has a transfer that goes on."""
    async with asyncio.timeout(10.0):
        await mesh.idle()
        while mesh.num_transfers:
            await asyncio.sleep(0.1)
    for running in mesh.prefills:
        if running.lives:
            assert not running.worker.prefix_source.tables()


class Moments:
    """Says when a fetch, the only transfer of a test, comes to a state at one of its ends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._reached: dict[str, asyncio.Event] = {}
        step, move = Machine.step, Lease.move

        def stepped(machine: Machine[Any, Any], event: Any) -> Any:
            after = step(machine, event)
            end = "source" if isinstance(after, SenderState) else "sink"
            self._event(f"{end} {after.value}").set()
            return after

        def moved(lease: Lease, event: LeaseEvent) -> None:
            move(lease, event)
            self._event(f"lease {lease.state.value}").set()

        patch.setattr(Machine, "step", stepped)
        patch.setattr(Lease, "move", moved)

    def _event(self, name: str) -> asyncio.Event:
        return self._reached.setdefault(name, asyncio.Event())

    async def reached(self, name: str) -> None:
        """Wait until an end is, or was, in that state."""
        async with asyncio.timeout(5.0):
            await self._event(name).wait()


GIVEN_UP = ["source aborting", "sink aborting", "lease aborting", "lease quarantined"]
"""These come after the client has left."""

MOMENTS = [
    *("lease waiting", "lease granted", "lease open", "lease released"),
    *("source opening", "source pushing", "source committing", "source finishing", "source done"),
    *("sink receiving", "sink committed", "sink done"),
    *GIVEN_UP,
]


@pytest.mark.parametrize("when", few(MOMENTS, "sink receiving"))
@pytest.mark.parametrize("who", ["source", "sink", "gateway", "client"])
def test_an_end_in_any_state(who: str, when: str) -> None:
    """The source, the sink or the gateway dies, or the client leaves, in any state of a fetch: the
    prompt is computed or given up, another gateway's prompt that waits for the same prefix is
    answered if its worker lives, and no block is lost."""

    @virtual_time
    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            async with worker_mesh(**TWO) as mesh:
                await pair_up(mesh)
                await answered(mesh.start(PROMPT, p=0), PROMPT)
                await mesh.idle()
                moments = Moments(patch)
                mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e7)
                first, second = mesh.prefills
                num_kept = 120 if when == "lease waiting" else 0  # of 128 blocks
                kept = second.pool.acquire(
                    second.pool.new_chain(), (), num_kept * 16, max_hit_tokens=0
                )
                hint = source(first, 500)
                request = mesh.start(
                    PROMPT, p=1, legs="p", is_pushed=False, prefix=hint, by=mesh.other_gateway
                )
                other = mesh.start(
                    PROMPT, p=1, legs="p", is_pushed=False, prefix=hint, request_id=b"o" * 16
                )
                if when == "lease waiting":
                    await asyncio.sleep(0.01)
                elif when in GIVEN_UP:
                    await moments.reached("sink receiving")
                    request.cancel_prefill()
                    other.cancel_prefill()
                    await moments.reached(when)
                else:
                    await moments.reached(when)
                match who:
                    case "source":
                        await mesh.kill(first)
                    case "sink":
                        await mesh.kill(second)
                    case "gateway":
                        mesh.network.fabric.kill("other-gateway")
                    case _:
                        request.cancel_prefill()
                if who != "sink":
                    second.pool.release(kept)
                    second.worker.requests.blocks_freed()
                    if when not in GIVEN_UP:
                        await other.until(lambda it: it.token)
                        assert other.answer == expected(PROMPT, 1)
                await settled(mesh)

    run()
