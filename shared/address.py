"""Where a process listens. Addresses come from configuration and membership, never requests."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequest

AddressInfo = tuple[int, int, int, str, Any]
"""What ``getaddrinfo`` knows of one address of a name."""

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Address:
    """Host and TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, param: str, default_port: int | None = None) -> Address:
    """Read ``host:port`` or ``[v6]:port``; with a default port ``host``, ``v6`` and ``[v6]``, too.

    Raises InvalidRequest, naming the flag ``param``: it is none of them.
    """
    text = text.strip()
    if default_port is not None and (":" not in text or text.endswith("]") or _is_v6(text)):
        host, port = text, str(default_port)
    else:
        host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise InvalidRequest(
            f"--{param.replace('_', '-')} must be host:port, for example 10.0.0.5:8200", param=param
        )
    return Address(host, int(port))


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_v6(text: str) -> bool:
    return isinstance(_ip(text), ipaddress.IPv6Address)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def is_host(text: str) -> bool:
    """Whether a name can be looked up, or is an IP address (RFC 1123, section 2.1; underscores,
    which container names have, too): a resolver may raise anything for what is neither."""
    labels = text.removesuffix(".").split(".")
    is_name = len(text) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
    return is_name or _ip(text) is not None


def host_of(socket_address: Any) -> str:
    """Return the host of a socket's address, a link-local one with its zone: nobody reaches it
    without."""
    host, _, *more = socket_address
    if not (more and more[1]):
        return host
    return socket.getnameinfo(socket_address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def of_this_machine(found: Sequence[AddressInfo]) -> Sequence[AddressInfo]:
    """Return those of a name's addresses that this machine has, all if it has none: ``localhost``
    is ::1, too, also where IPv6 is off."""
    return [info for info in found if _is_here(info)] or found


def _is_here(info: AddressInfo) -> bool:
    family, kind, _, _, (host, _, *more) = info
    try:
        with socket.socket(family, kind) as probe:
            probe.bind((host, 0, *more))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


async def listen_at(protocol: Any, host: str, port: int, **options: Any) -> asyncio.Server:
    """Listen at every address of a host that this machine has; '' = at all. options: of
    ``create_server``.

    Raises OSError: the port is in use, or nothing of the host can be listened at."""
    loop = asyncio.get_running_loop()
    hosts, kind, passive = [host], socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        if _ip(host) is None:
            found = await loop.getaddrinfo(host or None, port, type=kind, flags=passive)
            hosts = [info[4][0] for info in of_this_machine(found)]
        # With port 0 every family would get a port of its own, so only one is asked for.
        return await loop.create_server(protocol, hosts if port else hosts[:1], port, **options)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        reason = "the port is in use" if is_taken else error.strerror or error
        raise OSError(error.errno, f"cannot listen on {Address(host, port)}: {reason}") from error
