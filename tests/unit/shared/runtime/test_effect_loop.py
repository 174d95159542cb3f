"""EffectLoop: effects in order, one at a time, and a clock that follows the core."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.runtime.effect_loop import EffectLoop
from tests.support.virtual_loop import virtual_time


class Core:
    """Ticks once at each of its deadlines."""

    def __init__(self, *deadlines: float) -> None:
        self.deadlines = sorted(deadlines)

    @property
    def next_tick_at(self) -> float | None:
        return self.deadlines[0] if self.deadlines else None

    def tick(self, now: float) -> Sequence[str]:
        due = [at for at in self.deadlines if at <= now]
        self.deadlines = [at for at in self.deadlines if at > now]
        return [f"due {at:g}" for at in due]


def test_effects_of_an_event_inside_an_effect_wait_for_their_turn() -> None:
    """An effect that causes an event does not overtake the effects that were ordered before."""
    done: list[str] = []

    def do(effect: str) -> None:
        done.append(effect)
        if effect == "first":
            effects.perform(["caused"])
            assert done == ["first"], "performed inside another effect"

    effects = EffectLoop(Core(), do)
    effects.perform(["first", "second"])
    assert done == ["first", "second", "caused"]


def test_an_effect_that_raises_leaves_the_loop_usable() -> None:
    """The rest is done with the next event."""
    done: list[str] = []

    def do(effect: str) -> None:
        if effect == "bad":
            raise ValueError(effect)
        done.append(effect)

    effects = EffectLoop(Core(), do)
    try:
        effects.perform(["bad", "left over"])
    except ValueError:
        pass
    else:
        raise AssertionError("the error was swallowed")
    effects.perform(["next"])
    assert done == ["left over", "next"]


@virtual_time
async def test_the_core_is_ticked_at_its_deadlines_also_at_one_that_came_nearer() -> None:
    """A deadline set while the loop sleeps towards a later one is met in time."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    core = Core(began_at + 10.0)
    heard: list[tuple[str, float]] = []
    effects: EffectLoop[str] = EffectLoop(
        core, lambda effect: heard.append((effect[:3], loop.time() - began_at))
    )
    async with asyncio.TaskGroup() as tasks:
        clock = tasks.create_task(effects.run())
        await asyncio.sleep(1.0)
        core.deadlines.insert(0, began_at + 2.0)
        effects.perform([])
        await asyncio.sleep(20.0)
        clock.cancel()
    assert heard == [("due", 2.0), ("due", 10.0)]
