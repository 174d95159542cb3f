"""The few calls of UCX's C API that UCXX's Python classes do not offer, called on UCXX's handles.

UCXX owns context, worker, addresses, endpoints and progress. Its Python request object, however,
can neither be cancelled nor says how many bytes arrived; it cancels itself when dropped; and it
lets go of the GIL at every look, so that under load each look may cost a whole switch interval. Tag
messages are therefore posted here. ``PyDLL`` keeps the GIL: every call is short, the long one
(progress) stays with UCXX.

Structures and constants: ``ucp/api/ucp.h``, ``ucp_def.h``, ``ucs/type/status.h`` of UCX 1.18 to
1.21; the mask at the head of each structure keeps them compatible. Load only after ``import ucxx``:
that brings UCX into the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any

OK = 0
IN_PROGRESS = 1
CANCELED = -16

_FIELD_CALLBACK = 1 << 1
_FIELD_USER_DATA = 1 << 2
_FIELD_DATATYPE = 1 << 3
_FIELD_FLAGS = 1 << 4
_FIELD_RECV_INFO = 1 << 7
_CLOSE_FORCE = 1
_CONTIG_BYTES = 1 << 3  # ucp_dt_make_contig(1)
_EP_ATTR_TRANSPORTS = 1 << 3
_LOWEST_ERROR = (1 << 64) - 100  # UCS_ERR_LAST as a pointer
_ALL_TAG_BITS = (1 << 64) - 1
_MAX_LANES = 16


class _TagInfo(Structure):
    _fields_ = (("sender_tag", c_uint64), ("length", c_size_t))


class _Param(Structure):
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    )


class _TransportEntry(Structure):
    _fields_ = (("transport_name", c_char_p), ("device_name", c_char_p))


class _EndpointAttr(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_char * 128),
        ("remote_sockaddr", ctypes.c_char * 128),
        ("entries", POINTER(_TransportEntry)),
        ("num_entries", c_uint),
        ("entry_size", c_size_t),
        ("user_data", c_void_p),
    )


_SEND_CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_int8, c_void_p)
_RECV_CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_int8, c_void_p, c_void_p)

OnComplete = Callable[[int, int, int], None]
"""(token, status, received bytes; 0 for sends). Called inside progress, cancel or close; must not
raise."""


def status_of(pointer: int | None) -> int:
    """Status of a ``ucs_status_ptr_t``: OK, a negative error, or IN_PROGRESS for a request."""
    if not pointer:
        return OK
    return pointer - (1 << 64) if pointer >= _LOWEST_ERROR else IN_PROGRESS


class TagApi:
    """Tag messages of one worker. One thread only, and all buffers must outlive their requests."""

    def __init__(self, worker_handle: int, on_complete: OnComplete) -> None:
        self._lib = declared("libucp.so.0", _UCP)
        self._ucs, self._libc = declared("libucs.so.0", _UCS), declared(None, _LIBC)
        self._worker = worker_handle
        self._on_complete = on_complete
        free = self._lib.ucp_request_free

        def on_sent(request: int, status: int, token: int) -> None:
            on_complete(token, status, 0)
            free(request)

        def on_received(request: int, status: int, info: int | None, token: int) -> None:
            length = c_size_t.from_address(info + 8).value if info and status == OK else 0
            on_complete(token, status, length)
            free(request)

        self._on_sent = _SEND_CALLBACK(
            on_sent
        )  # UCX keeps only the address: the object must live here
        self._on_received = _RECV_CALLBACK(on_received)
        self._info = _TagInfo()
        common = _FIELD_CALLBACK | _FIELD_USER_DATA | _FIELD_DATATYPE
        self._send_param = _Param(
            op_attr_mask=common,  # no hint "one of many": with it UCX copies where tcp need not
            callback=ctypes.cast(self._on_sent, c_void_p).value,
            datatype=_CONTIG_BYTES,
        )
        self._recv_param = _Param(
            op_attr_mask=common | _FIELD_RECV_INFO,
            callback=ctypes.cast(self._on_received, c_void_p).value,
            datatype=_CONTIG_BYTES,
            recv_info=ctypes.addressof(self._info),
        )
        self._send_ref = byref(self._send_param)
        self._recv_ref = byref(self._recv_param)
        self._tag_send = self._lib.ucp_tag_send_nbx
        self._tag_recv = self._lib.ucp_tag_recv_nbx

    def send(self, endpoint_handle: int, pointer: int, num_bytes: int, tag: int, token: int) -> int:
        """Post a send; return the request, or 0 if ``on_complete`` was already called. token: not
        0."""
        self._send_param.user_data = token
        result = self._tag_send(endpoint_handle, pointer, num_bytes, tag, self._send_ref)
        status = status_of(result)
        if status != IN_PROGRESS:
            self._on_complete(token, status, 0)
            return 0
        return result

    def receive(self, pointer: int, num_bytes: int, tag: int, token: int) -> int:
        """Post a receive for exactly this tag; return the request, or 0 if ``on_complete`` was
        already called."""
        self._recv_param.user_data = token
        result = self._tag_recv(
            self._worker, pointer, num_bytes, tag, _ALL_TAG_BITS, self._recv_ref
        )
        status = status_of(result)
        if status != IN_PROGRESS:
            self._on_complete(token, status, self._info.length if status == OK else 0)
            return 0
        return result

    def cancel(self, request: int) -> None:
        """Withdraw a receive that matched nothing yet; anything else goes on. ``on_complete``
        tells."""
        self._lib.ucp_request_cancel(self._worker, request)

    def swallow_unexpected(self) -> None:
        """Drop messages that came for no receive. They are matched with no room at all, so that a
        rendezvous ends without moving its data."""
        param = _Param(op_attr_mask=_FIELD_DATATYPE, datatype=_CONTIG_BYTES)
        info = _TagInfo()
        while message := self._lib.ucp_tag_probe_nb(self._worker, 0, 0, 1, byref(info)):
            result = self._lib.ucp_tag_msg_recv_nbx(self._worker, None, 0, message, byref(param))
            if status_of(result) == IN_PROGRESS:
                self._lib.ucp_request_free(result)  # marks it to be freed when complete

    def force_close(self, endpoint_handle: int) -> None:
        """Close an endpoint that failed. UCXX never closes such an endpoint itself: its close
        returns early once the error callback ran, so UCX would keep it until the worker ends."""
        param = _Param(op_attr_mask=_FIELD_FLAGS, flags=_CLOSE_FORCE)
        result = self._lib.ucp_ep_close_nbx(endpoint_handle, byref(param))
        if status_of(result) == IN_PROGRESS:
            self._lib.ucp_request_free(result)

    def lanes(self, endpoint_handle: int) -> list[tuple[str, str]]:
        """(transport, device) of each lane, in UCX's order; empty if UCX cannot tell yet."""
        entries = (_TransportEntry * _MAX_LANES)()
        attr = _EndpointAttr(
            field_mask=_EP_ATTR_TRANSPORTS,
            entries=ctypes.cast(entries, POINTER(_TransportEntry)),
            num_entries=_MAX_LANES,
            entry_size=sizeof(_TransportEntry),
        )
        if self._lib.ucp_ep_query(endpoint_handle, byref(attr)) != OK:
            return []
        return [
            ((entry.transport_name or b"").decode(), (entry.device_name or b"").decode())
            for entry in entries[: attr.num_entries]
        ]

    def describe(self, endpoint_handle: int) -> tuple[str, str]:
        """What UCX says of an endpoint and of its worker: the tables that ``protocol_table`` reads.

        UCX 1.21 prints a worker's tables only while it logs at level debug, so for this moment it
        does.
        """
        endpoint = self._printed(self._lib.ucp_ep_print_info, endpoint_handle)
        level = ctypes.create_string_buffer(64)
        self._ucs.ucs_global_opts_get_value(b"LOG_LEVEL", level, sizeof(level))
        self._ucs.ucs_global_opts_set_value(b"LOG_LEVEL", b"debug")
        try:
            return endpoint, self._printed(self._lib.ucp_worker_print_info, self._worker)
        finally:
            self._ucs.ucs_global_opts_set_value(b"LOG_LEVEL", level.value)

    def _printed(self, print_info: Callable[[int, int], None], handle: int) -> str:
        text, size = c_char_p(), c_size_t()
        stream = self._libc.open_memstream(byref(text), byref(size))
        if not stream:
            return ""
        print_info(handle, stream)
        self._libc.fclose(stream)
        printed = ctypes.string_at(text, size.value).decode(errors="replace")
        self._libc.free(text)
        return printed

    def text_of(self, status: int) -> str:
        """UCX's words for a status."""
        return self._lib.ucs_status_string(status).decode()


