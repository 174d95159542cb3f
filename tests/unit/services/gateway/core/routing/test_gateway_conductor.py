"""Policy ``conductor``: own prefix, another worker's prefix sent, or everything computed; decode by
the time between tokens. Every decision comes out of its record again."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import xor
from typing import Any

import pytest

from services.gateway.core.index.fetches import FIRST_FETCH_S, FetchTimes, Hit, OffersOf
from services.gateway.core.index.holdings import Holdings
from services.gateway.core.index.prefixes import HashedPrompt, Indexed
from services.gateway.core.routing import conductor
from services.gateway.core.routing.decision_record import chosen, record_of
from services.gateway.core.routing.decision_record import replay as decide_again
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.router import Router
from services.gateway.core.routing.routing import POLICIES, RouteDecision
from services.gateway.core.routing.sides import RouteRequest, RoutingPolicy
from services.gateway.core.worker import Role
from shared.ids import Incarnation, StreamId
from shared.kv.journal import KvChanges, TierChanges, key_of
from shared.kv.prefix_hash import UNIT, prefix_hashes, root_hash
from shared.messages.columns import pack_u32
from shared.predict.step_time import StepFit
from tests.support.routing import LAYOUT, a_mesh
from tests.support.routing import decide as decided

FIT = StepFit(constant_s=0.0, token_s=0.001, num_steps=100)
"""1,000 tokens a second."""
FAST = 1e6 * LAYOUT.token_bytes
"""A million tokens a second."""


def a_known_mesh(queues_s: list[float], speed: float = FAST, num_decode: int = 1) -> PeerTable:
    """Prefill workers 1, 2, ... with these queues; all of one speed, and all paired."""
    table = a_mesh(num_prefill=len(queues_s), num_decode=num_decode)
    everybody = [worker.incarnation for worker in table.workers]
    queues = dict(zip(everybody, queues_s, strict=False))
    for worker in table.workers:
        others = [it for it in everybody if it != worker.incarnation]
        status = replace(
            worker.status,
            queue_s=queues.get(worker.incarnation, 0.0),
            prompt_steps=FIT,
            answer_steps=FIT,
            paired=frozenset(others),
            speeds=dict.fromkeys(others, speed),
        )
        table.report(worker, status, 0.0)
    return table


def decide(
    table: PeerTable,
    cached: dict[int, int | Hit],
    num_tokens: int = 1_000,
    policy: str | RoutingPolicy = "conductor",
    **more: Any,
) -> RouteDecision:
    known = {
        worker.place: hit if isinstance(hit, Hit) else Hit(hit, hit)
        for incarnation, hit in cached.items()
        if (worker := table.get(Incarnation(incarnation))) is not None
    }
    offers = OffersOf(table.at, Holdings.of(known), more.pop("times", FetchTimes()))
    request = RouteRequest(
        num_tokens=num_tokens,
        max_new_tokens=100,
        cached=known,
        fetches=offers or None,
        **more,
    )
    decision = decided(policy, table, 0.5, request)
    record = json.loads(json.dumps(record_of(decision, attempt=0, at_s=0.0)))
    assert decide_again(record) == []
    scores = decision.scores
    for values, terms in ((scores.prefills, scores.terms), (scores.decodes, scores.answer_terms)):
        assert not terms or [it.score for it in terms] == list(values)
    return decision


@pytest.mark.parametrize(
    ("queues_s", "cached", "wanted", "source"),
    [
        ([0.0, 0.0], {1: 800}, 1, None),  # who has it is free
        ([0.5, 0.0], {1: 800}, 2, 1),  # who has it is busy, and sends it
        ([0.5, 0.35], {1: 800}, 2, 1),  # behind a queue that is a little shorter, too
        ([0.5, 0.0], {1: 10}, 2, 1),  # a little of it is quicker sent than computed
        ([0.5, 0.0], {1: 800, 2: 800}, 2, None),
        ([0.5, 0.0], {1: 800, 2: 400}, 2, 1),  # what lacks is sent
        ([0.0, 0.0], {100: 900}, 1, 100),  # a decode worker has it
        ([0.0, 0.0], {}, 1, None),
    ],
)
def test_the_soonest_way_to_the_kv_wins(
    queues_s: list[float], cached: dict[int, int | Hit], wanted: int, source: int | None
) -> None:
    """1,000 tokens computed are a second, 1,000 sent a millisecond."""
    decision = decide(a_known_mesh(queues_s), cached)
    fetch = decision.fetch
    assert (int(decision.prefill), fetch and int(fetch.source)) == (wanted, source)
    if fetch is not None:
        assert fetch.num_tokens == cached[int(fetch.source)]


def test_of_equal_sources_the_one_that_joined_last_sends() -> None:
    """A rule, so that all gateways take the same and a decision comes out of the same views."""
    fetch = decide(a_known_mesh([0.0, 0.5, 0.5, 0.5]), {2: 800, 3: 800, 4: 800, 100: 128}).fetch
    assert fetch is not None
    assert (int(fetch.source), fetch.num_tokens) == (4, 800)


def test_a_link_that_is_slower_than_computing_is_not_used() -> None:
    """500 tokens a second: the prompt waits where it is cached, or is computed."""
    table = a_known_mesh([0.5, 0.0], speed=500 * LAYOUT.token_bytes)
    decision = decide(table, {1: 300})
    assert (int(decision.prefill), decision.fetch) == (2, None)
    assert int(decide(table, {1: 800}).prefill) == 1


def test_what_is_only_expected_cannot_be_sent() -> None:
    """A worker that has been ordered to compute a prefix has it for its own next prompt; another
    one would ask for it in vain. What it told of before can be sent."""
    table = a_known_mesh([1.5, 0.0])
    decision = decide(table, {1: Hit(800, in_pool=0)})
    assert (int(decision.prefill), decision.fetch) == (2, None)
    fetch = decide(table, {1: Hit(800, in_pool=128)}).fetch
    assert fetch is not None
    assert (int(fetch.source), fetch.num_tokens) == (1, 128)
    assert int(decide(a_known_mesh([0.5, 0.0]), {1: Hit(800, in_pool=0)}).prefill) == 1


@pytest.mark.parametrize("policy", ["conductor", "local"])
def test_what_lies_below_a_pool_is_there_when_it_is_loaded(policy: str) -> None:
    """800 tokens of 1,000 lie in memory: their load runs beside the wait, and counts as it is
    reported. Where computing is quicker the worker computes; what is not reported counts as
    nothing, and the record says of how much."""
    table = a_known_mesh([0.1, 0.0])
    worker = table.workers[0]
    hits: dict[int, int | Hit] = {1: Hit(900, in_pool=100, in_dram=500, on_ssd=300)}
    for dram_token_s, ssd_token_s, load, cached in (
        (0.0, 0.0, 0.0, 900),
        (1e-4, 1e-4, 0.08, 900),
        (1e-4, 1e-3, 0.35, 900),
        (1e-3, 1e-2, 0.0, 100),
    ):
        speeds = {"dram_token_s": dram_token_s, "ssd_token_s": ssd_token_s}
        table.report(worker, replace(worker.status, **speeds), 0.0)
        terms = decide(table, hits, policy=policy).scores.terms[0]
        assert (terms.load, terms.cached_tokens) == (pytest.approx(load), cached)
        assert terms.loaded_tokens == (800 if cached == 900 else 0)
        assert terms.score == pytest.approx(max(0.1, load) + 1.0 - cached / 1_000)


def test_a_worker_that_loads_does_not_fetch() -> None:
    """It takes what it has below its pool, and nothing is sent to it then."""
    table = a_known_mesh([0.0, 5.0])
    assert decide(table, {1: 100, 2: 900}).fetch is not None
    assert decide(table, {1: Hit(100, 50, 50), 2: 900}).fetch is None


def test_a_rounding_of_what_equal_workers_measured_is_no_gain() -> None:
    """A fetch that would be no sooner than the best is not weighed for the last digits of a fit."""
    table = a_known_mesh([0.0, 0.0])
    first = table.all(Role.PREFILL)[0]
    for times in (1.0, 1.0 - 1e-12, 1.0 - 1e-7):
        fit = first.status.prompt_steps
        fit = fit._replace(constant_s=times * fit.constant_s, token_s=times * fit.token_s)
        table.report(first, replace(first.status, prompt_steps=fit), 0.0)
        found = decide(table, {1: 100, 2: 900})
        assert [it.fetch for it in found.scores.terms] == [0.0, 0.0]


def test_what_the_source_is_sending_counts_and_what_was_measured() -> None:
    """A busy link makes a fetch later; what fetches took over a pair is believed more than its
    speed."""
    table, times = a_known_mesh([0.0, 0.0]), FetchTimes()
    source, sink = table.all(Role.PREFILL)
    num_bytes = 1000 * LAYOUT.token_bytes
    assert times.predict(source, sink, num_bytes) == pytest.approx(FIRST_FETCH_S + 0.001)
    table.report(source, replace(source.status, egress_bytes=round(FAST)), 0.0)
    assert times.predict(source, sink, num_bytes) == pytest.approx(1.0 + FIRST_FETCH_S + 0.001)
    for _ in range(20):
        times.fetched(source.incarnation, sink.incarnation, num_bytes=num_bytes, seconds=0.5)
    assert times.predict(source, sink, num_bytes) == pytest.approx(1.5, rel=0.01)
    assert times.predict(sink, sink, num_bytes) is None


def test_without_a_pair_nothing_is_sent_and_the_pair_is_wanted() -> None:
    """Whoever has most and no pair with the chosen worker is named, so that a pair is made."""
    table = a_known_mesh([0.9, 0.0])
    first, second = table.all(Role.PREFILL)
    table.report(first, replace(first.status, paired=frozenset(), speeds={}), 0.0)
    offers = OffersOf(table.at, Holdings.of({first.place: Hit(800, 800)}), FetchTimes())
    assert offers.to(second) is None
    assert offers.missing(second) is first
    assert offers.missing(first) is None
    table.report(first, replace(first.status, paired=frozenset({second.incarnation})), 0.0)
    assert offers.missing(second) is None


def test_decode_is_the_one_with_the_shortest_steps_and_room() -> None:
    """Answers and their context make steps long; KV that must be sent counts; without room nobody
    is taken while another has it."""
    table = a_known_mesh([0.0], num_decode=3)
    one, two, three = table.all(Role.DECODE)
    busy = StepFit(constant_s=0.01, token_s=0.001, attended_s=1e-6, num_steps=100)
    for worker, answers, blocks in ((one, 3, 8), (two, 1, 8), (three, 0, 64)):
        status = replace(
            worker.status, num_answers=answers, reserved_blocks=blocks, answer_steps=busy
        )
        table.report(worker, status, 0.0)
    assert decide(table, {}, num_tokens=100).decode == two.incarnation
    for worker in (one, two):
        table.report(worker, replace(worker.status, num_answers=2), 0.0)
    prefill = table.all(Role.PREFILL)[0]
    speeds = {one.incarnation: FAST, two.incarnation: FAST / 1e4, three.incarnation: FAST}
    table.report(prefill, replace(prefill.status, speeds=speeds), 0.0)
    decision = decide(table, {}, num_tokens=100)
    assert decision.decode == one.incarnation
    step_s = 0.01 + 0.001 * 3 + 1e-6 * (one.reserved_tokens + 100)
    assert decision.scores.answer_terms[0] == pytest.approx((step_s, 0.0, 1e-6, False))
    assert decision.scores.answer_terms[2].no_room == conductor.NO_ROOM_S
    record = record_of(decision, attempt=0, at_s=0.0)
    hand_over = record["decodes"][1]["terms"]["hand_over"]
    assert hand_over == pytest.approx(0.01)  # 100 tokens at 100 a second, of 100 to come
    assert chosen(decision)["decode"] == {
        name: record["decodes"][0][name] for name in ("score", "terms")
    }


def test_each_prefill_worker_in_its_turn_hands_over_where_its_own_links_are_fast() -> None:
    """Two hosts with one of each: what is idle on both is taken in turns, and no KV crosses."""
    table = a_known_mesh([0.0, 0.0], num_decode=2)
    prefills, decodes = table.all(Role.PREFILL), table.all(Role.DECODE)
    for prefill, near, far in zip(prefills, decodes, reversed(decodes), strict=True):
        speeds = {near.incarnation: FAST, far.incarnation: FAST / 1e4}
        table.report(prefill, replace(prefill.status, speeds=speeds), 0.0)
    hosts = {it.incarnation: host for side in (prefills, decodes) for host, it in enumerate(side)}
    policy = conductor.Conductor()
    taken = [
        (hosts[found.prefill], hosts[found.decode])
        for found in (decide(table, {}, num_tokens=100, policy=policy) for _ in range(4))
    ]
    assert sorted(taken) == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_any_decision_comes_out_of_its_record_again() -> None:
    """Drawn queues, caches, links and loads."""
    draws = random.Random(7)
    for _ in range(200):
        num = draws.randrange(1, 12)
        table = a_known_mesh([draws.random() for _ in range(num)], num_decode=3)
        for worker in table.workers:
            speeds = {it: draws.choice([0.0, 1e3, 1e5, 1e8]) for it in worker.status.paired}
            status = replace(
                worker.status,
                speeds=speeds,
                num_answers=draws.randrange(5),
                reserved_blocks=draws.randrange(64),
                egress_bytes=draws.choice([0, 0, 10_000]),
                dram_token_s=draws.choice([0.0, 1e-4, 1e-2]),
            )
            table.report(worker, status, 0.0)
        holders = draws.sample(table.workers, min(len(table), 4))
        num_tokens = draws.randrange(50, 500)
        cached: dict[int, int | Hit] = {}
        for it in holders:
            tokens = draws.randrange(1, num_tokens)
            hit = Hit(tokens, tokens // 2, tokens // 4, tokens // 4)
            cached[int(it.incarnation)] = draws.choice([tokens, hit])
        decide(table, cached, num_tokens=num_tokens)


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("is_known", [True, False])
def test_colocated_workers_decisions_come_out_of_their_records(num: int, is_known: bool) -> None:
    """One worker on both sides, with orders that its report has not seen; a lone one, too, and
    beside another whose predictions are not believed."""
    table = a_known_mesh([], num_decode=num)
    for worker in table.workers:
        status = replace(worker.status, prompt_steps=FIT, paired=frozenset({worker.incarnation}))
        table.report(worker, status, 0.0)
        for number in range(1, 3):
            worker.sent(Role.DECODE, StreamId(number), num_tokens=300, num_blocks=20, now=0.0)
    table.workers[0].is_believed = is_known
    decision = decide(table, {100: 800})
    assert decision.prefill == decision.decode
    assert [terms.is_s for terms in decision.scores.terms] == [is_known or num > 1] * num
    assert decision.scores.terms[0].by_load is (not is_known and num > 1)


@pytest.mark.parametrize("seed", range(20))
def test_columns_say_what_the_fits_say(seed: int) -> None:
    """Every part of a fit counts, and the steps that a prompt is cut into, as for one alone."""
    chance = random.Random(seed)
    table = a_mesh(num_prefill=conductor.FEW + 1, num_decode=conductor.FEW + 1)
    for worker in table.workers:
        fits = (
            StepFit(chance.uniform(0.001, 0.1), chance.random() / 1e3, chance.random() / 1e6, 100)
            for _ in range(2)
        )
        status = replace(
            worker.status,
            **dict(zip(("prompt_steps", "answer_steps"), fits, strict=True)),
            queue_s=chance.random(),
            step_tokens=chance.choice([0, 64, 512, 4096]),
            paired=frozenset(it.incarnation for it in table.workers) - {worker.incarnation},
        )
        table.report(worker, status, 0.0)
    prefills, decodes = table.sides.prefills, table.sides.decodes
    cached = {it.place: Hit(num, num) for it in prefills if (num := chance.randrange(900))}
    request = RouteRequest(num_tokens=1_000, max_new_tokens=100, cached=cached, now=0.5)
    scores = POLICIES["conductor"]().scores(request, table.sides)  # type: ignore[attr-defined]
    for worker, score, terms in zip(prefills, scores.prefills, scores.terms, strict=True):
        status, num_cached = worker.status, cached.get(worker.place, Hit(0)).tokens
        alone_s = status.prompt_steps.prompt_seconds(num_cached, 1_000, status.step_tokens)
        assert terms.compute == pytest.approx(alone_s)
        assert score == pytest.approx(max(0.0, worker.free_at - 0.5) + alone_s)
    for worker, score in zip(decodes, scores.decodes, strict=True):
        context = worker.reserved_tokens + 1_000
        step_s = worker.status.answer_steps.seconds(worker.num_answers + 1, context)
        assert score == pytest.approx(step_s)


@pytest.mark.parametrize("unknown", [(), (0, 7), range(8)], ids=["none", "some", "all"])
def test_few_workers_score_one_by_one_as_by_columns(
    unknown: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quicker way for a handful: the same scores and pairs, also of what lies below a pool,
    without room, and without a speed."""
    chance = random.Random(4)
    for _ in range(50):
        table = a_known_mesh([chance.random() for _ in range(4)], num_decode=4)
        for worker in table.workers:
            fits = (
                StepFit(chance.uniform(0.01, 0.1), chance.random() / 1e3, chance.random() / 1e6, 9)
                for _ in range(2)
            )
            status = replace(
                worker.status,
                **dict(zip(("prompt_steps", "answer_steps"), fits, strict=True)),
                dram_token_s=1e-5,
                reserved_blocks=chance.randrange(worker.num_blocks + 1),
                speeds={it: FAST * chance.randrange(2) for it in worker.status.speeds},
            )
            table.report(worker, status, 0.0)
        for place in unknown:
            worker = table.workers[place]
            bare = replace(worker.status, prompt_steps=StepFit(), answer_steps=StepFit())
            table.report(worker, bare, 0.0)
        hits = {place: Hit(chance.randrange(900), in_dram=64) for place in range(0, 8, 2)}
        request = RouteRequest(num_tokens=1_000, max_new_tokens=10, cached=hits)
        found: list[RouteDecision] = []
        for few in (conductor.FEW, 0):
            monkeypatch.setattr(conductor, "FEW", few)
            found.append(decided("conductor", table, 0.5, request))
        one, other = found
        assert one.places == other.places
        assert list(one.scores.prefills) == pytest.approx(list(other.scores.prefills))
        assert list(one.scores.decodes) == pytest.approx(list(other.scores.decodes))
        for terms, others in zip(one.scores.terms, other.scores.terms, strict=True):
            assert tuple(terms) == pytest.approx(tuple(others))


