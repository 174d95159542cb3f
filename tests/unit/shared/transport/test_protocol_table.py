"""What UCX's tables say about the lane of a message.

``ucx_tables`` is what UCX 1.21 printed on CPU of an endpoint and its worker, at the receiver of a
few messages of 4 MiB: over tcp, over sysv, and over posix with cma (no error handling). Tables
about device memory have the format of UCX's source (``proto_debug.c``, ``proto_rndv.c``,
``rndv_mtype.inl``) and the words of logs that others have published.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.lanes import Certainty, LaneFinding, more_certain
from shared.transport.protocol_table import name_of, read_lane

RECORDED = Path(__file__).with_name("ucx_tables")
MIB = 1 << 20
FRAME = 4 * MIB


def read(text: str, memory: str = "host", *, sends: bool, num_bytes: int = FRAME) -> LaneFinding:
    """Look a message up in one text of endpoint and worker."""
    return read_lane(text, "", sends=sends, memory=memory, num_bytes=num_bytes)


def found(sender: str, receiver: str, memory: str = "cuda") -> str:
    """The lane that both ends agree on."""
    finding = more_certain(read(sender, memory, sends=True), read(receiver, memory, sends=False))
    assert finding.certainty >= Certainty.CHOSEN
    return finding.lane


def table(title: str, *rows: str, config: int = 0) -> str:
    """A table as UCX prints it; rows: 'sizes | protocol | lanes'."""
    return "\n".join(
        ["# +----+----+", f"# | ucp_context_0 intra-node cfg#{config} | {title} |", "# +----+----+"]
        + [f"# | {row} |" for row in rows]
    )


HOST_ROWS = table(
    "tagged message by ucp_tag_send* from host memory",
    "0..8191 | eager short | sysv/memory",
    "8K..inf | (?) rendezvous fragmented copy-in copy-out | sysv/memory",
)
"""What every endpoint has: it stands first, names the endpoint's configuration, and says nothing
about device memory."""


def device(sent: str, fetched: str) -> tuple[str, str]:
    """What both ends print of messages in device memory."""
    send = "rendezvous data send from cuda/GPU0 to cuda/dev[0]"
    fetch = "rendezvous data fetch into cuda/GPU1 from cuda/dev[1]"
    return (
        HOST_ROWS + "\n" + table(send, f"0..inf | {sent}"),
        HOST_ROWS + "\n" + table(fetch, "0 | no data fetch | ", f"1..inf | {fetched}"),
    )


@pytest.mark.parametrize(
    ("name", "num_bytes", "sent", "received"),
    [
        ("tcp", FRAME, ("tcp/lo", Certainty.CHOSEN), ("tcp/lo", Certainty.EXPECTED)),
        ("tcp", 512, ("tcp/lo", Certainty.KNOWN), ("tcp/lo", Certainty.EXPECTED)),
        ("sysv", FRAME, ("sysv", Certainty.CHOSEN), ("sysv", Certainty.EXPECTED)),
        ("cma", FRAME, ("cma", Certainty.CHOSEN), ("cma", Certainty.FETCHED)),
        ("cma", 4096, ("posix", Certainty.KNOWN), ("cma", Certainty.FETCHED)),
    ],
)
def test_recorded_tables_name_the_lane_of_the_message(
    name: str, num_bytes: int, sent: tuple[str, Certainty], received: tuple[str, Certainty]
) -> None:
    """The row of its size, not the lanes that the endpoint has: cma carries the large ones of an
    endpoint that has posix as well."""
    text = (RECORDED / f"{name}.txt").read_text()
    assert read(text, sends=True, num_bytes=num_bytes) == sent
    assert read(text, sends=False, num_bytes=num_bytes) == received


def test_device_memory_is_not_looked_up_among_the_hosts() -> None:
    """A table about host memory leaves the lane of device memory unknown."""
    assert read(HOST_ROWS, "cuda", sends=True) == LaneFinding("", Certainty.UNKNOWN)
    assert read(HOST_ROWS, "cuda", sends=False) == LaneFinding("", Certainty.UNKNOWN)


@pytest.mark.parametrize(
    ("sent", "fetched", "lane"),
    [
        (
            "fragmented copy-in copy-out | tcp/eth0",
            "zero-copy read from remote | cuda_ipc/cuda",
            "cuda_ipc",
        ),
        (
            "zero-copy flushed write to remote | cuda_ipc/cuda",
            "(?) zero-copy flushed write to remote | cuda_ipc/cuda",
            "cuda_ipc",
        ),
        (
            "fragmented copy-in copy-out | sysv/memory",
            "(?) zero-copy flushed write to remote | cuda_ipc/cuda",
            "cuda_copy+sysv",
        ),
        (
            "fragmented copy-in copy-out | tcp/eth0",
            "(?) fragmented copy-in copy-out | tcp/eth0",
            "cuda_copy+tcp/eth0",
        ),
        (
            "zero-copy fenced write to remote | "
            "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1",
            "(?) zero-copy | rc_mlx5/mlx5_0:1",
            "rc_mlx5/mlx5_0:1+rc_mlx5/mlx5_1:1",
        ),
        (
            "pipeline cuda_copy, fenced write to remote, frag host | rc_mlx5/mlx5_0:1/path0",
            "(?) pipeline cuda_copy, fenced write to remote, frag host, cuda_copy, frag host | "
            "rc_mlx5/mlx5_0:1/path0",
            "cuda_copy+rc_mlx5/mlx5_0:1",
        ),
    ],
    ids=["fetched", "written", "not mapped", "through hosts", "rdma", "rdma through hosts"],
)
def test_who_moves_device_memory_says_by_which_lane(sent: str, fetched: str, lane: str) -> None:
    """The receiver where it fetches, else the sender; a guess about the other end counts for
    nothing, and a copy through the host's memory is part of the name."""
    sender, receiver = device(sent, fetched)
    assert found(sender, receiver) == lane


