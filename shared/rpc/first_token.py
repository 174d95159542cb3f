"""The first token of an attempt on the wire: it brings its prompt's logprobs and times with it.

Prefill workers and colocated decode workers say it alike. Knows no stream.
"""

from __future__ import annotations

from shared import wire
from shared.errors import TooLarge
from shared.ids import StreamId
from shared.messages import codec
from shared.messages.message_codec import MAX_MESSAGE_BYTES
from shared.request import WorkItem
from shared.rpc.gateway_session import EVENT_BYTES
from shared.schedule.plan import NewToken, PromptTimes

_TOKEN_BYTES = 256
"""Most that a PrefillToken takes beside its columns."""


def first_token_to_wire(
    stream_id: StreamId, token: NewToken, times: PromptTimes
) -> tuple[wire.PrefillToken, int]:
    """Return the message, and what it counts for in an outbox."""
    message = codec.prefill_token_to_wire(stream_id, token, times)
    num_bytes = EVENT_BYTES + 2 * len(message.top_ids)
    if (rows := message.prompt_logprobs) is not None:
        num_bytes += 2 * (len(rows.logprobs) + len(rows.top_ids))
    return message, num_bytes


def require_sendable(item: WorkItem) -> None:
    """Refuse, before anything is computed, a prompt whose first token would not fit one message.

    Sending it would end the session, and every other request of the gateway with it.
    Raises TooLarge.
    """
    k = item.sampling.prompt_logprobs
    if k is None:
        return
    own = codec.logprobs_bytes(1, item.sampling.logprobs or 0)
    num_bytes = codec.logprobs_bytes(len(item.token_ids), k) + own + _TOKEN_BYTES
    if num_bytes > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"logprobs of {len(item.token_ids)} prompt tokens with {k} alternatives each take "
            f"{num_bytes} bytes, over the limit of {MAX_MESSAGE_BYTES}: ask for fewer alternatives "
            "or send a shorter prompt",
            param="prompt_logprobs",
            code="prompt_logprobs_too_large",
        )
