"""``pdmesh plan watch``: what the live planner would do, from what a gateway tells."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import msgspec
import pytest

from services.cli import main
from services.cli.plan import watch
from services.cli.plan.watch import Watcher, WatchFlags, facts_of, lines_of, words_of
from services.gateway.http.cluster_bodies import RecentRequests
from services.gateway.workers.generation import LEAST_REMEMBERED
from tests.support.recent import recent
from tests.support.stub_gateway import StubGateway

PATH = "/cluster/requests"


def told(**how: Any) -> RecentRequests:
    """A body; its last requests came just now."""
    body = recent(**how)
    body["now_s"] -= 30.0
    return msgspec.convert(body, RecentRequests)


@pytest.mark.slow
def test_a_load_that_is_too_much_asks_for_workers() -> None:
    """By the same limits, the more that is asked."""
    calm = facts_of(Watcher(WatchFlags().rules()).look(told(rate=4.0)))
    assert (calm["orders"], calm["hold"], calm["wanted"]) == (
        *([], "", {"prefill": 1, "decode": 1}),
    )
    assert calm["attained"] == 1.0
    assert 1.0 < calm["headroom"] < 10.0
    assert calm["binds"] == "prefill"
    busy = facts_of(Watcher(WatchFlags(slo_ttft=0.1).rules()).look(told(num=300, rate=24.0)))
    assert busy["wanted"]["prefill"] > 1
    (order,) = [it for it in busy["orders"] if it.startswith("add ")]
    assert "prefill" in order
    assert "needed for" in order
    assert busy["headroom"] < 1.0
    limited = WatchFlags(slo_ttft=0.1, max_workers=2).rules()
    assert "--max-workers" in facts_of(Watcher(limited).look(told(num=300, rate=24.0)))["limit"]


def test_what_was_counted_is_not_counted_again() -> None:
    """The same body twice; then a gateway that began anew."""
    watcher = Watcher(WatchFlags().rules())
    first = watcher.look(told(rate=4.0))
    again = told(rate=4.0)
    again.now_s += 1.0
    second = watcher.look(again)
    assert first.outlook is not None
    assert second.outlook is not None
    assert second.outlook.rate <= first.outlook.rate
    anew = told(num=8, rate=4.0)
    anew.now_s = 5.0
    assert "too little has been asked" in watcher.look(anew).decision.hold


def test_requests_that_a_gateway_has_forgotten_count_as_those_that_it_tells() -> None:
    """Of 20 a second it keeps the last: those of before came, by what workers took, and the rate is
    told as the guess that it is. The next look counts."""
    body = told(num=300, rate=20.0)
    whole = Watcher(WatchFlags().rules()).look(body)
    assert whole.outlook is not None
    assert (whole.outlook.rate, whole.cut) == (pytest.approx(300 / 30.0), "")
    body.now_s += 20.0
    for it in body.requests:
        it.arrived_s += 20.0
    body.workers[0].taken = 10_000
    watcher = Watcher(WatchFlags().rules())
    look = watcher.look(body)
    assert look.outlook is not None
    assert look.outlook.rate == pytest.approx(20.0, rel=0.05)
    assert "last 300 requests, of 15 s" in next(words_of(look))
    body.now_s += 5.0
    assert watcher.look(body).cut == ""


def test_attempts_count_as_workers_count_them() -> None:
    """What failed and was sent again is no other gateway's request."""
    before, body = told(rate=4.0), told(rate=4.0)
    before.now_s, before.requests = body.requests[0].arrived_s - 0.1, []
    for it in body.requests:
        it.receipt["attempts"] = 2
    body.workers[0].taken = 2 * len(body.requests)
    watcher = Watcher(WatchFlags().rules())
    watcher.look(before)
    rates = [it.outlook and it.outlook.rate for it in (watcher.look(body), _look(told(rate=4.0)))]
    assert rates[0] == pytest.approx(rates[1])


def _look(body: RecentRequests) -> watch.Look:
    return Watcher(WatchFlags().rules()).look(body)


def test_a_worker_without_a_report_holds_the_planner() -> None:
    """As it would the gateway's."""
    body = told()
    body.workers[0].age_s = 9.0
    assert "last report is 9 s old" in facts_of(Watcher(WatchFlags().rules()).look(body))["hold"]
    body = told()
    del body.workers[1]
    look = Watcher(WatchFlags().rules()).look(body)
    assert look.decision.hold == "a role has no worker"
    assert facts_of(look)["binds"] is None


def test_words_come_once_until_they_change() -> None:
    """A line a look, and below it what is new."""
    watcher = Watcher(WatchFlags().rules())
    first, second = (watcher.look(told(rate=4.0)) for _ in range(2))
    line, binds, _, runner_up = lines_of(first)
    assert "would do nothing" in line
    assert "binds: TTFT, by the prefill workers, up to" in binds
    assert "runner-up: 2M would keep" in runner_up
    (line,) = lines_of(second, [*words_of(first)])
    assert "would do nothing" in line


def test_one_look_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for programs."""
    with StubGateway({PATH: recent()}) as gateway:
        assert main(["plan", "watch", "--once", "--url", gateway.url]) == 0
        assert "1P+1D, 1 requests/s" in capsys.readouterr().out
        assert main(["plan", "watch", "--once", "--json", "--url", gateway.url]) == 0
    assert json.loads(capsys.readouterr().out)["present"] == {"prefill": 1, "decode": 1}


def test_lines_that_come_seldom_are_of_looks_that_come_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway forgets requests, and may begin anew unseen: at 20 a second a look every ten
    minutes counted 227."""
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    num_asked = 0

    class Counted(dict[str, Any]):
        def __getitem__(self, path: str) -> Any:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 20:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__getitem__(path)

    with StubGateway(Counted({PATH: recent()})) as gateway:
        assert main(["plan", "watch", "--interval", "600", "--url", gateway.url]) == 0
    assert capsys.readouterr().out.count("would do nothing") == 1


def test_what_a_gateway_always_keeps_is_known_here() -> None:
    """Of fewer requests it has forgotten none. The command does not load a gateway to know it."""
    assert watch.ALWAYS_KEPT == LEAST_REMEMBERED


def test_who_is_no_gateway_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    """At the first look nothing is waited for."""
    assert main(["plan", "watch", "--url", "http://127.0.0.1:1"]) == 1
    assert "start a mesh with `pdmesh up`" in capsys.readouterr().err
    with StubGateway({PATH: {"requests": []}}) as gateway:
        assert main(["plan", "watch", "--url", gateway.url]) == 1
    assert "use the pdmesh of its release" in capsys.readouterr().err
