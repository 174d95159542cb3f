"""betterproto2 messages for grpclib, with a size limit in both directions.

grpclib reads a whole message into memory before anybody can object, so the limit is checked on the
five-byte prefix (``read_message``), before the body is asked for: flow control then keeps the rest
outside. Damage of any kind is one typed error; what is well-formed and still wrong (lengths,
ranges) is caught by ``codec.py``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeVar, cast

import betterproto2
from grpclib.encoding.base import CodecBase

from shared.errors import MeshError, RemoteProtocolError, TooLarge
from shared.messages.wire_format import Malformed, Reader, Room, Writer, reader, writer

PREFIX_BYTES = 5
"""Of a gRPC message: one byte that says whether it is compressed, four of length."""

MAX_MESSAGE_BYTES = 4 << 20
"""Both ways; what gRPC implementations accept by default."""

_OF_CLIENTS = ("GenerateRequest", "TokenizeRequest")
"""Messages in which an unknown field is refused."""

Message = TypeVar("Message")


class MessageCodec(CodecBase):
    """Encodes and decodes our messages, and those of the standard services (health, reflection).

    Raises TooLarge when sending, RemoteProtocolError, TooLarge or InvalidRequest when reading.
    """

    @property
    def __content_subtype__(self) -> str:
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        if not isinstance(message, message_type):
            raise TypeError(
                f"this call sends {message_type.__name__}, not {type(message).__name__}"
            )
        write = _writer_of(message_type)
        data = bytes(write(message)) if write else cast("bytes", message.SerializeToString())
        if len(data) > MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}"
            )
        return data

    def decode(self, data: bytes, message_type: Any) -> Any:
        try:
            read, is_of_client = _reader_of(message_type)
            if read is None:
                return message_type.FromString(data)
            return read(data, 0, len(data), None, Room(is_of_client=is_of_client))
        except MeshError:
            raise
        except Exception as error:
            raise RemoteProtocolError(
                f"the bytes are not a {message_type.__name__}: {_why(error)}",
                code="malformed_message",
            ) from error


def _why(error: Exception) -> str:
    """What is wrong with the bytes, in words of the wire instead of Python's."""
    match error:
        case IndexError():
            return "they end in the middle of it"
        case UnicodeDecodeError():
            return "a text in it is not UTF-8"
        case Malformed():
            return str(error)
        case _:  # of the protobuf library, which reads the standard services' messages
            return type(error).__name__


@cache
def _writer_of(message_type: Any) -> Writer | None:
    """None: a message of a standard service, which has its own way."""
    return writer(message_type) if issubclass(message_type, betterproto2.Message) else None


@cache
def _reader_of(message_type: Any) -> tuple[Reader | None, bool]:
    """Likewise; and whether an unknown field is refused."""
    if not issubclass(message_type, betterproto2.Message):
        return None, False
    return reader(message_type), message_type.__name__ in _OF_CLIENTS


CODEC: Final = MessageCodec()


def framed(data: bytes) -> bytes:
    """Return an encoded message with its prefix."""
    return len(data).to_bytes(PREFIX_BYTES, "big") + data  # the first byte: not compressed


async def read_message(stream: Any, message_type: type[Message]) -> Message | None:
    """Read one length-prefixed message from grpclib's HTTP/2 stream; None at its end.

    Raises TooLarge: the prefix announces more than MAX_MESSAGE_BYTES; nothing of the body was read.
    RemoteProtocolError: cut short, compressed, or no such message.
    """
    try:
        prefix = await stream.recv_data(PREFIX_BYTES)
        if not prefix:
            return None
        if prefix[0]:
            raise RemoteProtocolError("compressed messages are not supported", code="compressed")
        num_bytes = int.from_bytes(prefix[1:], "big")
        if num_bytes > MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"a message of {num_bytes} bytes is over the limit of {MAX_MESSAGE_BYTES}"
            )
        data = await stream.recv_data(num_bytes)
    except AssertionError:  # grpclib's word for an end in the middle of a message
        raise RemoteProtocolError("the stream ended in the middle of a message") from None
    if len(data) != num_bytes:
        raise RemoteProtocolError("the stream ended in the middle of a message")
    return CODEC.decode(data, message_type)
