"""Prefix hashes: equal exactly if everything before is equal."""

from __future__ import annotations

import hashlib

import pytest

from shared.kv.prefix_hash import PrefixChain, prefix_hashes, root_hash
from shared.messages.columns import pack_u32

ROOT = root_hash(b"model", b"")


def hashes(tokens: list[int], num_blocks: int, root: bytes = ROOT) -> list[bytes]:
    """Hash a token list in one go, blocks of 2."""
    return PrefixChain(root, 2).hashes(tokens, num_blocks)


def test_growing_gives_the_same_hashes_as_starting_late() -> None:
    """The chain may be extended block by block or computed at once."""
    tokens, chain = [1, 2], PrefixChain(ROOT, 2)
    for token in (3, 4, 5, 6):
        tokens.append(token)
        chain.hashes(tokens, len(tokens) // 2)
    assert chain.hashes(tokens, 3) == hashes(tokens, 3)
    assert chain.hashes(tokens, 2) == hashes(tokens, 2)


def test_a_hash_covers_everything_before_it() -> None:
    """A change in the first block changes every later hash."""
    ours, theirs = hashes([1, 2, 3, 4], 2), hashes([0, 2, 3, 4], 2)
    assert ours[0] != theirs[0]
    assert ours[1] != theirs[1]


def test_token_boundaries_do_not_blur() -> None:
    """Tokens are hashed as fixed-width integers."""
    assert hashes([1, 256], 1) != hashes([256, 1], 1)
    assert hashes([0, 1], 1) != hashes([1, 0], 1)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((b"m", b""), (b"n", b"")),
        ((b"m", b"a"), (b"m", b"b")),
        ((b"ma", b""), (b"m", b"a")),
    ],
)
def test_model_and_salt_are_in_the_root(
    ours: tuple[bytes, bytes], theirs: tuple[bytes, bytes]
) -> None:
    """Neither another model nor another tenant has the same root, nor can one imitate the other."""
    assert root_hash(*ours) != root_hash(*theirs)


def test_the_hash_is_the_documented_one() -> None:
    """SHA-256 over the root and all little-endian tokens, so that another process computes the
    same; whatever the block size, and however the tokens came."""
    tokens = [*range(1, 13)]
    column = pack_u32(tokens)
    expected = {end: hashlib.sha256(ROOT + column[: 4 * end]).digest() for end in range(1, 13)}
    for size in (1, 2, 3, 4, 12):
        wanted = [expected[end] for end in range(size, 13, size)]
        assert prefix_hashes(ROOT, column, size) == wanted
        assert PrefixChain(ROOT, size).hashes(tokens, 12 // size) == wanted
    assert prefix_hashes(ROOT, column, 5) == [expected[5], expected[10]]
