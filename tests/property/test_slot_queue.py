"""Who gets the next staging slot, beside the rule in one line."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from shared.ids import LeaseToken, RequestId
from shared.kv.layout import KvLayout
from shared.transfer.flow import Flow
from shared.transfer.messages import TransferKey
from shared.transfer.plan import FrameRule
from shared.transfer.slot_queue import SlotQueue

NUM_SLOTS = 4
RULE = FrameRule(layout=KvLayout(dtype="uint8", num_layers=1, num_kv_heads=1, head_dim=4))


@dataclass(eq=False)
class Transfer:
    """One that waits, or has slots."""

    key: TransferKey
    flow: Flow
    line: tuple[int, bool]
    num_slots: int = 0


class Source:
    """Whose lines are closed as a whole: by a full link, or to prefixes."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def may_have_slot(self, it: Transfer) -> bool:
        num_prefix_slots = sum(other.num_slots for other in self._transfers if other.line[1])
        return not it.flow.is_full and not (it.line[1] and num_prefix_slots >= NUM_SLOTS // 2)


class Sink(Source):
    """Which bounds the slots of each transfer."""

    def may_have_slot(self, it: Transfer) -> bool:
        return it.num_slots < it.flow.most


EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "discard", "take", "home", "most"]), st.integers(0)),
    max_size=120,
)


@given(end=st.sampled_from([Source, Sink]), events=EVENTS)
def test_the_next_slot_is_that_of_the_link_with_the_fewest(
    end: type[Source], events: list[tuple[str, int]]
) -> None:
    """Of the longest waiting of those that may have one, whatever waits, comes and goes beside."""
    flows = [Flow(RULE, NUM_SLOTS) for _ in range(3)]
    transfers = list[Transfer]()
    for number in range(14):
        key = TransferKey(RequestId(b"%16d" % number), 0, LeaseToken(bytes(16)))
        link, is_prefix = number % 3, number % 2 == 0
        transfers.append(Transfer(key, flows[link], (link, is_prefix and end is Source)))
    may_have_slot = end(transfers).may_have_slot
    queue = SlotQueue[Transfer](NUM_SLOTS, may_have_slot)
    plain: list[Transfer] = []
    for event, number in events:
        it = transfers[number % len(transfers)]
        match event:
            case "add":
                queue.add(it.line, it)
                if it not in plain:
                    plain.append(it)
            case "discard":
                queue.discard(it.key)
                if it in plain:
                    plain.remove(it)
            case "take" if sum(flow.num_in_flight for flow in flows) < NUM_SLOTS:
                ready = filter(may_have_slot, plain)
                wanted = min(ready, key=lambda it: it.flow.num_in_flight, default=None)
                assert queue.take() is wanted
                if wanted is not None:
                    plain.remove(wanted)
                    wanted.num_slots += 1
                    wanted.flow.num_in_flight += 1
            case "home" if it.num_slots:
                it.num_slots -= 1
                it.flow.num_in_flight -= 1
            case "most":
                it.flow.most = 1 + number % NUM_SLOTS
            case _:
                pass


def test_the_choice_takes_no_longer_where_more_wait() -> None:
    """Only those that have slots already are passed over, whatever stands behind."""
    asked = list[Transfer]()

    def may_have_slot(it: Transfer) -> bool:
        asked.append(it)
        return it.num_slots < it.flow.most

    queue = SlotQueue[Transfer](NUM_SLOTS, may_have_slot)
    flow = Flow(RULE, NUM_SLOTS)
    flow.most = 1
    for number in range(500):
        key = TransferKey(RequestId(b"%16d" % number), 0, LeaseToken(bytes(16)))
        queue.add(1, Transfer(key, flow, (1, False), num_slots=int(number < NUM_SLOTS)))
    taken = queue.take()
    assert taken is asked[-1]
    assert len(asked) == NUM_SLOTS + 1
