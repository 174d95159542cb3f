"""Staging buffers: header and payload side by side, in host memory and as a device's tensor."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy as np
import pytest
import xxhash

from shared.config import DecodeConfig, PrefillConfig
from shared.engine.memory import staging
from shared.errors import EngineFailed
from shared.messages.transfer_codec import MAX_WINDOWS
from shared.transfer.frames import HEADER_BYTES
from tests.support.stamped_kv import StampedKv

KINDS = ["numpy", "bytearray", pytest.param("tensor", marks=pytest.mark.torch)]
HEADER = bytes(range(HEADER_BYTES))


@pytest.mark.parametrize("config", [PrefillConfig, DecodeConfig])
def test_a_pair_takes_as_many_windows_as_there_may_be(config: type) -> None:
    """With more memory than that no pair would come about."""
    allowed = get_type_hints(config, include_extras=True)["staging_mib"].__metadata__[0]
    assert staging.slots_of_a_way(allowed.high, for_prefixes=False) <= MAX_WINDOWS


def a_buffer(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind == "numpy":
        return np.zeros(200, np.uint8)
    if kind == "bytearray":
        return bytearray(200)
    torch = pytest.importorskip("torch")
    # A CPU tensor goes the way of a CUDA one: the calls are the same.
    monkeypatch.setattr(staging, "is_on_device", lambda buffer: True)
    return torch.zeros(200, dtype=torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_header_and_payload_do_not_overlap(kind: str, monkeypatch: pytest.MonkeyPatch):
    """What is written in front is read in front; the payload is a view of what is behind."""
    buffer = a_buffer(kind, monkeypatch)
    staging.write(buffer, HEADER)
    assert staging.read_header(buffer) == HEADER
    payload = staging.payload(buffer, 100)
    assert len(payload) == 100
    payload[0] = 7
    assert buffer[HEADER_BYTES] == 7
    assert staging.read_header(buffer) == HEADER


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_is_of_the_bytes_alone(kind: str, monkeypatch: pytest.MonkeyPatch):
    """xxh3_64: the same for the same bytes wherever they are, another one after any change."""
    buffer = a_buffer(kind, monkeypatch)
    payload = staging.payload(buffer, 100)
    first = staging.digest(payload)
    assert first == xxhash.xxh3_64_intdigest(bytes(100))
    payload[99] = 1
    assert staging.digest(payload) == xxhash.xxh3_64_intdigest(bytes(99) + b"\x01") != first


def test_an_abandoned_buffer_is_replaced_and_not_for_ever():
    """New memory as often as there are slots; a process that needs more leaks, and must end."""
    slots = staging.StagingSlots(StampedKv(num_blocks=1), 2, 100)
    buffers = [slots[0], slots[1]]
    slots.replace(1)
    assert slots[0] is buffers[0]
    assert not np.shares_memory(slots[1], buffers[1])
    slots.replace(1)
    with pytest.raises(EngineFailed):
        slots.replace(0)