def test_peers_that_share_a_table_are_named_together() -> None:
    """UCX does not say which of two rows is this peer's: neither is promised."""
    fetch = "rendezvous data fetch into cuda/GPU1 from cuda"
    text = "\n".join(
        (
            HOST_ROWS,
            table(fetch, "1..inf | zero-copy read from remote | cuda_ipc/cuda"),
            table(fetch, "1..inf | (?) fragmented copy-in copy-out | tcp/eth0"),
        )
    )
    assert read(text, "cuda", sends=False) == ("cuda_ipc+cuda_copy+tcp/eth0", Certainty.FETCHED)


def test_other_endpoints_and_other_operations_do_not_count() -> None:
    """Rows of another configuration, of parts of a message, and of several messages at once."""
    row = "1..inf | zero-copy read from remote | cuda_ipc/cuda"
    fetch = "rendezvous data fetch"
    for other in (
        table(f"{fetch} into cuda/GPU1 from cuda", row, config=1),
        table(f"{fetch}(multi) into cuda/GPU1 from cuda", row),
        table(f"{fetch}(frag) into cuda/GPU1 from cuda", row),
        table("remote memory read by ucp_get* into cuda/GPU1 from cuda", row),
    ):
        assert read(f"{HOST_ROWS}\n{other}", "cuda", sends=False).lane == ""


@pytest.mark.parametrize(
    "text", ["", "|", "| cfg#0 | x from host |\n| | | |\n| .. | x | y |", "a|b|c|d"]
)
def test_a_text_of_another_format_tells_nothing(text: str) -> None:
    """Another release may print something else; that is no error."""
    assert read(text, sends=True) == LaneFinding("", Certainty.UNKNOWN)


def test_devices_are_named_unless_they_say_nothing() -> None:
    """As receipts show them; the same lane twice is one."""
    lanes = [("sysv", "memory"), ("tcp", "eth0"), ("tcp", "eth0"), ("cuda_ipc", "cuda"), ("x", "")]
    assert name_of(lanes) == "sysv+tcp/eth0+cuda_ipc+x"
