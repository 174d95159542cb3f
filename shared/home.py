"""The two roles, and which one a worker has when nothing is asked of it: as gateways order it and
the worker confirms it.

Nobody leads: each order has a number, its epoch, and of two the larger one holds, wherever and in
which order they arrive. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Home(NamedTuple):
    """A role as a worker's home. epoch: counts the worker's homes, 0 = that of its launch. order:
    the one that gave it this home, 0 = the launch.

    An order names the epoch after the last that its gateway has heard of. A worker that has had
    another order since is in that epoch already, and refuses it."""

    role: Role
    epoch: int = 0
    order: int = 0

    def replaces(self, other: Home) -> bool:
        """Whether this home holds where the other one was."""
        return self.epoch > other.epoch

    def after(self, order: Home, serves: Collection[Role]) -> Home:
        """Return the home of a worker that has this one and gets an order. serves: the roles whose
        work it does; an order for another one changes nothing."""
        return order if order.role in serves and order.replaces(self) else self
