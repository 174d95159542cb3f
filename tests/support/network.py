"""A network of its own for processes on this machine, each on a host of its own: a network
namespace a host, and one in which a bridge joins them; this process is the first host.

Needs root, ``ip`` and ``iptables``. Whatever is made is gone at the end, and no rule is ever set
in the machine's own namespace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest


def _can_make_networks() -> bool:
    if os.geteuid() or not all(map(shutil.which, ("ip", "iptables", "unshare"))):
        return False
    tried = subprocess.run(["unshare", "--net", "iptables", "-L"], capture_output=True)
    return tried.returncode == 0


needs_networks = pytest.mark.skipif(
    not _can_make_networks(), reason="needs root, ip and iptables to make networks"
)


class Host:
    """One host. address: of this host. prefix: runs a command on it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.prefix = ("ip", "netns", "exec", name)

    def break_link(self, other: str, kind: str) -> None:
        """Do this to what arrives from another address, and, if it is *silence*, to what goes
        there: *deafness* and *silence* drop it, *loss* every fifth packet, *reset* refuses it."""
        drop = ["-j", "DROP"]
        match kind:
            case "silence":
                _run(*self.prefix, "iptables", "-A", "OUTPUT", "-d", other, *drop)
            case "loss":
                drop = ["-m", "statistic", "--mode", "random", "--probability", "0.2", *drop]
            case "reset":
                drop = ["-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"]
            case _:
                assert kind == "deafness"
        _run(*self.prefix, "iptables", "-A", "INPUT", "-s", other, *drop)

    def mend_links(self) -> None:
        """Let everything through again."""
        _run(*self.prefix, "iptables", "-F")


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[tuple[str, Sequence[Host]]]:
    """Give the address of this process there, and so many other hosts."""
    own = f"pdm{os.getpid()}"
    bridge, names = f"{own}b", [f"{own}h{idx}" for idx in range(num_hosts)]
    first = f"10.{os.getpid() % 200 + 20}.7"
    try:
        for name in (bridge, *names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        _run("ip", "link", "add", own, "type", "veth", "peer", "name", "own", "netns", bridge)
        _run("ip", "-n", bridge, "link", "set", "own", "master", "bridge", "up")
        _run("ip", "addr", "add", f"{first}.1/24", "dev", own)
        _run("ip", "link", "set", own, "up")
        hosts = [Host(name, f"{first}.{idx + 2}") for idx, name in enumerate(names)]
        for host in hosts:
            pair = ("type", "veth", "peer", "name", host.name, "netns", bridge)
            _run("ip", "-n", host.name, "link", "add", "eth0", *pair)
            _run("ip", "-n", bridge, "link", "set", host.name, "master", "bridge", "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("ip", "-n", host.name, "link", "set", "eth0", "up")
        yield f"{first}.1", hosts
    finally:
        subprocess.run(["ip", "link", "del", own], capture_output=True)
        for name in (bridge, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
