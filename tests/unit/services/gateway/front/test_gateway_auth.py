"""API keys of the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.gateway.front.auth import NOBODY, ROLES, KeyRing, hash_key, new_key, tenant_salt
from services.gateway.front.quota import KeyLimits
from shared.errors import Forbidden, InvalidRequest, QuotaExceeded, Unauthorized
from shared.request import MAX_SALT_BYTES

SALT_KEY = bytes(range(32))


def ring_of(tmp_path: Path, text: str) -> KeyRing:
    """Read a key file with this text."""
    path = tmp_path / "keys"
    path.write_text(text)
    return KeyRing(path)


def test_a_known_key_is_let_in_by_name(tmp_path: Path) -> None:
    """The key's name comes back, in any case of the scheme's word."""
    ring = ring_of(tmp_path, f"# who\n{hash_key('alice', 'k1')}\n\n{hash_key('bob', 'k2')} # b\n")
    assert ring.check("Bearer k1").name == "alice"
    assert ring.check("bearer  k2 ").name == "bob"


@pytest.mark.parametrize(
    "value",
    [None, "", "k1", "Bearer", "Bearer ", "Basic k1", "Bearer k2", "Bearer k1x", "Bearer \udcff"],
)
def test_everybody_else_is_refused(tmp_path: Path, value: str | None) -> None:
    """No key, another scheme, a wrong key and strange bytes are all Unauthorized."""
    ring = ring_of(tmp_path, hash_key("alice", "k1"))
    with pytest.raises(Unauthorized):
        ring.check(value)


def test_only_a_key_with_the_right_may_change_roles(tmp_path: Path) -> None:
    """A line says so; the refusal says whose key it was and how to make one that may."""
    lines = [hash_key("alice", "k1"), hash_key("ops", "k2", may="roles")]
    ring = ring_of(tmp_path, "\n".join(lines))
    ring.check("Bearer k2").require(ROLES)
    alice = ring.check("Bearer k1")
    alice.require("")
    with pytest.raises(Forbidden, match=r"'alice' may ask, but .*hash-key NAME --may roles") as no:
        alice.require(ROLES)
    assert no.value.code == "missing_right"


def test_without_keys_everybody_may_change_roles() -> None:
    """Who asks none for a key asks none for a right; the key of --api-key has none."""
    KeyRing().check(None).require(ROLES)
    plain = KeyRing(None, plain_key="k").check("Bearer k")
    with pytest.raises(Forbidden):
        plain.require(ROLES)


def test_a_right_may_stand_anywhere_among_the_limits(tmp_path: Path) -> None:
    """And one that there is not is a malformed line."""
    line = hash_key("a", "k", limits=KeyLimits(requests_per_minute=5), may="roles")
    name, *words = line.split()
    key = ring_of(tmp_path, " ".join([name, *reversed(words)])).check("Bearer k")
    assert (key.may, key.quota.limits.requests_per_minute) == ("roles", 5)
    with pytest.raises(InvalidRequest, match="may=roles"):
        ring_of(tmp_path, f"{name} may=everything")
    with pytest.raises(InvalidRequest, match="its one right is roles"):
        hash_key("a", "k", may="everything")


def test_without_keys_everybody_may_come() -> None:
    """An empty ring is an open gateway."""
    assert KeyRing().check(None) is NOBODY
    assert KeyRing().is_open


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "alice", "alice:1234", "al ice:" + "0" * 64, "alice:" + "g" * 64, "a:" + "0"
    * 64 + ":", f"a:{'0' * 64}\na:{'1' * 64}"], )  # fmt: skip
def test_a_malformed_key_file_is_refused_whole(tmp_path: Path, text: str) -> None:
    """No line is skipped silently: a typo must not open or close a door unseen."""
    with pytest.raises(InvalidRequest):
        ring_of(tmp_path, text)


def test_a_key_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Some other file, named by mistake."""
    path = tmp_path / "keys"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(InvalidRequest, match="not a text file"):
        KeyRing(path)


def test_a_key_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As some editors write it; and a key may be words."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "a secret"), encoding="utf-8-sig")
    assert KeyRing(path).check("Bearer a secret").name == "alice"


