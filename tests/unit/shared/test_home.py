"""Of two orders of a home the one with the larger epoch holds."""

from __future__ import annotations

import itertools

from shared.home import Home, Role

PROMPT, TOKEN = Role.PREFILL, Role.DECODE
BOTH = (PROMPT, TOKEN)


def test_in_whichever_order_orders_arrive_the_newest_holds() -> None:
    """And arriving again it changes nothing."""
    orders = [Home(TOKEN, 1), Home(PROMPT, 2), Home(TOKEN, 3), Home(PROMPT, 3)]
    for arriving in itertools.permutations(orders[:3]):
        home = Home(PROMPT)
        for order in (*arriving, *arriving):
            home = home.after(order, BOTH)
        assert home == Home(TOKEN, 3)
    assert orders[2].after(orders[3], BOTH) is orders[2]  # of equal ones the first


def test_a_role_that_a_worker_does_not_serve_is_none_of_its_homes() -> None:
    """However new the order is."""
    home = Home(PROMPT)
    assert home.after(Home(TOKEN, 9), [PROMPT]) is home
