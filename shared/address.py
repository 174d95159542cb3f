"""Where a process listens. Addresses come from configuration and membership, never requests."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequest

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


def ip_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text is; None: it is a name, or neither."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_v6(text: str) -> bool:
    return isinstance(ip_of(text), ipaddress.IPv6Address)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    ip = ip_of(host)
    return host == "localhost" if ip is None else ip.is_loopback


def is_host(text: str) -> bool:
    """Whether a name can be looked up, or is an IP address (RFC 1123, section 2.1; underscores,
    which container names have, too): a resolver may raise anything for what is neither."""
    labels = text.removesuffix(".").split(".")
    is_name = len(text) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
    return is_name or ip_of(text) is not None


def host_of(socket_address: Any) -> str:
    """Return the host of a socket's address, a link-local one with its zone: nobody reaches it
    without."""
    host, _, *more = socket_address
    if not (more and more[1]):
        return host
    return socket.getnameinfo(socket_address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
