"""Listening at an address: at what this machine has of it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import Any

from shared.address import Address, ip_of

AddressInfo = tuple[int, int, int, str, Any]
"""What ``getaddrinfo`` knows of one address of a name."""


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
        if ip_of(host) is None:
            found = await loop.getaddrinfo(host or None, port, type=kind, flags=passive)
            hosts = [info[4][0] for info in of_this_machine(found)]
        # With port 0 every family would get a port of its own, so only one is asked for.
        return await loop.create_server(protocol, hosts if port else hosts[:1], port, **options)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        reason = "the port is in use" if is_taken else error.strerror or error
        raise OSError(error.errno, f"cannot listen on {Address(host, port)}: {reason}") from error
