"""Serves ``Prefill.Session``: one stream per gateway carries its prompts in and their first tokens
out.

What a job is and when it ends is ``stepper.py``'s; here is only its wire form. Losing a session
cancels its jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from services.prefill.pusher import PushStats
from services.prefill.stepper import PrefillJob, PrefillRequest, Stepper
from shared import wire
from shared.errors import MeshError, RemoteProtocolError
from shared.ids import Incarnation, StreamId
from shared.liveness import LivenessRule
from shared.rpc import codec
from shared.rpc.first_token import first_token_to_wire, require_sendable
from shared.rpc.gateway_session import (
    EVENT_BYTES,
    MAX_OUTBOX_BYTES,
    GatewaySession,
    GatewaySessions,
)
from shared.rpc.methods import PREFILL_SESSION
from shared.schedule.plan import NewToken, PromptTimes
from shared.transfer.messages import TransferKey


class Intake:
    """The sessions of all gateways. on_silent: a gateway stopped talking; its incarnation."""

    def __init__(
        self,
        stepper: Stepper,
        incarnation: Incarnation,
        version: str,
        *,
        on_silent: Callable[[Incarnation], None] = lambda _: None,
        liveness: LivenessRule | None = None,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
    ) -> None:
        self._stepper = stepper
        self._on_silent = on_silent
        self._jobs: dict[GatewaySession, dict[StreamId, _Line]] = {}
        self.sessions = GatewaySessions(
            self,
            method=PREFILL_SESSION,
            event_type=wire.PrefillEvent,
            role=wire.Role.PREFILL,
            incarnation=incarnation,
            version=version,
            rule=liveness,
            max_outbox_bytes=max_outbox_bytes,
        )

    # --- SessionHost -----------------------------------------------------------------------------

    def session_opened(self, session: GatewaySession) -> None:
        """See ``SessionHost``."""
        self._jobs[session] = {}

    def session_command(self, session: GatewaySession, command: Any) -> None:
        """See ``SessionHost``."""
        if command.start is not None:
            self._start(session, command.start)
        elif command.cancel is not None:
            line = self._jobs[session].get(StreamId(command.cancel.stream_id))
            if line is not None:
                line.cancel(self._stepper)
        else:
            raise RemoteProtocolError("a command of no known kind")

    def session_closed(self, session: GatewaySession, *, is_silent: bool) -> None:
        """See ``SessionHost``."""
        for line in list(self._jobs.pop(session).values()):
            line.cancel(self._stepper)
        if is_silent:
            self._on_silent(session.gateway)

    def _start(self, session: GatewaySession, command: wire.StartPrefill) -> None:
        lines = self._jobs[session]
        stream_id = StreamId(command.stream_id)
        if stream_id in lines:
            raise RemoteProtocolError("a stream_id is used once", param="stream_id")
        now = asyncio.get_running_loop().time()
        line = _Line(session, stream_id, lines)
        try:
            order = codec.start_prefill_from_wire(command)
            require_sendable(order.item)
            request = PrefillRequest(
                key=TransferKey(order.request_id, order.attempt, order.lease_token),
                item=order.item,
                decode=order.decode_incarnation,
                deadline_at=None if order.deadline_s is None else now + order.deadline_s,
                trace_context=order.trace_context,
            )
            line.job = self._stepper.submit(request, line)
        except MeshError as error:
            line.failed(error)
            return
        lines[stream_id] = line


class _Line:
    """One job's ``JobSink``: events become wire messages in the session's outbox."""

    def __init__(
        self, session: GatewaySession, stream_id: StreamId, lines: dict[StreamId, _Line]
    ) -> None:
        self._session = session
        self._stream_id = stream_id
        self._lines = lines
        self.job: PrefillJob | None = None

    def cancel(self, stepper: Stepper) -> None:
        """The gateway wants no more."""
        if self.job is not None:
            stepper.cancel(self.job)

    def token(self, token: NewToken, times: PromptTimes) -> None:
        """See ``JobSink``."""
        message, num_bytes = first_token_to_wire(self._stream_id, token, times)
        self._session.send(wire.PrefillEvent(token=message), num_bytes)

    def done(self, stats: PushStats) -> None:
        """See ``JobSink``."""
        self._session.send(
            wire.PrefillEvent(
                done=wire.PrefillDone(
                    stream_id=self._stream_id,
                    bytes_sent=stats.num_bytes,
                    transfer_s=stats.transfer_s,
                    exposed_s=stats.exposed_s,
                    lane=stats.lane,
                    mode=stats.mode,
                )
            )
        )

    def failed(self, error: MeshError) -> None:
        """See ``JobSink``."""
        self._session.send(
            wire.PrefillEvent(
                failed=wire.PrefillFailed(
                    stream_id=self._stream_id, error=codec.error_to_wire(error)
                )
            ),
            EVENT_BYTES + len(error.message),
        )

    def closed(self) -> None:
        """See ``JobSink``."""
        self._lines.pop(self._stream_id, None)
