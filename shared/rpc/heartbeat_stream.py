"""One long-lived stream with heartbeats: an outbox that never makes its caller wait, and one end.

Both ends of a pair stream use it. A peer that is silent is suspect, then dead
(``shared/liveness.py``); the outbox is bounded, and a peer that lets it fill up is as good as dead.
It does not know what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shared.errors import MeshError, WorkerLost
from shared.liveness import Liveness, LivenessRule, PeerState
from shared.runtime.groups import TaskGroup, plain_errors

Out = TypeVar("Out")
In = TypeVar("In")
Sends = TypeVar("Sends", contravariant=True)
Receives = TypeVar("Receives", covariant=True)

MAX_OUTBOX = 10_000

TIMER_S = 0.001
"""By which a timer may come early."""


class RawStream(Protocol[Sends, Receives]):
    """Either side of a call. ``send_nowait`` and ``receive_nowait`` do at once what needs no wait;
    a message that leaves so wakes no task."""

    async def send(self, message: Sends) -> None:
        """Send one message; waits while the peer's window is full."""
        ...

    def send_nowait(self, message: Sends) -> bool:
        """Send one message, or return False: ``send`` must do it. Nobody may be amid a ``send``."""
        ...

    async def receive(self) -> Receives | None:
        """Return the next message; None: the peer has ended its side."""
        ...

    def receive_nowait(self) -> Receives | None:
        """Return the next message if it is there, else None."""
        ...

    @property
    def round_trip_s(self) -> float:
        """To the peer and back at least, 0 = next to nothing, or unknown."""
        ...


class HeartbeatStream(Generic[Out, In]):
    """A raw stream after its handshake.

    peer: what to call it in errors, e.g. "decode worker". on_suspect: called with True when the
    peer has been silent so long that nothing new should be given to it, and with False when it is
    heard again. on_sent: called when a message was given to the connection; heartbeats are not
    told.
    """

    def __init__(
        self,
        stream: RawStream[Out, In],
        *,
        heartbeat: Out,
        peer: str,
        rule: LivenessRule | None = None,
        on_suspect: Callable[[bool], None] | None = None,
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._stream = stream
        self._on_sent = on_sent
        self._is_sending = False
        self._heartbeat = heartbeat
        self._peer = peer
        self._on_suspect = on_suspect
        self._is_suspect = False
        loop = self._loop = asyncio.get_running_loop()
        self._liveness = Liveness(loop.time(), rule)
        self._beat_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._outbox: deque[Out] = deque()
        self._has_mail = asyncio.Event()
        self._end: asyncio.Future[MeshError] = loop.create_future()

    @property
    def silence_s(self) -> float:
        """Seconds since the peer was heard."""
        return self._liveness.silence_s(self._loop.time())

    def send(self, message: Out, *, at_once: bool = True) -> None:
        """Send a message, or queue it, in order; after the end it is dropped.

        at_once: False = it waits until a task has its turn, so that what the caller does next comes
        before it.
        """
        if self._end.done():
            return
        try:
            # Nothing may overtake what waits, nor break into a send that waits for the peer's
            # window.
            may_pass = at_once and not self._outbox and not self._is_sending
            if may_pass and self._stream.send_nowait(message):
                self._note_sent()
                self._on_sent()
                return
        except MeshError as error:
            self.close(error)
            return
        self._queue(message)
        if len(self._outbox) > MAX_OUTBOX:
            self.close(WorkerLost(f"the {self._peer} left {MAX_OUTBOX} messages unread"))

    def _note_sent(self) -> None:
        """Whatever left is heard as a heartbeat would be."""
        self._beat_at = self._loop.time() + self._liveness.rule.interval_s

    def _queue(self, message: Out) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    @property
    def is_over(self) -> bool:
        """Whether what is sent now is dropped."""
        return self._end.done()

    def close(self, error: MeshError) -> None:
        """End the stream; ``run`` raises the first error that was given. Returns at once."""
        if not self._end.done():
            self._end.set_result(error)

    async def run(self, on_message: Callable[[In], None]) -> MeshError:
        """Send, receive and beat until the stream is over; returns why.

        on_message: called for every message, heartbeats too; a MeshError it raises ends the stream.
        Cancelling it ends the stream, too.
        """
        self._note_sent()  # the handshake
        self._sleep(self._loop.time())
        try:
            with plain_errors():
                async with TaskGroup() as tasks:
                    tasks.create_task(self._write())
                    tasks.create_task(self._read(on_message))
                    # An end is an error like those of the two loops: whichever comes first ends
                    # the others.
                    raise await self._end
        except MeshError as error:
            self.close(error)
            return error
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self.close(WorkerLost("the stream was cancelled"))

    async def _write(self) -> None:
        while True:
            await self._has_mail.wait()
            # Cleared before the outbox is emptied: what is queued during a send sets it again.
            self._has_mail.clear()
            while self._outbox:
                message = self._outbox.popleft()
                await self._send_next(message)
                if message is not self._heartbeat:
                    self._on_sent()

    async def _send_next(self, message: Out) -> None:
        self._is_sending = True
        await self._stream.send(message)
        self._note_sent()
        self._is_sending = False  # one that failed ends the stream: nothing may follow it

    async def _read(self, on_message: Callable[[In], None]) -> None:
        while (message := await self._stream.receive()) is not None:
            self._liveness.heard(self._loop.time())
            self._suspect(False)
            # What came in one read is taken without a wait, which would be a turn of the loop for
            # each.
            while message is not None:
                on_message(message)
                message = self._stream.receive_nowait()
        raise WorkerLost(f"the {self._peer} ended the stream")

    # Timers and no tasks: a gateway has hundreds of streams, and each beats five times a second.

    def _sleep(self, now: float) -> None:
        at = min(self._beat_at, self._liveness.next_check_at(now))
        self._timer = self._loop.call_at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        """Judge the peer by its silence, and beat."""
        if self._end.done():
            return
        now = self._loop.time()
        # This loop may have stood still itself: what it has not read is not the peer's silence.
        self._liveness.slept(at, now)
        state = self._liveness.state(now)
        if state is not PeerState.ALIVE:
            # Asked only of a peer that is late: it is a system call, and there are hundreds of
            # streams.
            self._liveness.round_trip_s = self._stream.round_trip_s
            state = self._liveness.state(now)
        self._suspect(state is not PeerState.ALIVE)
        if state is PeerState.DEAD:
            silence_s = self._liveness.silence_s(now)
            words = f"the {self._peer} was silent for {silence_s:.1f} s"
            self.close(WorkerLost(words, code="silent"))
            return
        if now >= self._beat_at - TIMER_S:
            self._beat()
        self._sleep(now)

    def _beat(self) -> None:
        self._note_sent()
        if self._outbox or self._is_sending:
            return  # what waits is heard as well
        try:
            if not self._stream.send_nowait(self._heartbeat):
                self._queue(self._heartbeat)
        except MeshError as error:
            self.close(error)

    def _suspect(self, is_suspect: bool) -> None:
        if is_suspect is not self._is_suspect:
            self._is_suspect = is_suspect
            if self._on_suspect is not None:
                self._on_suspect(is_suspect)
