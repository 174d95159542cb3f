"""One long-lived stream with heartbeats: an outbox that never makes its caller wait, and one end.

Both ends of a pair stream use it. A peer that is silent is suspect, then dead
(``shared/liveness.py``); the outbox is bounded, and a peer that lets it fill up is as good as dead.
Of the messages it knows which are heartbeats.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shared import wire
from shared.errors import MeshError, WorkerLost, without_frames
from shared.liveness import IDLE, Liveness, LivenessRule, PeerState
from shared.runtime.groups import TaskGroup, plain_errors


class MeshMessage(Protocol):
    """What comes in: a heartbeat, or something else."""

    @property
    def heartbeat(self) -> wire.Heartbeat | None: ...


Out = TypeVar("Out")
In = TypeVar("In", bound=MeshMessage)
Sends = TypeVar("Sends", contravariant=True)
Receives = TypeVar("Receives", covariant=True)

MAX_OUTBOX = 10_000


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


def _nothing() -> None:
    pass


def _is_idle() -> bool:
    return False


class HeartbeatStream(Generic[Out, In]):
    """A raw stream after its handshake.

    heartbeat: makes one that asks, or answers. peer: what to call it in errors, e.g. "decode
    worker". is_busy: whether anybody waits for the peer; while nobody does it is judged by
    ``IDLE``. on_suspect: called with True when the peer has been silent so long that nothing new
    should be given to it, and with False when it is heard again. on_sent: called when a message
    was given to the connection; heartbeats are not told.
    """

    def __init__(
        self,
        stream: RawStream[Out, In],
        *,
        heartbeat: Callable[[bool], Out],
        peer: str,
        rule: LivenessRule | None = None,
        is_busy: Callable[[], bool] = lambda: True,
        on_suspect: Callable[[bool], None] | None = None,
        on_sent: Callable[[], None] = _nothing,
    ) -> None:
        self._stream = stream
        self._on_sent = on_sent
        self._is_sending = False
        self._answer, self._ask = heartbeat(False), heartbeat(True)
        self._peer = peer
        self._on_suspect = on_suspect
        self._is_suspect = False
        loop = self._loop = asyncio.get_running_loop()
        self._rule = rule or LivenessRule()
        self._is_busy = is_busy
        self._liveness = Liveness(loop.time(), self._rule)
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
        self._attend()
        try:
            # Nothing may overtake what waits, nor break into a send that waits for the peer's
            # window.
            may_pass = at_once and not self._outbox and not self._is_sending
            if may_pass and self._stream.send_nowait(message):
                self._on_sent()
                return
        except MeshError as error:
            self.close(error)
            return
        self._queue(message)
        if len(self._outbox) > MAX_OUTBOX:
            self.close(WorkerLost(f"the {self._peer} left {MAX_OUTBOX} messages unread"))

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
            self._end.set_result(without_frames(error))

    async def run(self, on_message: Callable[[In], None]) -> MeshError:
        """Send, receive and beat until the stream is over; returns why.

        on_message: called for every message that is no heartbeat; a MeshError it raises ends the
        stream. Cancelling it ends the stream, too.
        """
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
            return without_frames(error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self.close(WorkerLost("the stream was cancelled"))
            if not self._end.cancelled():
                without_frames(self._end.result())
            # Who owns this stream knows it, too: only the garbage collector would free the two.
            self._is_busy, self._on_suspect, self._on_sent = _is_idle, None, _nothing

    async def _write(self) -> None:
        while True:
            await self._has_mail.wait()
            # Cleared before the outbox is emptied: what is queued during a send sets it again.
            self._has_mail.clear()
            while self._outbox:
                message = self._outbox.popleft()
                self._is_sending = True
                await self._stream.send(message)
                self._is_sending = False  # one that failed ends the stream: nothing may follow it
                if message is not self._answer and message is not self._ask:
                    self._on_sent()

    async def _read(self, on_message: Callable[[In], None]) -> None:
        while (message := await self._stream.receive()) is not None:
            self._liveness.heard(self._loop.time())
            self._suspect(False)
            # What came in one read is taken without a wait, which would be a turn of the loop for
            # each.
            while message is not None:
                beat = message.heartbeat
                if beat is None:
                    on_message(message)
                elif beat.asks:
                    self._beat(self._answer)
                message = self._stream.receive_nowait()
            self._attend()
        raise WorkerLost(f"the {self._peer} ended the stream")

    # Timers and no tasks: a gateway has hundreds of streams.

    def _sleep(self, now: float) -> None:
        at = self._liveness.next_check_at(now)
        self._timer = self._loop.call_at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        """Judge the peer by its silence, and ask it for a word."""
        if self._end.done():
            return
        now = max(at, self._loop.time())  # a timer may come early by the clock's resolution
        # This loop may have stood still itself: what it has not read is not the peer's silence.
        self._liveness.slept(at, now)
        self._liveness.follow(self._rule if self._is_busy() else IDLE, now)
        state = self._liveness.state(now)
        if state is not PeerState.ALIVE:
            # Asked only of a peer that is late: it is a system call, and there are hundreds of
            # streams.
            self._liveness.round_trip_s = self._stream.round_trip_s
            state = self._liveness.state(now)
        if state is not PeerState.ALIVE:
            self._suspect(True)
        if state is PeerState.DEAD:
            silence_s = self._liveness.silence_s(now)
            words = f"the {self._peer} was silent for {silence_s:.1f} s"
            self.close(WorkerLost(words, code="silent"))
            return
        if self._liveness.is_asking(now):
            self._beat(self._ask)
        self._sleep(now)

    def _attend(self) -> None:
        """Somebody may have begun to wait for the peer."""
        if self._liveness.rule is IDLE and self._timer is not None and self._is_busy():
            self._timer.cancel()
            self._liveness.follow(self._rule, now := self._loop.time())
            self._sleep(now)

    def _beat(self, heartbeat: Out) -> None:
        if self._outbox or self._is_sending or self._end.done():
            return  # what waits is heard as well
        try:
            if not self._stream.send_nowait(heartbeat):
                self._queue(heartbeat)
        except MeshError as error:
            self.close(error)

    def _suspect(self, is_suspect: bool) -> None:
        if is_suspect is not self._is_suspect:
            self._is_suspect = is_suspect
            if self._on_suspect is not None:
                self._on_suspect(is_suspect)
