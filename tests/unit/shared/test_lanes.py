"""Names of lanes: which stay on a host, and which a worker may require."""

from __future__ import annotations

import pytest

from shared.config import PrefillConfig
from shared.errors import IncompatiblePeer, InvalidRequest
from shared.lanes import (
    Certainty,
    LaneFinding,
    is_well_formed,
    is_within_host,
    more_certain,
    read_requirement,
    require_lane,
)


@pytest.mark.parametrize(
    ("lane", "required"),
    [
        ("sysv", "shm"),
        ("posix+cma", "shm"),
        ("cuda_copy+sysv", "shm"),
        ("loopback", "shm"),
        ("cuda_ipc", "shm,cuda_ipc"),
        ("rc_mlx5/mlx5_0:1+rc_mlx5/mlx5_1:1", "rdma"),
        ("tcp/eth0", "tcp"),
        ("sysv", "sysv"),
        ("anything", ""),
        ("", ""),
    ],
)
def test_a_lane_that_is_required_is_taken(lane: str, required: str) -> None:
    """By its own name or its group's; the copy between a device and its host does not count."""
    require_lane(lane, read_requirement(required))


@pytest.mark.parametrize(
    ("lane", "required", "what_to_do"),
    [
        ("tcp/lo", "shm", "ipc: service:ipc"),
        ("", "shm", "an unknown lane"),
        ("sysv+tcp/eth0", "shm", "ipc: service:ipc"),
        ("cuda_copy+sysv", "cuda_ipc", "both GPUs"),
        ("tcp/eth0", "rdma", "UCX_NET_DEVICES"),
        ("cma", "sysv", "ipc: service:ipc"),
        ("sysvx", "shm", "IPC namespace"),
        ("cuda_copy", "shm", "IPC namespace"),
    ],
)
def test_any_part_that_is_not_required_is_refused(
    lane: str, required: str, what_to_do: str
) -> None:
    """The error names the lane found, those required, and what to do."""
    with pytest.raises(IncompatiblePeer) as caught:
        require_lane(lane, read_requirement(required))
    assert caught.value.code == "lane"
    for words in (lane, f"--require-lane is {required}", what_to_do):
        assert words in caught.value.message


@pytest.mark.parametrize("text", ["shared", "sysv shm", "cuda", "shm,nvlink"])
def test_a_requirement_that_is_none_is_refused_at_start(text: str) -> None:
    """A name mistyped would otherwise refuse every pair."""
    with pytest.raises(InvalidRequest, match="say shm, cuda_ipc, rdma or tcp"):
        PrefillConfig(require_lane=text).check()


def test_lanes_within_a_host_are_known() -> None:
    """All parts must be; listed beside another, as endpoints list them, is not enough."""
    assert all(map(is_within_host, ("sysv", "cma", "cuda_ipc", "cuda_copy+sysv")))
    assert not any(map(is_within_host, ("", "tcp/lo", "rc_mlx5/mlx5_0:1", "tcp/lo+cuda_ipc")))


def test_the_surer_end_is_right() -> None:
    """Whichever end it is."""
    guess, fact = LaneFinding("tcp", Certainty.EXPECTED), LaneFinding("sysv", Certainty.FETCHED)
    assert more_certain(guess, fact) == more_certain(fact, guess) == fact


def test_a_peers_name_for_a_lane_may_become_a_label() -> None:
    """Short, and nothing but what UCX's names are made of."""
    assert all(map(is_well_formed, ("", "rc_mlx5/mlx5_0:1+tcp/enp1s0.4", "cuda_copy+tcp/br-0a")))
    assert not any(map(is_well_formed, ('a"b', "a\nb", "x" * 201, "tcp/é")))
