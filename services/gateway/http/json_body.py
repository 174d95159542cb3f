"""Bytes to typed bodies: compression, UTF-8, JSON, depth and types, each refused with its place
and without an echo.

Knows no endpoint: the caller brings a msgspec decoder of its body's type.
"""

from __future__ import annotations

import codecs
import re
import zlib
from typing import TypeVar

import msgspec

from services.gateway.http.messages import too_large
from services.gateway.limits import MAX_BODY_BYTES, MAX_JSON_BRACKETS, MAX_JSON_DEPTH, refusal
from shared.errors import InvalidRequest

Body = TypeVar("Body")

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ALL_SQUARE = bytes.maketrans(b"{}", b"[]")
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)")
_MAX_MEMBERS = 256
"""Members of a gzip body. Each costs a copy of those behind it: a body full of empty ones would
hold the gateway up for many seconds."""
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def plain(data: bytes, encoding: str) -> bytes:
    """Return a body as it was before it was compressed; no more is unpacked than a body may have.

    encoding: of the header Content-Encoding. Raises TooLarge, InvalidRequest.
    """
    match encoding.lower():
        case "identity":
            return data
        case "gzip" | "x-gzip":
            window = 16 + zlib.MAX_WBITS
        case "deflate":
            window = zlib.MAX_WBITS
        case _:
            raise refusal("content-encoding", "is not served: gzip, deflate, or none")
    unpacked = bytearray()
    try:
        for _ in range(_MAX_MEMBERS):
            part = zlib.decompressobj(window)
            unpacked += part.decompress(data, MAX_BODY_BYTES + 1 - len(unpacked))
            if len(unpacked) > MAX_BODY_BYTES:
                raise too_large()
            if not part.eof:
                raise refusal("content-encoding", "the compressed body ends too soon")
            data = part.unused_data  # gzip may have several members
            if not data:
                return bytes(unpacked)
    except zlib.error:
        raise refusal("content-encoding", f"the body is not {encoding.lower()}") from None
    raise refusal("content-encoding", f"the body has more than {_MAX_MEMBERS} compressed members")


def parse_body(data: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Parse and type-check a body.

    Raises InvalidRequest: not UTF-8, not JSON (with the position), too deeply nested, or a field of
    the wrong type (``param`` is its path). No message repeats the body's content.
    """
    data = data.removeprefix(codecs.BOM_UTF8)  # of editors on Windows; json.loads takes it, too
    try:
        data.decode("utf-8")
        body = decoder.decode(data)
        # After the decoder, which has bounds of its own: brackets are counted in valid JSON alone.
        _check_depth(data)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not UTF-8 at byte {error.start}", code="invalid_json"
        ) from None
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").lstrip(".")
        missing = _MISSING.fullmatch(message)
        if missing is not None:
            path = f"{path}.{missing[1]}".lstrip(".")
            message = "is required"
        raise refusal(path, message) from None
    except msgspec.DecodeError as error:
        found = _BYTE_POSITION.search(str(error))
        position = found[1] if found is not None else str(len(data))
        raise InvalidRequest(
            f"the body is not valid JSON at byte {position}", code="invalid_json"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    return body


def _check_depth(data: bytes) -> None:
    """Raise InvalidRequest if valid JSON is nested deeper than MAX_JSON_DEPTH, at the speed of
    C."""
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return
    # In this order: behind an escaped backslash a quote ends its string.
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])  # of strings
    brackets = outside.translate(_ALL_SQUARE, _NOT_BRACKETS)
    if len(brackets) > MAX_JSON_BRACKETS:
        raise InvalidRequest("the body has too many lists and objects", code="invalid_json")
    # Every round takes away the innermost level of what is left.
    for _ in range(MAX_JSON_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest(
        f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="invalid_json"
    )
