"""Configuration from environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from shared.environment import config_from_environment
from shared.errors import InvalidRequest


def test_variables_set_fields_of_every_type_and_the_rest_keeps_its_default() -> None:
    """Text, numbers, booleans and paths; other variables are other programs' business."""
    config = config_from_environment(
        DecodeConfig,
        {
            "PDMESH_GATEWAY": "mesh:1, other:2",
            "PDMESH_MAX_RUNNING": "8",
            "PDMESH_KV_GIB": "0.5",
            "PDMESH_CACHE_PREFIXES": "false",
            "PDMESH_DTYPE": "",
            "PDMESH_HTTP_PORT": "1",
            "HOME": "/",
        },
    )
    assert [str(address) for address in config.gateways] == ["mesh:1", "other:2"]
    assert (config.max_running, config.kv_gib, config.cache_prefixes) == (8, 0.5, False)
    assert config.dtype == DecodeConfig().dtype


def test_an_optional_path_is_read() -> None:
    """The gateway's key file."""
    config = config_from_environment(GatewayConfig, {"PDMESH_API_KEYS": "/etc/keys"})
    assert config.api_keys == Path("/etc/keys")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PDMESH_MAX_JOBS", "many", "PDMESH_MAX_JOBS must be a whole number"),
        ("PDMESH_KV_GIB", "x", "PDMESH_KV_GIB must be a number"),
        ("PDMESH_CACHE_PREFIXES", "perhaps", "PDMESH_CACHE_PREFIXES must be true or false"),
        ("PDMESH_BLOCK_SIZE", "5000", "--block-size"),
    ],
)
def test_a_wrong_value_is_named(variable: str, value: str, words: str) -> None:
    """The operator reads which variable or flag to mend."""
    with pytest.raises(InvalidRequest, match=words):
        config_from_environment(PrefillConfig, {variable: value})
