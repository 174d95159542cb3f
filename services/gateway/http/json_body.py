"""Bytes to typed bodies: UTF-8, JSON, depth and types, each refused with its place and without an
echo.

Knows no endpoint: the caller brings a msgspec decoder of its body's type.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from services.gateway.limits import MAX_JSON_BRACKETS, MAX_JSON_DEPTH, refusal
from shared.errors import InvalidRequest

Body = TypeVar("Body")

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ALL_SQUARE = bytes.maketrans(b"{}", b"[]")
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def parse_body(data: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Parse and type-check a body.

    Raises InvalidRequest: not UTF-8, not JSON (with the position), too deeply nested, or a field of
    the wrong type (``param`` is its path). No message repeats the body's content.
    """
    try:
        data.decode("utf-8")
        body = decoder.decode(data)
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
    brackets = _STRING.sub(b"", data).translate(_ALL_SQUARE, _NOT_BRACKETS)
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
