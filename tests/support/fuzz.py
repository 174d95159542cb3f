"""Calls of which a message, or the framing, is damaged."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.support.raw_http2 import framed


def damaged(source: random.Random, data: bytes) -> bytes:
    """Flip, insert, remove and repeat bytes, a few times."""
    result = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(result) + 1)
        match source.randrange(4):
            case 0 if at < len(result):
                result[at] ^= 1 << source.randrange(8)
            case 1:
                result[at:at] = source.randbytes(source.randint(1, 8))
            case 2:
                del result[at : at + source.randint(1, 8)]
            case _:
                result += result[:at]
    return bytes(result)


def a_fuzzed_call(source: random.Random, honest: Sequence[Sequence[Any]]) -> bytes:
    """The bytes of a call of which a message, or now and then the framing, is damaged."""
    messages = [bytes(message) for message in source.choice(honest)]
    victim = source.randrange(len(messages))
    messages[victim] = damaged(source, messages[victim])
    data = b"".join(map(framed, messages))
    return damaged(source, data) if source.random() < 0.1 else data
