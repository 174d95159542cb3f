"""Prefill and decode together, in virtual time, driven by a fake gateway: what goes right."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shared.engine.fake import FakeTiming
from shared.messages import codec
from shared.request import FinishReason, SamplingParams
from shared.transfer.effects import HandOver
from tests.support.fake_reference import fake_prompt_logprobs
from tests.support.loopback import LoopbackSettings
from tests.support.step_rows import step_tokens_from_wire
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import MODEL, a_prompt, expected, worker_mesh


@virtual_time
async def test_one_request_crosses_both_workers_and_its_tokens_are_exact() -> None:
    """Prefill gives token 1, decode all others, and none differs from an undisturbed engine's."""
    prompt = a_prompt(50)
    async with worker_mesh() as mesh:
        request = mesh.start(prompt, 12)
        assert await request.finished() == expected(prompt, 12)
        assert request.finish is FinishReason.LENGTH
        assert request.granted is not None
        assert request.joined is not None
        assert request.done is not None
        assert request.joined.bytes_received == request.done.bytes_sent > 0
        assert request.done.lane == "loopback"


@virtual_time
async def test_the_first_step_does_not_wait_for_the_report_of_the_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch steps before the gateway hears that the sequence is in it, and long before it hears
    of the step's token."""
    heard: list[str] = []
    async with worker_mesh() as mesh:
        worker = mesh.decodes[0].worker
        reservations, stepper = worker.requests.reservations, worker.stepper
        for owner, name in ((stepper, "_step"), (reservations, "_tell_joined")):
            told = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, n=name, t=told: heard.append(n) or t(*a))
        request = mesh.start(a_prompt(50), 3)
        assert await request.finished() == expected(a_prompt(50), 3)
        assert heard[:2] == ["_step", "_tell_joined"]
        assert request.joined is not None


@virtual_time
async def test_prefill_notes_a_moment_before_decode_can_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noted later, what decode makes of it might have the earlier time: another process runs."""
    heard: list[str] = []
    monkeypatch.setattr(
        "shared.worker.requests.note", lambda moment, *_, **__: heard.append(moment.value)
    )
    async with worker_mesh() as mesh:
        pusher = mesh.prefills[0].worker.pusher
        assert pusher is not None
        for part, name in ((pusher, "begin"), (pusher.core, "commit")):
            do = getattr(part, name)
            monkeypatch.setattr(
                part, name, lambda *a, n=name, d=do, **k: heard.append(n) or d(*a, **k)
            )
        assert await mesh.start(a_prompt(5), 3).finished() == expected(a_prompt(5), 3)
        assert heard[:2] == ["queued", "begin"]
        assert heard[heard.index("commit") - 1] == "committed"


@virtual_time
async def test_a_request_cancelled_as_it_joins_reports_no_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last word is said: nothing may follow on that stream."""
    async with worker_mesh() as mesh:
        requests = mesh.decodes[0].worker.requests
        reservations = requests.reservations
        placed = reservations.placed

        def place_and_cancel(receive: HandOver) -> None:
            placed(receive)
            requests.cancel(requests._answers[receive.key])

        monkeypatch.setattr(reservations, "placed", place_and_cancel)
        request = mesh.start(a_prompt(50), 8)
        await request.until(lambda r: r.done)
        assert not requests._answers
        assert request.joined is None
        monkeypatch.undo()
        assert await mesh.start(a_prompt(20), 5).finished() == expected(a_prompt(20), 5)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 16), (16, 64), (32, 8), (1, 7)])