def test_a_malformed_line_is_named_but_not_shown(tmp_path: Path) -> None:
    """The error gives the line's number; a key pasted by mistake stays out of the log."""
    with pytest.raises(InvalidRequest, match="line 2") as caught:
        ring_of(tmp_path, f"{hash_key('a', 'k')}\npasted-secret")
    assert "pasted-secret" not in caught.value.message


def test_a_key_never_shows_in_a_repr(tmp_path: Path) -> None:
    """Neither digest nor salt is printed."""
    key = ring_of(tmp_path, hash_key("alice", "k1", "salt")).check("Bearer k1")
    assert repr(key) == "ApiKey(name='alice', may='')"


def test_two_keys_share_a_cache_only_by_a_common_salt(tmp_path: Path) -> None:
    """A key's tenant is its salt, or its name if it has none."""
    ring = ring_of(
        tmp_path,
        "\n".join([hash_key("a", "k1"), hash_key("b", "k2", "team"), hash_key("c", "k3", "team")]),
    )
    salts = [ring.check(f"Bearer {key}").cache_salt for key in ("k1", "k2", "k3")]
    assert salts == [b"a", b"team", b"team"]


def test_every_salt_is_one_that_workers_take(tmp_path: Path) -> None:
    """A key file may hold longer ones; they stay apart, and the same salt stays the same."""
    salts = ["s", "a" * 64, "a" * 65, "a" * 127 + "b", "a" * 128]
    lines = [hash_key(f"k{i}", f"k{i}", salt) for i, salt in enumerate(salts)]
    ring = ring_of(tmp_path, "\n".join(lines))
    for client in (b"", b"mine"):
        told = [
            tenant_salt(ring.check(f"Bearer k{i}"), client, SALT_KEY) for i in range(len(salts))
        ]
        assert len(set(told)) == len(salts)
        assert max(map(len, told)) <= MAX_SALT_BYTES
        assert told == [
            tenant_salt(ring.check(f"Bearer k{i}"), client, SALT_KEY) for i in range(len(salts))
        ]


def test_what_workers_are_told_says_nothing_of_the_tenant(tmp_path: Path) -> None:
    """Neither its name nor a salt stands in it, and without the mesh's secret no guess can be
    tried; another mesh has other salts."""
    alice = ring_of(tmp_path, hash_key("alice", "k1", "team")).check("Bearer k1")
    told = [tenant_salt(alice, client, SALT_KEY) for client in (b"", b"mine")]
    assert not any(word in salt for salt in told for word in (b"alice", b"team", b"mine"))
    assert not {*told} & {tenant_salt(alice, client, b"other") for client in (b"", b"mine")}


def test_a_clients_own_salt_narrows_and_never_widens(tmp_path: Path) -> None:
    """Two tenants with one client salt stay apart, and no client salt makes one the other."""
    ring = ring_of(tmp_path, f"{hash_key('a', 'k1')}\n{hash_key('ab', 'k2')}")
    a, ab = ring.check("Bearer k1"), ring.check("Bearer k2")
    salts = {
        tenant_salt(a, b"", SALT_KEY),
        tenant_salt(ab, b"", SALT_KEY),
        tenant_salt(a, b"b", SALT_KEY),
        tenant_salt(a, b"x", SALT_KEY),
        tenant_salt(ab, b"x", SALT_KEY),
    }
    assert len(salts) == 5
    assert tenant_salt(NOBODY, b"", SALT_KEY) == b""


def test_new_keys_are_long_and_differ() -> None:
    """A fresh key has 256 random bits."""
    assert len({new_key() for _ in range(10)}) == 10
    assert len(new_key()) >= 43


@pytest.mark.parametrize(("name", "key", "salt"), [("", "k", ""), ("a b", "k", ""), ("a", "", ""),
("a", "k", "x y"), ("a", "k", "#"), ("a", " ", ""), ("a", "k ", ""), ("a", "ü", ""),
("a", "k" * 513, "")])  # fmt: skip
def test_a_line_that_could_not_be_read_back_is_not_made(name: str, key: str, salt: str) -> None:
    """hash_key refuses what a key file cannot hold, and a key that no request could have."""
    with pytest.raises(InvalidRequest):
        hash_key(name, key, salt)


