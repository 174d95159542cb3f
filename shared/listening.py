"""Listening at an address: at what this machine has of it."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from shared.address import Address, ip_of

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

BACKLOG: Final = 4096
"""Connections that the kernel keeps while the loop is busy, at most ``net.core.somaxconn``. Beyond,
it may forget one whose client believes it open, and sees it closed unread."""

FEW_FILES: Final = 8
"""So many before the limit of open files it is told: past it uvloop closes connections, and says so
nowhere."""

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
        told = _telling_of_files(protocol, Address(host, port))
        hosts = hosts if port else hosts[:1]
        return await loop.create_server(told, hosts, port, backlog=BACKLOG, **options)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        reason = "the port is in use" if is_taken else error.strerror or error
        # asyncio's own loop, since Python 3.13, names none for addresses that this machine lacks.
        number = error.errno or errno.EADDRNOTAVAIL
        raise OSError(number, f"cannot listen on {Address(host, port)}: {reason}") from error


def _telling_of_files(protocol: Callable[[], Any], address: Address) -> Callable[[], Any]:
    """Return what makes a connection's protocol and says, once, that the open files run out."""
    limit, was_told = resource.getrlimit(resource.RLIMIT_NOFILE)[0], False

    def made() -> Any:
        nonlocal was_told
        if not was_told and _next_file(limit) >= limit - FEW_FILES >= 0:
            was_told = True
            _log.warning(
                "open files run out",
                address=str(address),
                limit=limit,
                reason="connections past the limit are closed without an answer: raise it "
                "(systemd: LimitNOFILE=, containers: --ulimit nofile=, a shell: ulimit -Hn)",
            )
        return protocol()

    return made


def _next_file(limit: int) -> int:
    """Return the number that the next file would get, the least that is free."""
    try:
        number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return limit
    os.close(number)
    return number
