"""Of two orders of a home the one with the larger epoch holds."""

from __future__ import annotations

import itertools

from shared.home import Home

BOTH = ("prompt", "token")


def test_in_whichever_order_orders_arrive_the_newest_holds() -> None:
    """And arriving again it changes nothing."""
    orders = [Home("token", 1), Home("prompt", 2), Home("token", 3), Home("prompt", 3)]
    for arriving in itertools.permutations(orders[:3]):
        home = Home("prompt")
        for order in (*arriving, *arriving):
            home = home.after(order, BOTH)
        assert home == Home("token", 3)
    assert orders[2].after(orders[3], BOTH) is orders[2]  # of equal ones the first


def test_a_role_that_a_worker_does_not_serve_is_none_of_its_homes() -> None:
    """However new the order is."""
    home = Home("prompt")
    assert home.after(Home("token", 9), ["prompt"]) is home
