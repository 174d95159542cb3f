"""The merge of what several gateways say about decode workers."""

from __future__ import annotations

from shared.address import Address
from shared.ids import Incarnation
from shared.membership.decode_peers import FORGET_S, DecodePeer, DecodePeers, TellPeers

ONE, TWO = Address("one", 1), Address("two", 2)
A, B, C = (DecodePeer(Incarnation(i), Address(f"decode{i}", 7)) for i in (1, 2, 3))


def test_what_any_gateway_names_counts_once() -> None:
    """In the order in which it was first heard; nothing is told twice."""
    peers = DecodePeers()
    assert peers.named(ONE, [A, B], 0.0) == [TellPeers((A, B))]
    assert peers.named(TWO, [C, B], 1.0) == [TellPeers((A, B, C))]
    assert peers.named(TWO, [C, B, A], 2.0) == []
    assert peers.next_tick_at is None


def test_who_is_named_no_more_is_forgotten_after_a_while() -> None:
    """The while begins when the last gateway stops naming it, however long it was named before."""
    peers = DecodePeers()
    peers.named(ONE, [A, B], 0.0)
    assert peers.named(ONE, [B], 1000.0) == []
    assert peers.next_tick_at == 1000.0 + FORGET_S
    assert peers.tick(1000.0 + FORGET_S / 2) == []
    assert peers.tick(1000.0 + FORGET_S) == [TellPeers((B,))]
    assert peers.next_tick_at is None


def test_a_gateway_that_restarts_takes_nobody_with_it() -> None:
    """It comes back and names them again: the pairs were not told."""
    peers = DecodePeers()
    peers.named(ONE, [A], 0.0)
    assert peers.gateway_lost(ONE, 500.0) == []
    assert peers.named(ONE, [], 501.0) == []
    assert peers.named(ONE, [A], 505.0) == []
    assert peers.next_tick_at is None
    peers.gateway_lost(ONE, 600.0)
    peers.gateway_lost(ONE, 605.0)
    assert peers.tick(600.0 + FORGET_S) == [TellPeers(())]


def test_one_gateway_is_enough_to_be_remembered() -> None:
    """Each says what it knows; none can take away what another one says."""
    peers = DecodePeers()
    peers.named(ONE, [A], 0.0)
    peers.named(TWO, [A], 0.0)
    assert peers.gateway_lost(ONE, 1.0) == []
    assert peers.next_tick_at is None


def test_a_new_process_at_an_old_address_is_another_worker() -> None:
    """Both count until the old one is forgotten."""
    peers = DecodePeers()
    peers.named(ONE, [A], 0.0)
    again = DecodePeer(Incarnation(9), A.address)
    assert peers.named(ONE, [again], 1.0) == [TellPeers((A, again))]
    assert peers.tick(1.0 + FORGET_S) == [TellPeers((again,))]