@virtual_time
async def test_block_sizes_of_the_two_ends_may_differ(prefill_size: int, decode_size: int) -> None:
    """The wire format knows no blocks."""
    prompts = [a_prompt(n) for n in (1, 15, 16, 17, 63, 130)]
    async with worker_mesh(
        prefill_blocks=1024 // prefill_size,
        decode_blocks=1024 // decode_size,
        prefill_block_size=prefill_size,
        decode_block_size=decode_size,
    ) as mesh:
        requests = [mesh.start(prompt, 9) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            assert await request.finished() == expected(prompt, 9)


@virtual_time
async def test_many_requests_over_two_pairs_are_all_exact() -> None:
    """Batches of chunks and of sequences, sampled and greedy, with repeated prefixes."""
    async with worker_mesh(
        num_prefill=2,
        num_decode=2,
        prefill={"token_budget": 64},
        prefill_blocks=256,
        decode_blocks=256,
    ) as mesh:
        requests = []
        for i in range(40):
            prompt = a_prompt(64, seed=i % 3)[: 8 + (i * 7) % 57] + a_prompt(1 + i % 20, seed=i)
            params = SamplingParams(
                max_tokens=1 + (i * 5) % 23, temperature=0.8 * (i % 2), seed=i, ignore_eos=True
            )
            request = mesh.start(prompt, p=i % 2, d=(i // 2) % 2, sampling=params, wait_s=60.0)
            requests.append((request, prompt, params))
        for request, prompt, params in requests:
            assert await request.finished() == expected(prompt, params.max_tokens, params)


@virtual_time
async def test_a_long_prompt_is_computed_in_chunks_and_pushed_while_it_is() -> None:
    """Almost all bytes move under compute: only the last layers are exposed after the token."""
    prompt = a_prompt(600)
    link = LoopbackSettings(latency_s=0.0001, bytes_per_s=20e6)
    async with worker_mesh(prefill={"token_budget": 100, "group_kib": 1}, fabric=link) as mesh:
        request = mesh.start(prompt, 4)
        assert await request.finished() == expected(prompt, 4)
        assert request.done is not None
        assert request.done.mode == "layerwise"
        assert request.done.transfer_s > 2 * request.done.exposed_s


@virtual_time
async def test_a_repeated_prompt_is_neither_computed_nor_sent_again() -> None:
    """Full blocks are found on both ends: prefill computes the tail, decode receives the tail."""
    prompt = a_prompt(100)
    async with worker_mesh() as mesh:
        first = mesh.start(prompt, 5)
        await first.finished()
        await mesh.idle()
        second = mesh.start(prompt, 5)
        assert await second.finished() == expected(prompt, 5)
        assert first.token is not None
        assert first.done is not None
        assert first.token.cached_tokens == 0
        assert second.token is not None
        assert second.token.cached_tokens == 96
        assert second.granted is not None
        assert second.granted.cached_tokens == 96
        assert second.done is not None
        assert second.done.bytes_sent < first.done.bytes_sent / 10


@virtual_time
async def test_tenants_share_no_prefix() -> None:
    """Another salt finds nothing of the first tenant's KV."""
    prompt = a_prompt(100)
    async with worker_mesh() as mesh:
        await mesh.start(prompt, 3, salt=b"one").finished()
        await mesh.idle()
        second = mesh.start(prompt, 3, salt=b"two")
        assert await second.finished() == expected(prompt, 3)
        assert second.token is not None
        assert second.token.cached_tokens == 0
        assert second.granted is not None
        assert second.granted.cached_tokens == 0


@virtual_time
async def test_a_prompt_that_decode_knows_whole_needs_no_transfer() -> None:
    """Only the commit travels when all full blocks are cached and nothing is left over."""
    prompt = a_prompt(96)
    async with worker_mesh() as mesh:
        await mesh.start(prompt, 3).finished()
        await mesh.idle()
        second = mesh.start(prompt, 6)
        assert await second.finished() == expected(prompt, 6)
        assert second.done is not None
        assert second.done.mode == "none"
        assert second.done.bytes_sent == 0


@pytest.mark.parametrize("is_pushed", [True, False])
@virtual_time
async def test_one_token_needs_no_decode(is_pushed: bool) -> None:
    """Prefill finishes the answer; a reservation made for it goes away without an error."""
    prompt = a_prompt(40)
    async with worker_mesh() as mesh:
        legs = "pd" if is_pushed else "p"
        request = mesh.start(prompt, 1, legs=legs, is_pushed=is_pushed)
        assert await request.finished() == expected(prompt, 1)
        assert request.finish is FinishReason.LENGTH
        assert request.done is not None
        assert request.done.mode == "none"
        await mesh.idle()
        assert request.errors == []


@virtual_time
async def test_a_first_token_that_ends_the_answer_stops_the_push() -> None:
    """A stop token sampled by prefill ends everything, whatever was sent already."""
    prompt = a_prompt(300)
    stop = expected(prompt, 1)[0]
    params = SamplingParams(max_tokens=10, stop_token_ids=(stop,))
    async with worker_mesh(prefill={"token_budget": 64, "group_kib": 1}) as mesh:
        request = mesh.start(prompt, sampling=params)
        assert await request.finished() == [stop]
        assert request.finish is FinishReason.STOP
        await mesh.idle()
        assert request.errors == []


@virtual_time
async def test_a_stop_token_ends_the_answer_on_decode() -> None:
    """Decode decides by the same rule as prefill."""
    prompt = a_prompt(30)
    answer = expected(prompt, 10)
    params = SamplingParams(max_tokens=10, stop_token_ids=(answer[4],))
    async with worker_mesh() as mesh:
        request = mesh.start(prompt, sampling=params)
        assert await request.finished() == answer[: answer.index(answer[4]) + 1]
        assert request.finish is FinishReason.STOP


@virtual_time
async def test_a_retried_attempt_continues_where_the_first_one_was() -> None:
    """Prompt plus the tokens already sent gives the very tokens that were still to come; a bad
    word that the first attempt began is not completed by the second."""
    prompt = a_prompt(33)
    params = SamplingParams(
        max_tokens=20, temperature=1.0, seed=7, ignore_eos=True, bad_words=((1, 1),)
    )
    plain = expected(prompt, 20, params)
    params = replace(params, bad_words=(tuple(plain[6:9]),))
    answer = expected(prompt, 20, params)
    assert answer[:8] == plain[:8]
    assert answer[8] != plain[8]
    async with worker_mesh() as mesh:
        request = mesh.start(
            prompt + answer[:8], sampling=params, attempt=1, num_prompt_tokens=len(prompt)
        )
        assert await request.finished() == answer[8:]
        assert min(request.tokens) == 8


@virtual_time
async def test_logprobs_come_with_their_tokens_from_both_workers() -> None:
    """Prompt logprobs come with token 1; each token has its alternatives."""
    prompt = a_prompt(21)
    params = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1)
    async with worker_mesh() as mesh:
        request = mesh.start(prompt, sampling=params)
        await request.finished()
        assert request.token is not None
        first, _ = codec.prefill_token_from_wire(request.token)
        assert first.logprobs is not None
        assert len(first.logprobs.top) == 2
        assert first.prompt_logprobs is not None
        assert [len(row.top) for row in first.prompt_logprobs[1:]] == [1] * 20
        reference = fake_prompt_logprobs(prompt, 1, model=MODEL)
        assert first.prompt_logprobs[1].logprob == pytest.approx(reference[0].logprob, rel=1e-6)
        steps = [event.tokens for event in request.events if getattr(event, "tokens", None)]
        rows = [token for step in steps for _, token in step_tokens_from_wire(step)]
        assert [len(row.logprobs.top) for row in rows if row.logprobs is not None] == [2, 2, 2]


@virtual_time
async def test_under_pressure_the_newest_is_preempted_and_every_answer_is_still_exact() -> None:
    """Decode runs out of blocks in mid-run; recomputed sequences repeat no token."""
    prompts = [a_prompt(20, seed=i) for i in range(6)]
    async with worker_mesh(decode_blocks=24, decode_block_size=8) as mesh:
        requests = [mesh.start(prompt, 60, wait_s=60.0) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            assert await request.finished() == expected(prompt, 60)
        stats = mesh.decodes[0].worker.scheduler.statistics()
        assert stats.num_preemptions > 0


@virtual_time
async def test_a_reservation_waits_for_blocks_while_prefill_computes() -> None:
    """The second prompt is prefilled while decode is full, and pushed when it has room."""
    first, second = a_prompt(200), a_prompt(200, seed=1)
    async with worker_mesh(decode_blocks=18) as mesh:
        one = mesh.start(first, 60, wait_s=60.0)
        await one.until(lambda r: r.joined)
        two = mesh.start(second, 10, wait_s=60.0)
        await two.until(lambda r: r.token)
        assert two.granted is None
        assert await one.finished() == expected(first, 60)
        assert await two.finished() == expected(second, 10)
        assert two.granted is not None
        assert two.granted.wait_s > 0


@virtual_time
async def test_token_one_is_sent_while_kv_still_travels() -> None:
    """A slow link delays the join, never the first token."""
    prompt = a_prompt(400)
    link = LoopbackSettings(latency_s=0.001, bytes_per_s=1e6)
    async with worker_mesh(fabric=link, prefill={"group_kib": 1}) as mesh:
        request = mesh.start(prompt, 3)
        await request.until(lambda r: r.token)
        assert request.joined is None
        assert await request.finished() == expected(prompt, 3)
        assert request.done is not None
        assert request.done.exposed_s > 0.01


@virtual_time
async def test_a_slow_link_does_not_hold_up_the_others() -> None:
    """KV that takes minutes from one worker, in frames of 4 s, keeps no other's waiting for more
    than a frame: it comes to have as many staging slots."""
    pushes = {"group_kib": 1, "token_budget": 512}
    async with worker_mesh(
        num_prefill=2, prefill_blocks=512, decode_blocks=1024, prefill=pushes, check=False
    ) as mesh:
        loop, free_at = asyncio.get_running_loop(), 0.0

        def reserve(source: bytes, target: bytes, num_bytes: int) -> tuple[float, float]:
            nonlocal free_at
            if source != mesh.prefills[0].transport_address:
                return 0.0, 0.0
            begins_at = max(loop.time(), free_at)
            free_at = begins_at + num_bytes / 4000
            return begins_at - loop.time(), num_bytes / 4000

        mesh.fabric.reserve = reserve
        long = [mesh.start(a_prompt(2000, seed=number), 2) for number in range(3)]
        await mesh.gateway.until(lambda: all(request.token for request in long))
        prompt, began_at = a_prompt(2000, seed=9), loop.time()
        assert await mesh.start(prompt, 2, p=1).finished() == expected(prompt, 2)
        assert loop.time() - began_at < 5.0
        assert not any(request.joined for request in long)


@pytest.mark.parametrize(
    ("mode", "step_s"),
    [("serialized", 40.0), pytest.param("layerwise", 130.0, marks=pytest.mark.slow)],
)
@virtual_time
async def test_a_step_may_take_longer_than_a_frame_on_its_way(mode: str, step_s: float) -> None:
    """Its frames are announced when it begins. Those of a prompt that is computed before it do not
    wait for its end, however few staging slots decode has: two."""
    async with worker_mesh(
        prefill={"transfer_mode": mode, "token_budget": 128, "group_kib": 1},
        timing=FakeTiming(base_s=step_s),
    ) as mesh:
        prompts = [a_prompt(100 + number, seed=number) for number in range(3)]
        asked = [mesh.start(prompt, 2) for prompt in prompts]
        for prompt, request in zip(prompts, asked, strict=True):
            assert await request.finished() == expected(prompt, 2)
            assert request.done is not None
            assert request.done.exposed_s < 1.0


@virtual_time
async def test_the_status_that_gateways_see_is_the_truth() -> None:
    """Pending tokens, free and reserved blocks, and the pair, while a request runs."""
    prompt = a_prompt(160)
    timing = FakeTiming(base_s=1.0)
    async with worker_mesh(timing=timing) as mesh:
        prefill, decode = mesh.prefills[0].incarnation, mesh.decodes[0].incarnation
        request = mesh.start(prompt, 4)
        await mesh.gateway.until(lambda: mesh.gateway.status[prefill].pending_tokens == 160)
        await mesh.gateway.until(lambda: mesh.gateway.status[decode].reserved_blocks >= 10)
        assert mesh.gateway.status[decode].free_blocks <= 54
        await request.finished()
        await mesh.gateway.until(lambda: mesh.gateway.status[decode].reserved_blocks == 0)
        await mesh.gateway.until(lambda: mesh.gateway.status[prefill].free_blocks == 64)
        assert mesh.gateway.status[prefill].step_s == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("look_ahead", [True, False])
@virtual_time
async def test_an_end_by_surprise_costs_a_row_only_where_the_next_step_is_planned_ahead(
    look_ahead: bool,
) -> None:
    """``--no-look-ahead`` computes no token too many; either way the client sees none."""
    prompt = a_prompt(20)
    answer = expected(prompt, 8)
    sampling = SamplingParams(max_tokens=100, stop_token_ids=frozenset({answer[5]}))
    tokens = answer[: answer.index(answer[5]) + 1]
    async with worker_mesh(decode={"look_ahead": look_ahead}) as mesh:
        request = mesh.start(prompt, sampling=sampling)
        assert await request.finished() == tokens
        await mesh.idle()
        num_steps = mesh.decodes[0].worker.scheduler.statistics().num_steps
        assert num_steps == len(tokens) - 1 + look_ahead  # the first is prefill's