def test_one_pair_and_a_short_prompt_need_no_columns_and_no_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is no choice, and where no worker can have told of the prompt, nobody looks:
    three quarters of a small mesh's decision were that."""
    table = a_known_mesh([0.0])
    router = Router(POLICIES["conductor"](), table, index_bytes=1 << 20)
    assert router.prefixes is not None
    for worker in table.workers:
        router.prefixes.joined(worker)
    asked: list[int] = []
    monkeypatch.setattr(
        router.prefixes.index, "match", lambda keys, *_: asked.append(len(keys)) or Holdings.of({})
    )
    for num_tokens in (1, UNIT - 1, UNIT):
        prompt = HashedPrompt(pack_u32(range(num_tokens)), b"")
        request = RouteRequest(num_tokens=num_tokens, max_new_tokens=10, prompt=prompt)
        assert router.route(request, 0.0, 0.5).decision is not None
    assert asked == [1]
    assert table._columns is None


def test_a_prompt_that_is_routed_and_not_sent_is_expected_nowhere() -> None:
    """It was refused as late: nobody will have computed it, and it is no prompt more."""
    router = Router(POLICIES["conductor"](), a_known_mesh([0.0, 0.0]), index_bytes=1 << 20)
    assert router.prefixes is not None
    for worker in router._table.workers:
        router.prefixes.joined(worker)
    prompt = HashedPrompt(pack_u32(range(4 * UNIT)), b"")
    request = RouteRequest(num_tokens=4 * UNIT, max_new_tokens=10, prompt=prompt)
    decision = router.route(request, 0.0, 0.5).decision
    assert decision is not None
    assert not router.cached(prompt, 0.0)
    assert router.prefixes.hottest(1) == []
    router.sent(decision, prompt, 0.0)
    prefill, _ = decision.workers
    assert router.cached(prompt, 0.0)[prefill.place].tokens >= 3 * UNIT
    router.sent(decision, prompt, 0.0)  # what comes again is hot
    assert len(router.prefixes.hottest(1)) == 1


