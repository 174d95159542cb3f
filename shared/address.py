"""Where a process listens. Addresses come from configuration and membership, never requests."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

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


def _is_v6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_host(text: str) -> bool:
    """Whether a name can be looked up, or is an IP address (RFC 1123, section 2.1; underscores,
    which container names have, too): a resolver may raise anything for what is neither."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        return len(text) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
    return True
