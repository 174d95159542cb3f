"""The stops of ``pdmesh tour``: each moment of a request's life with the sentence that tells it and
the two places in the code that make it.

Places are names, never line numbers: ``place_of`` looks them up in the code that is installed, so
a rename breaks the tour, its page (``docs/tour.md``) and its test at once.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any, NamedTuple

from shared.telemetry.moments import Moment

ROOT = Path(__file__).resolve().parents[2]
"""The folder that has ``services`` and ``shared``."""


class Stop(NamedTuple):
    """One stop. facts: what its log line adds, as a format string over the line's fields.

    decides, acts: ``module:name`` of the core and of the shell. each: every occurrence is worth a
    line; otherwise the first and the last are.
    """

    moment: Moment
    process: str
    phase: str
    text: str
    facts: str
    decides: str
    acts: str
    each: bool = False


STOPS: tuple[Stop, ...] = (
    Stop(
        Moment.ARRIVED,
        "gateway",
        "ingress",
        "The request gets its id, and its key is checked. All times count from here.",
        "{route}",
        "services.gateway.front.auth:KeyRing.check",
        "services.gateway.front.calls:RecordedCall",
    ),
    Stop(
        Moment.PARSED,
        "gateway",
        "ingress",
        "Its body is read up to a limit and becomes a form; what has no place in it is refused.",
        "{num_bytes} bytes",
        "services.gateway.http.openai_forms:ChatBody.form",
        "services.gateway.http.server:read_body",
    ),
    Stop(
        Moment.TOKENIZED,
        "gateway",
        "ingress",
        "The chat template makes one text of the messages, the tokenizer makes ids of the text: "
        "once, for all three processes.",
        "{num_tokens} tokens",
        "services.gateway.limits:checked_prompt",
        "services.gateway.text.text_model:TextModel.encode",
    ),
    Stop(
        Moment.ADMITTED,
        "gateway",
        "admission",
        "There is a place for it. Otherwise it would wait in a bounded queue, or be refused with a "
        "hint when to come back.",
        "",
        "services.gateway.core.admission.admission:Admission.arrive",
        "services.gateway.workers.generation:GatewayMesh.generate",
    ),
    Stop(
        Moment.ROUTED,
        "gateway",
        "route",
        "One decision chooses both workers, and is kept as a record with all scores.",
        "{decision[policy]}: {decision[prefill][score]:.0f} tokens pending on prefill, "
        "{decision[decode][score]:.0%} of decode's blocks taken",
        "services.gateway.core.routing.routing:route",
        "services.gateway.workers.membership:Membership.route",
    ),
    Stop(
        Moment.DISPATCHED,
        "gateway",
        "dispatch",
        "Both legs leave in the same instant: prefill computes while decode makes room.",
        "attempt {attempt}",
        "services.gateway.core.dispatcher:Dispatcher.pair_found",
        "services.gateway.workers.session:RequestShell._send",
    ),
    Stop(
        Moment.RESERVED,
        "decode",
        "reserve",
        "Decode reserves every block that the prompt needs, or none, and promises them as a lease.",
        "{num_blocks} blocks, {cached_tokens} tokens in the cache already",
        "shared.worker.core.leases:Leases.reserve",
        "shared.worker.reservations:Reservations.reserve",
    ),
    Stop(
        Moment.QUEUED,
        "prefill",
        "prefill",
        "Prefill takes the prompt as a job and asks decode to open the transfer of its KV.",
        "{num_tokens} tokens",
        "shared.worker.core.life:Life",
        "shared.worker.requests:Requests._compute",
    ),
    Stop(
        Moment.OPENED,
        "decode",
        "reserve",
        "The open meets its lease: decode grants the transfer an id, an epoch and tags of its own.",
        "",
        "shared.transfer.receivers:Receivers.attached",
        "shared.worker.receiver:KvReceiver._attach",
    ),
    Stop(
        Moment.PLANNED,
        "prefill",
        "prefill",
        "A step is planned under the token budget, and its span of tokens announced to decode.",
        "tokens [{start}, {stop})",
        "shared.schedule.scheduler:Scheduler.plan",
        "shared.worker.requests:Requests.announce",
        each=True,
    ),
    Stop(
        Moment.FRAME_POSTED,
        "decode",
        "push",
        "Both ends derive the same frames from a span. Decode posts a receive for each of them, "
        "and says so: that is credit.",
        "receive for frame {frame_idx}",
        "shared.transfer.receiver:Receiver.span_announced",
        "shared.worker.receiver:KvReceiver._post",
    ),
    Stop(
        Moment.LAYERS_WRITTEN,
        "prefill",
        "prefill",
        "A layer of the step is computed: its KV is in prefill's blocks.",
        "layers [0, {num_layers}) written",
        "shared.transfer.sender:Sender.layers_ready",
        "shared.worker.stepper:Stepper._step",
        each=True,
    ),
    Stop(
        Moment.FRAME_SENT,
        "prefill",
        "push",
        "A frame has credit and its layers are written: it is gathered and leaves, while later "
        "layers compute.",
        "frame {frame_idx}: layers [{first_layer}, {last_layer}) of tokens [{start}, {stop}), "
        "{num_bytes} bytes",
        "shared.transfer.sender:Sender.slot_given",
        "shared.worker.pusher:Pusher._gather_and_send",
        each=True,
    ),
    Stop(
        Moment.FRAME_PLACED,
        "decode",
        "push",
        "A frame has landed. Its header and digest are right, its KV is copied into the lease's "
        "blocks, and it is acknowledged.",
        "frame {frame_idx} placed",
        "shared.transfer.receiver:Receiver.frame_placed",
        "shared.worker.receiver:KvReceiver._place",
    ),
    Stop(
        Moment.SAMPLED,
        "prefill",
        "token 1",
        "The last step is over: token 1 is sampled, and goes to the gateway at once.",
        "{seconds:.4f} s of steps",
        "shared.schedule.scheduler:Scheduler.commit",
        "shared.worker.request:Request.tell_first",
    ),
    Stop(
        Moment.COMMITTED,
        "prefill",
        "push",
        "The commit tells decode how many frames there are, and with which token to go on.",
        "",
        "shared.transfer.sender:Sender.commit",
        "shared.worker.pusher:PushHandle.commit",
    ),
    Stop(
        Moment.EMITTED,
        "gateway",
        "egress",
        "Decode has room, so token 1 may leave: an answer that has begun can no longer be refused.",
        "token {index} leaves",
        "services.gateway.core.lifecycle:Lifecycle.token_arrived",
        "services.gateway.workers.session:RequestShell.apply",
    ),
    Stop(
        Moment.WRITTEN,
        "gateway",
        "egress",
        "Ids become text again, as far as characters are whole, and leave as one event.",
        "an event of {num_bytes} bytes",
        "services.gateway.text.detokenizer:AnswerText.feed",
        "services.gateway.http.sse:EventStream.write",
    ),
    Stop(
        Moment.JOINED,
        "decode",
        "join",
        "The last frame is placed: the blocks go from the lease to a sequence, which is in the "
        "batch from the next step on.",
        "{num_frames} frames",
        "shared.worker.core.leases:Leases.join",
        "shared.worker.reservations:Reservations.placed",
    ),
    Stop(
        Moment.ACKNOWLEDGED,
        "prefill",
        "push",
        "Prefill hears that decode has everything: from here on the answer does not need it.",
        "{num_frames} frames",
        "shared.transfer.sender:Sender.acked",
        "shared.worker.requests:Requests._watch_push",
    ),
    Stop(
        Moment.PREFILL_CLOSED,
        "prefill",
        "release",
        "Only now are prefill's blocks released; full ones stay as cache for a prompt that begins "
        "alike.",
        "{free_blocks} blocks available",
        "shared.worker.core.life:Life.handle",
        "shared.worker.requests:Requests._close",
    ),
    Stop(
        Moment.STEPPED,
        "decode",
        "decode",
        "A decode step makes one token for every sequence of the batch; one message carries all "
        "tokens of a gateway.",
        "token {index} made",
        "shared.schedule.scheduler:Scheduler.plan",
        "shared.worker.stepper:Stepper._step",
    ),
    Stop(
        Moment.DECODE_CLOSED,
        "decode",
        "release",
        "The answer has ended: decode releases the blocks, and grants them to whoever waits.",
        "{reason}",
        "shared.kv.pool:BlockPool.release",
        "shared.worker.requests:Requests._close_answer",
    ),
    Stop(
        Moment.ENDED,
        "gateway",
        "egress",
        "One finish reason ends the request; its marks become the receipt, whose phases add up.",
        "{finish_reason}",
        "shared.telemetry.lifetime:receipt_of",
        "services.gateway.workers.timeline:Timeline.ended",
    ),
)
"""In the order in which the page tells them. In a run some overlap; only causes come first."""


def place_of(name: str) -> tuple[str, int]:
    """Return file (below ``ROOT``) and line where ``module:qualified.name`` is defined, by looking
    at the object itself.

    Raises AttributeError, ImportError: there is no such object any more.
    """
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(found)
    file = Path(inspect.getsourcefile(found) or "").resolve().relative_to(ROOT)
    _, line = inspect.getsourcelines(found)
    return str(file), line
