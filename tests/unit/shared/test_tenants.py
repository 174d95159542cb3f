"""Terms of tenants in a file: what they may be, and how a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from shared.tenants import read_tenants


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.alice]\nweight = 0", "[tenants.alice] weight expected `float` >= 0.001"),
        ("[tenants.alice]\nweight = 1e-300", "[tenants.alice] weight expected `float` >= 0.001"),
        ("[tenants.alice]\nweight = 1000000", "expected `float` <= 1000.0"),
        ("[tenants.alice]\nttft_ms = -1", "[tenants.alice] ttft_ms expected `float` > 0.0"),
        ("[tenants.alice]\nmax_priority = 8", "expected `int` <= 7"),
        ("[tenants.alice]\nmax_running = 0", "expected `int` >= 1"),
        ("[tenants.alice]\nspeed = 3", "there are weight, ttft_ms"),
        ("[tenants", "is not valid TOML"),
        ("[tenant.alice]\nweight = 2", "has no section [tenants.NAME]"),
    ],
)
def test_terms_that_cannot_be_are_named(tmp_path: Path, text: str, words: str) -> None:
    """File, table, key and rule."""
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as refusal:
        read_tenants(path)
    assert words in refusal.value.message
    assert str(path) in refusal.value.message