def test_a_worker_of_an_older_release_stays_silent_and_counts_by_its_queue() -> None:
    """It answers no ask for its prefixes and reports without events: nothing is taken to be cached
    there. It gets prompts all the same, and what others have is sent to it."""
    table = a_known_mesh([0.5, 0.0])
    router = Router(POLICIES["conductor"](), table, index_bytes=1 << 20)
    assert router.prefixes is not None
    for worker in table.workers:
        router.prefixes.joined(worker)
    teller, older = table.all(Role.PREFILL)
    asked = router.prefixes.take_ask(teller.incarnation)
    assert asked is not None
    assert router.prefixes.take_ask(older.incarnation) == asked
    column = pack_u32(range(1_000))
    root = root_hash(teller.model.fingerprint + teller.layout.digest, b"")
    keys = [*map(key_of, prefix_hashes(root, column, asked.granule_tokens))]
    nothing = TierChanges([], [], 0, 0)
    told = TierChanges(keys, [], len(keys), reduce(xor, keys))
    router.prefixes.told(teller, KvChanges(True, True, (told, nothing, nothing)))
    assert router.prefixes.known(teller) == (Indexed.KNOWN, len(keys))
    assert router.prefixes.known(older) == (Indexed.SILENT, 0)
    request = RouteRequest(1_000, 10, prompt=HashedPrompt(column, b""))
    decision = router.route(request, 0.0, 0.5).decision
    assert decision is not None
    assert decision.prefill == older.incarnation
    assert (it := decision.terms) is not None
    assert (it.source, it.cached_tokens) == (teller.incarnation, it.fetched_tokens)
    assert router.prefixes.known(older) == (Indexed.SILENT, 0)


