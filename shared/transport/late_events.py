"""A defect of UCX's tcp, seen in 1.21 and still in its main of August 2026, and the way around it.

``uct_tcp_iface_handle_events`` (tcp_iface.c) tells a connection that it is readable and then that
it is writable, though the first may have freed it: so does the peer's word that it has closed, if
we have, too. UCX then calls through freed memory, and the process ends (SIGSEGV). Both come in one
look where two workers close an endpoint whose socket was full: over a slow link, or when one of
them had stopped.

What libuct frees therefore stays allocated, about 300 bytes a connection: it goes on saying that it
is closed, and a closed connection ignores events.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from ctypes import c_size_t, c_uint32, c_void_p, sizeof

_RTLD_DI_LINKMAP = 2
_STRTAB, _SYMTAB, _JMPREL, _PLTRELSZ = 5, 6, 23, 2
_ENTRY_BYTES = 24
"""Of a symbol and of a relocation, in ELF of 64 bits."""


def keep_what_closed() -> None:
    """Have libuct free none of its objects. Load it first; a build with other names, or that frees
    them in another way, stays as it is."""
    try:
        libuct, libucs = ctypes.CDLL("libuct.so.0"), ctypes.CDLL("libucs.so.0")
        nothing = ctypes.cast(libucs.ucs_empty_function, c_void_p)
    except (OSError, AttributeError):
        return
    for slot in _calls_of(libuct, b"ucs_class_free"):
        # Where all calls are bound at the start, the page is read-only by now.
        page, writable = slot & -mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE
        if ctypes.CDLL(None).mprotect(c_void_p(page), c_size_t(mmap.PAGESIZE), writable) == 0:
            c_void_p.from_address(slot).value = nothing.value


def _calls_of(library: ctypes.CDLL, function: bytes) -> Iterator[int]:
    """Yield where a library keeps the address by which it calls a function of another one (in ELF:
    an entry of its procedure linkage table)."""
    loaded = ctypes.POINTER(c_size_t * 3)()  # struct link_map: base address, name, dynamic section
    handle, found = c_void_p(library._handle), ctypes.byref(loaded)
    if ctypes.CDLL(None).dlinfo(handle, _RTLD_DI_LINKMAP, found) != 0:
        return
    base, _, dynamic = loaded.contents
    tables: dict[int, int] = {}
    while (entry := (c_size_t * 2).from_address(dynamic))[0]:
        tables[entry[0]] = entry[1]
        dynamic += sizeof(entry)
    if not tables.keys() >= {_STRTAB, _SYMTAB, _JMPREL, _PLTRELSZ}:
        return
    for at in range(tables[_JMPREL], tables[_JMPREL] + tables[_PLTRELSZ], _ENTRY_BYTES):
        offset, info, _ = (c_size_t * 3).from_address(at)
        symbol = tables[_SYMTAB] + (info >> 32) * _ENTRY_BYTES
        name = c_uint32.from_address(symbol).value
        if ctypes.string_at(tables[_STRTAB] + name) == function:
            yield base + offset
