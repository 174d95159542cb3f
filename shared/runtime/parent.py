"""The cord between a service and the process that started it (``pdmesh up``).

One inherited socket, named by ``PDMESH_PARENT_FD``. The child writes one JSON line for each slow
part of its start (its name), when it is ready (its addresses) or when it cannot start (the error);
the end of file on it means that the parent is gone, however it died, and the child stops: nothing
is left behind. Without the variable nothing happens: a service under compose or systemd has no
cord.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import orjson

PARENT_FD = "PDMESH_PARENT_FD"


class Parent:
    """The child's end of the cord; a no-op if there is none."""

    def __init__(self) -> None:
        text = os.environ.get(PARENT_FD, "")
        self._socket = socket.socket(fileno=int(text)) if text.isdigit() else None
        if self._socket is not None:
            self._socket.setblocking(False)
            # A child of ours that outlived us would keep the cord open, and our parent would not
            # see our end.
            os.set_inheritable(self._socket.fileno(), False)

    def tell(self, **facts: Any) -> None:
        """Write one JSON line; a parent that is gone already is no error."""
        if self._socket is not None:
            try:
                self._socket.send(orjson.dumps(facts) + b"\n")
            # Also one that is not read: the socket does not wait, and a start must not.
            except OSError:
                return

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` once on the running loop when the parent has died or closed its end."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        link = self._socket

        def readable() -> None:
            try:
                gone = link.recv(1024) == b""
            except BlockingIOError:
                return
            except OSError:
                gone = True
            if gone:
                loop.remove_reader(link.fileno())
                on_gone()

        loop.add_reader(link.fileno(), readable)

    def close(self) -> None:
        """Let go of the cord."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
