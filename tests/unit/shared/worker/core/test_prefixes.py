"""Prefixes on their way: whose they are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shared.ids import Incarnation, LeaseToken, RequestId, StreamId
from shared.schedule.sequence import Sequence
from shared.transfer.messages import TransferKey
from shared.transfer.orders import Order, PrefixAt
from shared.worker.core.prefixes import ComingPrefixes, Fetched, PrefixFetch
from tests.support.cores import Worker, an_item

ONE, OTHER = Incarnation(7), Incarnation(8)


@dataclass(eq=False)
class Prompt:
    """A prompt that is queued."""

    order: Order
    sequence: Sequence | None
    prefix: PrefixFetch[Prompt] | None = None
    fetched: Fetched = field(default_factory=Fetched)


@pytest.mark.parametrize(
    ("sources", "sent"),
    [
        ((OTHER, ONE, ONE), [(0, 0), (256, 99), (0, 0)]),
        ((OTHER, None), [(0, 0), (256, 99)]),
        ((OTHER, OTHER), [(256, 0), (0, 0)]),
    ],
)
def test_what_was_sent_is_no_transfer_from_elsewhere(
    sources: tuple[Incarnation | None, ...], sent: list[tuple[int, int]]
) -> None:
    """Who ordered it has left; a gateway that named another source is told of no bytes."""
    worker, begun = Worker(num_blocks=200, block_size=16), list[PrefixFetch[Prompt]]()
    prefixes = ComingPrefixes[Prompt](
        worker.scheduler,
        random.Random(1).randbytes,
        is_linked=lambda _: True,
        start=begun.append,
        give_up=lambda _: None,
    )
    prompts: list[Prompt] = []
    for number, source in enumerate((ONE, *sources)):
        key = TransferKey(RequestId(bytes(16)), number, LeaseToken(bytes(16)))
        at = None if source is None else PrefixAt(source, 256, wait_s=1.0)
        item = an_item(260)
        prompt = Prompt(Order(StreamId(number), key, item, OTHER, prefix=at), Sequence(item))
        assert prompt.sequence is not None
        worker.scheduler.add_prefill(prompt.sequence)
        prefixes.begin(prompt, now=float(number))
        prompts.append(prompt)
    (fetch,) = begun
    prefixes.leave(prompts.pop(0))
    assert prefixes.ended(fetch, 5.0, num_tokens=256, num_bytes=99)
    assert [it.fetched for it in prompts] == [Fetched(tokens, 5.0, size) for tokens, size in sent]
