"""The proof at the beginning of a connection: what differs gives other proofs, and no stamp counts
elsewhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.membership.proof import NONCE_BYTES, Opening, agreement, stamp, stamped_number
from shared.mesh_secret import MeshSecret

SECRET = MeshSecret("5a" * 32)

hellos = st.builds(
    wire.Hello,
    protocol_version=st.integers(0, 9),
    role=st.sampled_from([*wire.Role]),
    incarnation=st.integers(1, (1 << 64) - 1),
    version=st.text(max_size=12),
)
openings = st.builds(Opening, hellos, st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES))


@given(openings, openings, openings, openings)
def test_only_equal_openings_agree(a: Opening, b: Opening, c: Opening, d: Opening) -> None:
    """Whatever either end has said is proven: another version, role, incarnation or nonce on either
    side gives other values, all three."""
    one, other = agreement(SECRET, a, b), agreement(SECRET, c, d)
    if (a, b) == (c, d):
        assert one == other
    else:
        assert not {*one} & {*other}


@given(openings, openings)
def test_no_proof_can_be_sent_back(a: Opening, b: Opening) -> None:
    """The three values differ, also if both ends say the same; another secret gives others."""
    agreed = agreement(SECRET, a, b)
    assert len({*agreed}) == 3
    assert not {*agreed} & {*agreement(MeshSecret("5b" * 32), a, b)}
    assert not {*agreed} & {*agreement(SECRET, b, a)} or a == b


@given(st.binary(min_size=32, max_size=32), st.integers(1, 1 << 40), st.text(max_size=20))
def test_a_stamp_counts_for_one_call_of_one_connection(key: bytes, number: int, path: str) -> None:
    """Not with another number, to another method, or with another key."""
    made = stamp(key, number, path)
    assert stamped_number(key, made, path) == number
    assert stamped_number(key, made, f"{path}x") is None
    assert stamped_number(key, made.replace(f"{number}-", f"{number + 1}-"), path) is None
    assert stamped_number(bytes(32), made, path) is None or key == bytes(32)


@given(st.text(max_size=90))
def test_whatever_stands_in_a_stamp_is_read(text: str) -> None:
    """It comes from a stranger."""
    assert stamped_number(bytes(32), text, "/a") is None
