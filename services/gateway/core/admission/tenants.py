"""Tenants as the gateway's cores see them: what a request asks for and what its tenant may, put
together. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from shared.errors import InvalidRequest
from shared.tenants import DEFAULT_PRIORITY, Asked, Tenant

NO_TERMS = Tenant()
"""Of a tenant of which no file says anything."""


class Terms(NamedTuple):
    """How one request is to be served. tenant: its name. ttft_s, tpot_s: limits, inf = none."""

    tenant: str = ""
    priority: int = DEFAULT_PRIORITY
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    @property
    def has_limit(self) -> bool:
        """Whether a prediction may refuse it: who names no limit, waits."""
        return self.ttft_s < math.inf or self.tpot_s < math.inf


class Tenants:
    """Everybody who may ask; names that are not known have the terms of ``NO_TERMS``."""

    def __init__(self, known: Mapping[str, Tenant] | None = None) -> None:
        self._known = dict(known or {})

    def tenant(self, name: str) -> Tenant:
        """Return a tenant's own terms."""
        return self._known.get(name, NO_TERMS)

    def terms(self, asked: Asked) -> Terms:
        """Return what a request gets: its own limits before those of its tenant.

        Raises InvalidRequest: its priority is above what the tenant may ask for.
        """
        tenant = self.tenant(asked.tenant)
        if asked.priority is not None and asked.priority > tenant.max_priority:
            raise InvalidRequest(
                f"priority: this API key may ask for 0 to {tenant.max_priority}, not for "
                f"{asked.priority}",
                param="priority",
                code="priority_too_high",
            )
        priority = DEFAULT_PRIORITY if asked.priority is None else asked.priority
        return Terms(
            tenant=asked.tenant,
            priority=min(priority, tenant.max_priority),
            ttft_s=_seconds(asked.ttft_ms, tenant.ttft_ms),
            tpot_s=_seconds(asked.tpot_ms, tenant.tpot_ms),
        )


def _seconds(own_ms: float | None, tenants_ms: float | None) -> float:
    limit_ms = tenants_ms if own_ms is None else own_ms
    return math.inf if limit_ms is None else limit_ms / 1000.0
