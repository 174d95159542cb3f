"""A routing policy from outside this package (docs/add-a-routing-policy.md)."""

from __future__ import annotations

from typing import TypeGuard

from services.gateway.core.routing.routing import POLICIES
from services.gateway.core.routing.sides import RoutingPolicy
from shared.errors import InvalidRequest
from shared.object_reference import is_reference, load_object


def load_policy(name: str) -> None:
    """Have ``POLICIES`` hold the policy that ``package.module:Class`` names, by this name, which
    its decisions carry, too; a name without a colon is there or not.

    Raises InvalidRequest: it cannot be imported, or is no policy.
    """
    if name in POLICIES or not is_reference(name):
        return
    found = load_object(name, "--policy")
    if not _is_policy(found):
        kind = f"{RoutingPolicy.__module__}.RoutingPolicy"
        raise InvalidRequest(f"--policy {name} is no {kind} with its own choose", param="policy")
    # A subclass, so that their own class keeps its name.
    POLICIES[name] = type(found.__name__, (found,), {"name": name, "__module__": found.__module__})


def _is_policy(found: object) -> TypeGuard[type[RoutingPolicy]]:
    if not (isinstance(found, type) and issubclass(found, RoutingPolicy)):
        return False
    return found.choose is not RoutingPolicy.choose
