"""Responses in memory: what is found, and what is forgotten first."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.http.kept_responses import KeptResponses
from services.gateway.http.openai_forms import Message
from shared.errors import InvalidRequest, NotFound

ANSWER = b"x" * 1000, [Message("user", "y")]
SIZE = 1000 + len(msgspec.json.encode(ANSWER[1]))


def names(kept: KeptResponses, tenant: bytes) -> list[str]:
    """Those of r0 to r9 that are still there."""
    found: list[str] = []
    for name in (f"r{number}" for number in range(10)):
        try:
            kept.find(tenant, name, param="response_id")
        except NotFound:
            continue
        found.append(name)
    return found


def test_a_response_is_its_tenants_alone() -> None:
    """Another key finds nothing, by the same name."""
    kept = KeptResponses(1 << 20)
    kept.keep(b"a", "r0", *ANSWER)
    assert kept.find(b"a", "r0", param="response_id").messages == [Message("user", "y")]
    with pytest.raises(InvalidRequest) as missing:
        kept.find(b"b", "r0", param="previous_response_id")
    assert missing.value.code == "previous_response_not_found"
    kept.delete(b"a", "r0", param="response_id")
    assert (names(kept, b"a"), kept.num_bytes) == ([], 0)


def test_what_was_used_longest_ago_goes_first() -> None:
    """By count and by bytes."""
    for kept in (
        KeptResponses(1 << 20, max_responses=2),
        KeptResponses(1 << 20, max_tenant_bytes=2 * SIZE),
    ):
        kept.keep(b"a", "r0", *ANSWER)
        kept.keep(b"a", "r1", *ANSWER)
        kept.find(b"a", "r0", param="response_id")
        kept.keep(b"a", "r2", *ANSWER)
        assert names(kept, b"a") == ["r0", "r2"]


def test_who_has_most_makes_room_for_the_others() -> None:
    """One tenant's many responses push out none of another's few."""
    kept = KeptResponses(4 * SIZE)
    kept.keep(b"few", "r0", *ANSWER)
    for number in range(8):
        kept.keep(b"many", f"r{number}", *ANSWER)
    assert names(kept, b"few") == ["r0"]
    assert names(kept, b"many") == ["r5", "r6", "r7"]
    assert kept.num_bytes == 4 * SIZE


def test_what_is_larger_than_all_room_is_not_kept() -> None:
    """Nor is anything where there is no room at all."""
    assert not KeptResponses(SIZE - 1).keep(b"a", "r0", *ANSWER)
    assert not KeptResponses(0).keep(b"a", "r0", *ANSWER)
    assert KeptResponses(SIZE).keep(b"a", "r0", *ANSWER)
