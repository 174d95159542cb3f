"""The client's side of a call: raw bidirectional streams, server streams and unary calls.

    async with open_stream(channel, WORKER_SESSION) as stream:
        await stream.send(command)
        event = await stream.receive()     # None when the server has ended well

Exceptions of grpclib, h2 and the socket are mapped once, here, to MeshError: the error that the
server raised if it told us (trailer ``pdmesh-error``), WorkerLost if the connection broke or could
not be made, RemoteProtocolError if the peer broke the rules. Generated stubs are not used: their
bidi client hangs when the request side fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

from grpclib.const import Status
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.metadata import decode_grpc_message
from grpclib.utils import Wrapper
from h2.errors import ErrorCodes
from h2.exceptions import H2Error

from shared.errors import MeshError, RemoteProtocolError, WorkerLost
from shared.messages.message_codec import CODEC, MAX_MESSAGE_BYTES, framed, read_message
from shared.rpc.methods import Method
from shared.rpc.status import ERROR_TRAILER, error_from_grpc
from shared.tcp_info import round_trip_s

Request = TypeVar("Request")
Reply = TypeVar("Reply")

_SENDS_BEFORE_YIELD = 64
CONNECT_WITHIN_S = 5.0


class ClientStream(Generic[Request, Reply]):
    """One call in progress. One task may receive while another sends."""

    def __init__(self, raw: Any, method: Method[Request, Reply]) -> None:
        self._raw = raw
        self._method = method
        self._num_sends = 0
        self._is_over = False
        self._error: MeshError | None = None
        self._headers: dict[str, str] | None = None
        self.trailers: Mapping[str, str] = {}
        """Text metadata of the end of the call; empty until ``receive`` returned None or raised."""

    async def send(self, message: Request, *, end: bool = False) -> None:
        """Send one message; ``end`` also ends our side. Waits while the peer's window is full.

        Raises MeshError: the call is over (its error), or the message is too large (TooLarge).
        """
        if self._error is not None:
            raise self._error
        try:
            await self._raw.send_message(message, end=end)
        except Exception as error:
            self._fail(error)
        # See service.py: grpclib's send need not yield, and a long burst would hold the loop.
        self._num_sends += 1
        if self._num_sends % _SENDS_BEFORE_YIELD == 0:
            await asyncio.sleep(0)

    def send_nowait(self, message: Request) -> bool:
        """Send one message if nothing has to wait; False = nothing was sent, ``send`` must do it.

        Nobody may be amid a ``send``. Raises MeshError: see ``send``.
        """
        if self._error is not None:
            raise self._error
        try:
            data = framed(CODEC.encode(message, self._method.request_type))
            return self._raw._stream.send_data_nowait(data)
        except Exception as error:
            self._fail(error)

    def receive_nowait(self) -> Reply | None:
        """Return the next message if it has arrived in one piece, else None.

        Raises MeshError: the call failed.
        """
        if self._is_over:
            return None
        if self._error is not None:
            raise self._error
        if self._headers is None:  # what kind of answer follows is not known yet
            return None
        try:
            data = self._raw._stream.buffer.take_message(MAX_MESSAGE_BYTES)
            return None if data is None else CODEC.decode(data, self._method.reply_type)
        except Exception as error:
            self._fail(error)

    async def receive(self) -> Reply | None:
        """Return the next message, or None when the server ended the call with status OK.

        Raises MeshError: the call failed.
        """
        message = self.receive_nowait()
        if message is not None or self._is_over:
            return message
        try:
            stream: Any = self._raw._stream
            interrupt: _Interrupt = self._raw._wrapper
            if self._headers is None:
                if stream.headers is None:
                    with interrupt:
                        await stream.recv_headers()
                self._headers = dict(stream.headers or ())
            if "grpc-status" not in self._headers:  # else it failed before any message
                message = await self._read(stream, interrupt)
            if message is None:
                self._finish(dict(stream.trailers or ()) or self._headers)
                self._is_over = True
        except Exception as error:
            self._fail(error)
        return message

    async def _read(self, stream: Any, interrupt: _Interrupt) -> Reply | None:
        headers = self._headers or {}
        if headers.get(":status") != "200":
            raise RemoteProtocolError(f"the server answered HTTP {headers.get(':status')}")
        if not headers.get("content-type", "").startswith("application/grpc"):
            raise RemoteProtocolError("the server does not speak gRPC")
        if not stream.buffer._eof:
            try:
                with interrupt:
                    return await read_message(stream, self._method.reply_type)
            except StreamTerminatedError:
                # A server that fails a call resets it once all is said: first read what was said.
                if not stream.buffer._eof:
                    raise
        return await read_message(stream, self._method.reply_type)  # never waits

    def _finish(self, trailers: dict[str, str]) -> None:
        """Take the end of the call in; raises what it says."""
        self.trailers = {
            key: value
            for key, value in trailers.items()
            if not key.startswith((":", "grpc-")) and not key.endswith("-bin")
        }
        error = _told(trailers)
        if error is not None:
            raise error
        if "grpc-status" not in trailers:
            raise RemoteProtocolError("the server ended the call without a status")

    async def __aiter__(self) -> AsyncIterator[Reply]:
        """Iterate over ``receive`` until None."""
        while (message := await self.receive()) is not None:
            yield message

    def cancel(self) -> None:
        """Reset the call now, without waiting; later operations raise. Idempotent."""
        if not self._is_over and self._error is None:
            self._error = WorkerLost("the call was cancelled here", code="cancelled")
            _reset(self._raw)
            self._raw._wrapper.cancel(StreamTerminatedError("cancelled"))

    def forget(self) -> None:
        """Let go of what the call ended with: it knows this stream, by the frames it came through,
        and only the garbage collector would free the two."""
        self._is_over, self._error = True, None
        self._raw._wrapper.forget()

    def drop(self) -> None:
        """Drop the call's connection without another byte: nobody is at its other end, who would
        take what is left or, with TLS, say goodbye. Allowed at any time."""
        self._raw._stream._transport.abort()

    @property
    def round_trip_s(self) -> float:
        return round_trip_s(self._raw._stream._transport)

    def _fail(self, failure: Exception) -> NoReturn:
        """Raise the call's error for whatever grpclib, h2 and the socket raise; always the same
        one once it is known."""
        try:
            with _mapped():
                raise failure
        except MeshError as error:
            # A message that is too large has not left: the call goes on without it.
            if self._error is None and error.type != "too_large":
                stream = self._raw._stream
                # What the server said before the connection broke says more than that it broke.
                told = _told(dict(stream.trailers or stream.headers or ()))
                self._error = told if isinstance(error, WorkerLost) and told else error
            raise (self._error or error) from error.__cause__
        finally:
            del failure  # has come through this frame, which would keep it


class _Interrupt(Wrapper):
    """Wakes the tasks that wait on a stream when it breaks.

    grpclib's own wakes them by cancelling and then replaces the CancelledError, but leaves the
    cancellation counted, which breaks every ``timeout`` and TaskGroup round the wait. This one
    takes the count back, and lets a cancellation from elsewhere win.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[asyncio.Task[Any], int] = {}
        self._woken: dict[asyncio.Task[Any], int] = {}

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = task.cancelling()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._waiting.pop(task, None)
        num_cancels = self._woken.pop(task, None)
        if num_cancels is None or self._error is None:
            return
        is_ours = task.uncancel() <= num_cancels
        del task  # which keeps what it ends with, and that this frame
        if is_ours and exc_type is asyncio.CancelledError:
            raise self._error

    def cancel(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        self.cancelled = True
        self._woken.update(self._waiting)
        for task in self._waiting:
            task.cancel()

    def forget(self) -> None:
        """Let go of the error, unless somebody has yet to hear of it."""
        if not self._waiting:
            self._error = None


@contextlib.asynccontextmanager
async def open_stream(
    channel: Any, method: Method[Request, Reply]
) -> AsyncGenerator[ClientStream[Request, Reply]]:
    """Open a call; the block's end resets it if it is not over. Entering connects.

    Raises WorkerLost: the server cannot be reached.
    """
    raw = channel.request(method.path, method.cardinality, method.request_type, method.reply_type)
    raw._wrapper = _Interrupt()
    try:
        connecting = asyncio.timeout(CONNECT_WITHIN_S)
        with _mapped():
            try:
                async with connecting:
                    await raw.send_request()
            except TimeoutError:
                if not connecting.expired():
                    raise
                raise WorkerLost(f"no connection within {CONNECT_WITHIN_S:g} s") from None
            finally:
                del (
                    connecting
                )  # knows this task, which keeps what it ends with, and that this frame
        stream = ClientStream(raw, method)
        try:
            yield stream
        finally:
            stream.forget()
    finally:
        # In place of the end of grpclib's own ``async with``, which is never entered: without the
        # reset the server would go on for nobody, without the release the stream would stay in the
        # books.
        if raw._send_request_done:
            _reset(raw)
            with contextlib.suppress(H2Error, AttributeError, KeyError):
                raw._release_stream()


@contextlib.contextmanager
def _mapped() -> Generator[None]:
    """Map what grpclib, h2 and the socket raise."""
    try:
        yield
    except MeshError:
        raise
    except StreamTerminatedError as error:
        raise WorkerLost(f"the connection broke: {error}") from error
    except (ProtocolError, H2Error) as error:
        raise WorkerLost(f"the call is over: {error}") from error
    except (OSError, AttributeError, UnicodeError) as error:
        # AttributeError: grpclib drops its transport when a connection closes. UnicodeError: the
        # host is no name at all.
        raise WorkerLost(f"the server cannot be reached: {error}") from error


def _told(trailers: dict[str, str]) -> MeshError | None:
    """Return the error that the end of a call tells; None if there is none."""
    status = trailers.get("grpc-status", "0")
    if status == "0":
        return None
    try:
        code = Status(int(status))
    except ValueError:
        code = Status.UNKNOWN
    message = decode_grpc_message(trailers.get("grpc-message", ""))
    return error_from_grpc(code, message, trailers.get(ERROR_TRAILER))


def _reset(raw: Any) -> None:
    """Tell the server that nobody listens any more, if the call is still open."""
    with contextlib.suppress(H2Error, AttributeError, OSError):
        if raw._stream.closable:
            raw._stream.reset_nowait(ErrorCodes.CANCEL)