def declared(library: str | None, functions: tuple[tuple[str, Any, tuple[Any, ...]], ...]) -> Any:
    """Return a library, whose calls keep the GIL, with what these functions return and take. It is
    in the process already: resolved by soname, not searched for."""
    found = ctypes.PyDLL(library)
    for name, returns, takes in functions:
        function = getattr(found, name)
        function.restype, function.argtypes = returns, takes
    return found


_UCP = (
    ("ucp_tag_send_nbx", c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, c_void_p)),
    ("ucp_tag_recv_nbx", c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, c_void_p)),
    ("ucp_tag_probe_nb", c_void_p, (c_void_p, c_uint64, c_uint64, c_int, c_void_p)),
    ("ucp_tag_msg_recv_nbx", c_void_p, (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)),
    ("ucp_request_cancel", None, (c_void_p, c_void_p)),
    ("ucp_request_free", None, (c_void_p,)),
    ("ucp_ep_close_nbx", c_void_p, (c_void_p, c_void_p)),
    ("ucp_ep_query", c_int8, (c_void_p, c_void_p)),
    ("ucs_status_string", c_char_p, (c_int8,)),
    ("ucp_ep_print_info", None, (c_void_p, c_void_p)),
    ("ucp_worker_print_info", None, (c_void_p, c_void_p)),
)
_UCS = (
    ("ucs_global_opts_get_value", c_int, (c_char_p, c_char_p, c_size_t)),
    ("ucs_global_opts_set_value", c_int, (c_char_p, c_char_p)),
)
_LIBC = (
    ("open_memstream", c_void_p, (c_void_p, c_void_p)),
    ("fclose", c_int, (c_void_p,)),
    ("free", None, (c_void_p,)),
)