# --- limits, one plain key, and files that change ------------------------------------------------


def test_a_line_says_its_keys_limits(tmp_path: Path) -> None:
    """What it leaves out is the flag's; what hash-key writes is read back."""
    own = KeyLimits(requests_per_minute=5, concurrent_requests=2)
    text = (
        f"{hash_key('a', 'k1', limits=own)}\n"
        f"{hash_key('b', 'k2', 'team')}   concurrent_requests=9 # few\n"
    )
    (tmp_path / "keys").write_text(text)
    ring = KeyRing(tmp_path / "keys", limits=KeyLimits(requests_per_minute=7))
    assert ring.check("Bearer k1").quota.limits == own
    assert ring.check("Bearer k2").quota.limits == KeyLimits(
        requests_per_minute=7, concurrent_requests=9
    )
    assert ring.check("Bearer k2").cache_salt == b"team"


@pytest.mark.parametrize(
    "more", [" requests_per_minute", " rpm=3", " concurrent_requests=-1", " concurrent_requests=x"]
)
def test_a_limit_that_is_not_understood_is_refused(tmp_path: Path, more: str) -> None:
    """A typo must not leave a key without its limit."""
    with pytest.raises(InvalidRequest, match="keys, line 1: expected"):
        ring_of(tmp_path, hash_key("a", "k") + more)


def test_one_plain_key_needs_no_file(tmp_path: Path) -> None:
    """It may stand beside a file, in which nobody may have its name."""
    ring = KeyRing(None, plain_key="secret", limits=KeyLimits(concurrent_requests=3))
    assert ring.check("Bearer secret").quota.limits.concurrent_requests == 3
    with pytest.raises(Unauthorized):
        ring.check("Bearer other")
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "k1"))
    both = KeyRing(path, plain_key="secret")
    assert {both.check(f"Bearer {key}").name for key in ("secret", "k1")} == {"api-key", "alice"}
    path.write_text(hash_key("api-key", "k1"))
    with pytest.raises(InvalidRequest, match="second key of this name"):
        KeyRing(path, plain_key="secret")


def test_a_changed_file_counts_from_the_next_call_on(tmp_path: Path) -> None:
    """New keys come in, removed ones are refused, and a key that stays keeps what it has used
    up."""
    few = KeyLimits(requests_per_minute=1)
    path = tmp_path / "keys"
    path.write_text(f"{hash_key('a', 'k1', limits=few)}\n{hash_key('b', 'k2')}\n")
    ring = KeyRing(path)
    ring.check("Bearer k1").quota.take(100.0)
    path.write_text(f"{hash_key('a', 'k1', limits=few)}\n{hash_key('c', 'k3')} # new\n")
    with pytest.raises(QuotaExceeded):
        ring.check("Bearer k1").quota.take(101.0)
    assert ring.check("Bearer k3").name == "c"
    with pytest.raises(Unauthorized):
        ring.check("Bearer k2")


@pytest.mark.parametrize("broken", ["pasted-secret\n", "", None])
def test_a_broken_change_keeps_the_old_keys_and_is_one_line(
    tmp_path: Path, broken: str | None
) -> None:
    """A broken line, an emptied file, a missing one: nobody is let in or out by it, and the log
    says file and line once, never what stands there."""
    path = tmp_path / "keys"
    path.write_text(hash_key("a", "k1"))
    ring = KeyRing(path)
    if broken is None:
        path.unlink()
    else:
        path.write_text(f"{broken and hash_key('b', 'k2')}\n{broken}")
    with capture_logs() as lines:
        for _ in range(3):
            assert ring.check("Bearer k1").name == "a"
            with pytest.raises(Unauthorized):
                ring.check("Bearer k2")
    (line,) = lines
    assert line["log_level"] == "error"
    assert str(path) in line["error"]
    assert "line 2" in line["error"] or not broken
    assert "pasted-secret" not in line["error"]
    path.write_text(hash_key("b", "k2"))
    assert ring.check("Bearer k2").name == "b"
