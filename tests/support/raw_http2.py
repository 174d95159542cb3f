"""An HTTP/2 client without manners: sends what a test says, and reports what came back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamReset,
    TrailersReceived,
)

from shared.address import Address

Headers = Sequence[tuple[str | bytes, str | bytes]]


class RawClient:
    """One connection; ``h2`` is at the test's disposal, ``flush`` sends what it has."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.h2 = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.events: list[Event] = []
        self.is_closed = False

    async def flush(self) -> None:
        """Send what h2 wants to send."""
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def read_some(self) -> bool:
        """Read once; False at the end of the connection."""
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            data = b""
        if not data:
            self.is_closed = True
            return False
        self.events += self.h2.receive_data(data)
        with contextlib.suppress(ConnectionError):
            await self.flush()
        return True

    def headers(self, path: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
        """Return the headers of a gRPC call."""
        return [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "test"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *more,
        ]

    async def call(
        self, headers: Headers, data: bytes = b"", *, chunk: int | None = None
    ) -> dict[str, str]:
        """Make one call and return the headers and trailers it ended with."""
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, headers)
        for start in range(0, len(data), chunk or len(data) or 1):
            self.h2.send_data(stream_id, data[start : start + (chunk or len(data))])
            if chunk:
                self.h2.send_data(stream_id, b"")
        self.h2.end_stream(stream_id)
        await self.flush()
        return await self.answer(stream_id)

    async def answer(self, stream_id: int) -> dict[str, str]:
        """Read until the stream is over; return the headers and trailers that came."""
        while True:
            found: dict[str, str] = {}
            is_over = self.is_closed
            for event in self.events:
                if getattr(event, "stream_id", None) != stream_id:
                    is_over |= isinstance(event, ConnectionTerminated)
                elif isinstance(event, (ResponseReceived, TrailersReceived)):
                    found.update(event.headers)  # pyright: ignore[reportArgumentType, reportCallIssue]
                    is_over |= "grpc-status" in found or event.stream_ended is not None
                elif isinstance(event, StreamReset):
                    found["reset"] = str(event.error_code)
                    is_over = True
            if is_over:
                return found
            await self.read_some()

    def data_of(self, stream_id: int) -> bytes:
        """Return the message bytes that came on a stream."""
        return b"".join(
            event.data
            for event in self.events
            if isinstance(event, DataReceived) and event.stream_id == stream_id
        )


@contextlib.asynccontextmanager
async def raw_client(address: Address) -> AsyncIterator[RawClient]:
    """Connect and exchange settings."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    client = RawClient(reader, writer)
    try:
        client.h2.initiate_connection()
        await client.flush()
        await client.read_some()
        yield client
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def framed(message: bytes) -> bytes:
    """Return a gRPC message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message