@pytest.mark.parametrize("num", [0, 9], ids=["few", "many"])
def test_one_that_is_not_predicted_switches_nobody_else(num: int) -> None:
    """The others keep their seconds and fetches. It takes part by its load: the prompt tokens that
    it has, at the others' median speed; whatever it says of its queue. Nothing is fetched there,
    and the record says so."""
    table = a_known_mesh([2.5, 2.0, 0.0, *[5.0] * num])
    other = table.workers[2]
    for fit, is_believed in ((FIT, False), (StepFit(), True)):
        other.is_believed = is_believed
        for pending, wanted in ((5_000, 2), (0, 3)):
            status = replace(other.status, prompt_steps=fit, pending_tokens=pending)
            table.report(other, status, 0.0)
            decision = decide(table, {1: 800})
            terms = decision.scores.terms
            assert (decision.prefill, decision.fetch is None) == (wanted, wanted == 3)
            assert terms[2] == (pending / 1_000, 1.0, 0, True, 0.0, 0, 0, 0.0, 0, True)
            if wanted == 2:  # else no fetch is worth a look
                assert (terms[1].source, terms[1].score) == (1, pytest.approx(2.2))
            assert not terms[1].by_load


@pytest.mark.parametrize("num", [3, 12])
def test_a_decode_worker_without_step_times_counts_by_its_load(num: int) -> None:
    """The others' steps stay predictions: it is as fast as the median of them, with its own answers
    and their context."""
    table = a_known_mesh([0.0], num_decode=num)
    first, *others = table.all(Role.DECODE)
    for idx, worker in enumerate(others):
        fit = StepFit(0.01 + 0.001 * idx, 0.001, 1e-6, 100)
        table.report(worker, replace(worker.status, answer_steps=fit, num_answers=9), 0.0)
    for num_answers, is_taken in ((0, True), (30, False)):
        status = replace(first.status, answer_steps=StepFit(), num_answers=num_answers)
        table.report(first, replace(status, reserved_blocks=3), 0.0)
        decision = decide(table, {}, num_tokens=100)
        assert (decision.decode == first.incarnation) is is_taken
        middle = 0.01 + 0.001 * ((num - 2) // 2)
        step_s = middle + 0.001 * (num_answers + 1) + 1e-6 * (first.reserved_tokens + 100)
        seconds = list(decision.scores.decodes)
        assert seconds[0] == pytest.approx(step_s + 1e-6, rel=1e-3)
        assert seconds[1] == pytest.approx(0.02 + 1e-4, rel=1e-2)


def test_while_no_speed_is_known_tokens_are_compared() -> None:
    """And nothing is fetched, for nobody knows what it would take."""
    table = a_known_mesh([0.0, 0.0])
    for worker in table.workers:
        status = replace(worker.status, prompt_steps=StepFit(), answer_steps=StepFit())
        table.report(worker, replace(status, pending_tokens=0), 0.0)
    decision = decide(table, {1: 800})
    assert (int(decision.prefill), decision.fetch) == (1, None)
