"""Pushes KV of finished layers to sinks: drives the sender cores, gathers, and sends.

    handle = pusher.begin(key, sink, num_tokens=n, block_table=lambda: table)
    handle.cached(hit)                       # what the own prefix cache already holds
    pusher.step_planned([(handle, hit, hit + chunk)], compute_s)   # before each step
    handle.layers_ready(i)                   # OnLayersDone of that step
    handle.span_computed()                   # when that step is committed
    handle.commit(first_token)               # once, when the prompt's last chunk has sampled
    stats = await handle.wait()              # keep the blocks until this returns or raises

Every decision is in ``shared/transfer/senders.py``; this shell knows no scheduling, and links to
sinks come from ``pairs.py`` (``link.py``).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from shared.engine.base import Engine
from shared.engine.memory import staging
from shared.engine.worker import ComputeRunner, StepDone
from shared.errors import EngineFailed, MeshError, ShuttingDown, TransferFailed, WorkerLost
from shared.ids import Incarnation
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.runtime.effect_loop import EffectLoop
from shared.runtime.loops import loop_time
from shared.telemetry.moments import Moment, note
from shared.transfer.effects import (
    CloseLink,
    EndTransfer,
    GatherAndSend,
    SenderEffect,
    SenderTiming,
    SendMessage,
)
from shared.transfer.frames import HEADER_BYTES, Header, pack_header
from shared.transfer.messages import LinkId, Pull, SinkMessage, TransferKey
from shared.transfer.plan import (
    DEFAULT_GROUP_BYTES,
    DEFAULT_MAX_FRAME_BYTES,
    Frame,
    LinkCost,
    PushMode,
    TransferMode,
    choose_mode,
)
from shared.transfer.senders import Senders
from shared.transport.base import Outcome
from shared.worker.link import PairLink

_SPEED_WEIGHT = 0.2  # of a new measurement in a link's moving mean


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStats:
    """One finished transfer, for the receipt.

    mode: what was done: layerwise (some computed tokens left layer by layer), serialized (none
    did), or none (nothing had to be sent). transfer_s: first frame posted until the last
    acknowledgement; a frame is posted when the device has written its layers and copied them.
    exposed_s: token sampled until the last acknowledgement; sampled when the step was over on its
    device, not when the loop heard of it.
    """

    num_bytes: int = 0
    num_frames: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    lane: str = ""
    mode: str = "none"

    @property
    def overlap(self) -> float:
        """Share of ``transfer_s`` that the step hid, 0 to 1."""
        return max(0.0, 1.0 - self.exposed_s / self.transfer_s) if self.transfer_s > 0 else 0.0


class PushHandle:
    """One transfer, as the step loop sees it. Made by ``Pusher.begin``.

    All methods but ``wait`` return at once and never raise for what the peer did: after the
    transfer has ended they do nothing, and ``wait`` tells why.
    """

    def __init__(
        self,
        pusher: Pusher,
        key: TransferKey,
        link: PairLink,
        block_table: Callable[[], Sequence[int]],
    ) -> None:
        self._pusher = pusher
        self.key = key
        self._ended: asyncio.Future[PushStats] = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(_look_at)
        self._computed_at: float | None = None
        self.link = link
        self.block_table = block_table
        self.num_bytes = 0
        self.num_frames = 0
        self.first_sent_at: float | None = None
        self._computed: list[tuple[int, PushMode]] = []  # where each computed span stops
        self._cached_stop = 0
        self._modes_sent: set[PushMode] = set()

    def cached(self, stop: int) -> None:
        """Announce tokens [0, stop), the first there are: their KV is in the pool already, in all
        layers, and may leave at once in any mode."""
        self._cached_stop = stop
        self._span_planned(0, stop, PushMode.LAYERWISE, is_cached=True)

    def computing(self, start: int, stop: int, mode: PushMode) -> None:
        """Announce a span that the next step computes; the pusher calls this."""
        self._computed.append((stop, mode))
        self._span_planned(start, stop, mode, is_cached=False)

    def _span_planned(self, start: int, stop: int, mode: PushMode, *, is_cached: bool) -> None:
        pusher = self._pusher
        pusher.perform(
            pusher.core.span_planned(self.key, start, stop, mode, loop_time(), is_cached=is_cached)
        )

    def layers_ready(self, num_layers: int) -> None:
        """Layers [0, num_layers) of the newest span are written (on CUDA queued: gather waits)."""
        pusher = self._pusher
        pusher.perform(pusher.core.layers_ready(self.key, num_layers, loop_time()))

    def span_computed(self, done: StepDone | None = None) -> None:
        """The step that computes the newest span is over: all its layers are written.

        done: when they were, and when the step was over; None = now.
        """
        if done is not None:
            self._computed_at = done.step_at
            for layer, at_s in enumerate(done.layers_at):
                request_id = self.key.request_id
                note(Moment.LAYERS_WRITTEN, request_id, at_s=at_s, num_layers=layer + 1)
        self._pusher.perform(self._pusher.core.span_computed(self.key, loop_time()))

    def commit(self, first_token: int) -> None:
        """The prompt is computed and its next token sampled; implies ``span_computed``.

        Raises LocalProtocolError: spans do not cover the prompt, or this is the second commit.
        """
        if self._computed_at is None:
            self._computed_at = loop_time()
        pusher = self._pusher
        pusher.perform(pusher.core.commit(self.key, first_token, loop_time()))

    def abort(self, error: MeshError | None = None) -> None:
        """Give up; idempotent. error: what ``wait`` then raises.

        None = a clean end, the answer needs no sink: ``wait`` returns stats with mode
        "none", and the sink releases its lease without an error.
        """
        self._pusher.perform(self._pusher.core.give_up(self.key, error, loop_time()))

    async def wait(self) -> PushStats:
        """Wait until the transfer has ended and its source blocks may be freed or cached.

        Cancelling this wait ends nothing: call ``abort`` and wait again.
        Raises TransferFailed, WorkerLost, LeaseLost...: why it failed; the blocks are free then,
        all the same.
        """
        return await asyncio.shield(self._ended)

    def when_ended(self, tell: Callable[[PushHandle], None]) -> None:
        """Call this when ``wait`` would return or raise."""
        self._ended.add_done_callback(lambda _: tell(self))

    def frame_posted(self, frame: Frame, now: float) -> None:
        """Count a frame that is on its way; the pusher calls this."""
        if self.first_sent_at is None:
            self.first_sent_at = now
        self.num_frames += 1
        self.num_bytes += frame.num_bytes
        if frame.start >= self._cached_stop:
            idx = bisect_right(self._computed, frame.start, key=itemgetter(0))
            self._modes_sent.add(self._computed[idx][1])

    @property
    def is_ended(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._ended.done()

    def end(self, error: MeshError | None, *, was_needed: bool) -> None:
        """Wake the waiters; the pusher calls this once."""
        if self._ended.done():
            return
        if error is not None:
            self._ended.set_exception(error)
        elif not was_needed:
            self._ended.set_result(PushStats())
        else:
            now = loop_time()
            first_sent_at = now if self.first_sent_at is None else self.first_sent_at
            computed_at = now if self._computed_at is None else self._computed_at
            self._ended.set_result(
                PushStats(
                    num_bytes=self.num_bytes,
                    num_frames=self.num_frames,
                    transfer_s=now - first_sent_at,
                    # A device's clock, or a sum of times, may say a little after now.
                    exposed_s=max(0.0, now - computed_at),
                    lane=self.link.lane_out,
                    mode=self._mode_name,
                )
            )

    @property
    def _mode_name(self) -> str:
        if not self.num_frames:
            return "none"
        layerwise = PushMode.LAYERWISE in self._modes_sent
        return (PushMode.LAYERWISE if layerwise else PushMode.SERIALIZED).value


PlannedSpan = tuple[PushHandle, int, int]
"""A transfer, and tokens [start, stop) of it."""


class Pusher:
    """All transfers of this source; its ``PairTable`` tells it of links that go out.

    One per process. ``run`` owns every task and must be running before the first link is up. core,
    perform: for its handles, which tell the core what the step loop tells them. on_pull: a sink
    asks for a prefix; set before any link is up.
    """

    on_pull: Callable[[PairLink, Pull], None]

    def __init__(
        self,
        *,
        engine: Engine,
        compute: ComputeRunner,
        num_slots: int = 8,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        mode: TransferMode = TransferMode.AUTO,
        has_digest: bool | None = None,
        timing: SenderTiming | None = None,
        profile: MachineProfile = UNMEASURED,
    ) -> None:
        """Allocate ``num_slots`` staging buffers of ``max_frame_bytes`` on the engine's device.

        max_frame_bytes: the same number as given to the PairTable. mode: when the frames of a
        computed span leave; the sink does not care. has_digest: None = yes in host memory, no on a
        device. profile: what a message costs here, and a step beside copies.
        """
        self.mode = mode
        self._profile = profile
        self._engine = engine
        self._compute = compute
        self._slots = staging.StagingSlots(engine, num_slots, max_frame_bytes)
        self._has_digest = (
            not staging.is_on_device(self._slots[0]) if has_digest is None else has_digest
        )
        self.core = Senders(num_slots=num_slots, timing=timing)
        self._links: dict[LinkId, PairLink] = {}
        self._handles: dict[TransferKey, PushHandle] = {}
        self._effects: EffectLoop[SenderEffect] = EffectLoop(self.core, self._do)
        self.perform = self._effects.perform

    async def run(self) -> None:
        """Work until cancelled; then every transfer ends with ShuttingDown."""
        try:
            await self._effects.run()
        finally:
            for handle in list(self._handles.values()):
                handle.end(ShuttingDown("this worker is shutting down"), was_needed=True)

    def begin(
        self,
        key: TransferKey,
        sink: Incarnation,
        *,
        num_tokens: int,
        block_table: Callable[[], Sequence[int]],
        is_prefix: bool = False,
    ) -> PushHandle:
        """Open a transfer of ``num_tokens`` tokens: all that will be computed for this attempt.

        block_table: asked whenever a frame is gathered; must cover all tokens announced so far,
        and those blocks must stay the sequence's own until ``wait`` has ended. is_prefix: see
        ``Sender``.
        Raises WorkerLost: no link to that sink now. LocalProtocolError: this attempt has
        a transfer already.
        """
        link = next((link for link in self._links.values() if link.peer == sink), None)
        if link is None:
            raise WorkerLost("this worker has no pair with that worker now")
        effects = self.core.begin(key, link.id, num_tokens, loop_time(), is_prefix=is_prefix)
        handle = PushHandle(self, key, link, block_table)
        self._handles[key] = handle
        self.perform(effects)
        return handle

    def give_way(self, num_tokens: int, error: MeshError) -> None:
        self.perform(self.core.give_way(num_tokens, error, loop_time()))

    def step_planned(self, spans: Sequence[PlannedSpan], compute_s: float) -> None:
        """Announce what the next step computes of each of these transfers.

        Spans of a transfer must join: each starts where the last one stopped, the first at 0; and
        the step of the last one must be over (``span_computed``).
        compute_s: predicted duration of the step, 0 = unknown; on ``auto`` it decides between
        layer-wise and serialized (plan.py), for all spans that share a link: what counts is how
        much of the step really goes over it.
        Raises LocalProtocolError: a span does not join the last one, or leaves the prompt.
        """
        frames: dict[LinkId, list[Frame]] = {}
        for handle, start, stop in spans:
            sent = self.core.frames_of(handle.key, start, stop)
            frames.setdefault(handle.link.id, []).extend(sent)
        for handle, start, stop in spans:
            of_link = frames[handle.link.id]
            mode = choose_mode(
                sum(frame.payload_bytes for frame in of_link),
                len({frame.last_layer for frame in of_link}),
                compute_s=compute_s,
                cost=LinkCost(
                    bytes_per_s=handle.link.bytes_per_s,
                    message_s=self._profile.message_s,
                    interference=self._profile.interference,
                ),
                wanted=self.mode,
            )
            handle.computing(start, stop, mode)

    # --- events of the links ---

    def link_up(self, link: PairLink) -> None:
        self._links[link.id] = link
        self.core.link_up(link.id, link.rule)

    def link_message(self, link: PairLink, message: SinkMessage | Pull) -> None:
        if isinstance(message, Pull):
            self.on_pull(link, message)
            return
        self.perform(self.core.message(link.id, message, loop_time()))

    def is_using(self, link: PairLink) -> bool:
        return self.core.is_using(link.id)

    def num_on(self, link: PairLink) -> int:
        """Transfers that share this link's bandwidth now."""
        return self.core.num_on(link.id)

    def link_lost(self, link: PairLink, error: MeshError) -> None:
        del self._links[link.id]
        self.perform(self.core.link_lost(link.id, error, loop_time()))

    # --- performing effects ---

    def _do(self, effect: SenderEffect) -> None:
        match effect:
            case SendMessage(link=link_id, message=message):
                if (link := self._links.get(link_id)) is not None:
                    link.send(message)
            case GatherAndSend():
                if (tasks := self._effects.tasks) is not None:
                    tasks.create_task(self._send(effect, self._handles[effect.key]))
            case EndTransfer(key=key, error=error, was_needed=was_needed):
                self._handles.pop(key).end(error, was_needed=was_needed)
            case CloseLink(link=link_id, reason=reason):
                if (link := self._links.get(link_id)) is not None:
                    link.close(reason)

    async def _send(self, order: GatherAndSend, handle: PushHandle) -> None:
        """One frame's life; ends with exactly one ``send_settled``."""
        try:
            error = await self._gather_and_send(order, handle)
        except EngineFailed:
            raise  # the device is gone: so is this process
        except MeshError as failure:
            error = failure.with_traceback(None)  # its frames keep windows, and this one keeps it
        self.perform(self.core.send_settled(order.key, order.frame.idx, error, loop_time()))

    async def _gather_and_send(self, order: GatherAndSend, handle: PushHandle) -> MeshError | None:
        frame, slot = order.frame, self._slots[order.slot]
        if (link := self._links.get(order.link)) is None:
            return WorkerLost("the pair was lost before the frame was gathered")
        # Where the sink's staging is mapped, KV goes there at once, and the message is the header.
        try:
            window = await link.windows.at(order.peer_slot) if link.windows else None
        except TransferFailed as error:
            link.close(error.message)  # the sink waits for this frame: only the end ends that
            return error
        target = slot if window is None else window
        block_table = handle.block_table()

        def gather() -> float:
            began_at = time.perf_counter()
            payload = staging.payload(target, frame.payload_bytes)
            self._engine.gather(
                block_table, frame.start, frame.stop, frame.first_layer, frame.last_layer, payload
            )
            digest = staging.digest(payload) if self._has_digest else None
            header = Header(order.transfer_id, order.epoch, frame.idx, frame.payload_bytes, digest)
            # In our slot even where the payload went into a window: the header is the message.
            staging.write(slot, pack_header(header))
            return time.perf_counter() - began_at

        gather_s = await self._compute.copy(gather)
        # Meanwhile the link may have gone, and its endpoint with it.
        if order.link not in self._links:
            return WorkerLost("the pair was lost before the frame was sent")
        posted_at = loop_time()
        handle.frame_posted(frame, posted_at)
        note(
            Moment.FRAME_SENT,
            order.key.request_id,
            frame_idx=frame.idx,
            start=frame.start,
            stop=frame.stop,
            first_layer=frame.first_layer,
            last_layer=frame.last_layer,
            num_bytes=frame.num_bytes,
        )
        num_bytes = frame.num_bytes if window is None else HEADER_BYTES
        operation = link.endpoint.send(slot, num_bytes, order.tag)
        outcome = await operation.settled()
        if outcome is Outcome.ABANDONED:
            self._slots.replace(order.slot)
        if outcome is not Outcome.DONE:
            return TransferFailed(f"a frame was not sent: {operation.error}", code="send")
        now = loop_time()
        # Frames cross one after the other: one that waits for others does not take longer itself.
        took_s = now - max(posted_at, link.crossed_at) if window is None else gather_s
        link.crossed_at = now
        _refine_speed(link, frame.num_bytes, took_s)
        return None


def _refine_speed(link: PairLink, num_bytes: int, took_s: float) -> None:
    # Small frames measure latency, not speed. A mean of seconds a byte: it does not mind frames
    # that end at once, as one after the other does where a link carries several side by side.
    if num_bytes >= DEFAULT_GROUP_BYTES and took_s > 0:
        byte_s = 1 / (link.bytes_per_s or num_bytes / took_s)
        link.bytes_per_s = 1 / (byte_s + _SPEED_WEIGHT * (took_s / num_bytes - byte_s))


def _look_at(ended: asyncio.Future[PushStats]) -> None:
    """A caller that is cancelled may never wait; its transfer's error is no unhandled one."""
    if not ended.cancelled():
        ended.exception()
