"""Responses that clients may go on from: of each tenant the newest, in this process's memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from services.gateway.http.openai_forms import Message
from shared.errors import InvalidRequest, NotFound

MAX_RESPONSES = 1024
MAX_TENANT_BYTES = 16 << 20

_MESSAGES = msgspec.json.Decoder(list[Message])
_encode = msgspec.json.Encoder().encode


class KeptResponse(NamedTuple):
    """body: the answer, JSON. conversation: all messages up to its end, likewise."""

    body: bytes
    conversation: bytes

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self.body) + len(self.conversation)

    @property
    def messages(self) -> list[Message]:
        """All messages up to the answer's end; without instructions, which do not carry over."""
        return _MESSAGES.decode(self.conversation)


@dataclass(slots=True)
class _OwnResponses:
    responses: OrderedDict[str, KeptResponse] = field(
        default_factory=OrderedDict[str, KeptResponse]
    )
    num_bytes: int = 0


class KeptResponses:
    """By tenant and id, at most ``max_bytes`` in all. Who has the most bytes forgets first; of
    one's own, what was used longest ago. max_responses, max_tenant_bytes: of each tenant."""

    def __init__(
        self,
        max_bytes: int,
        *,
        max_responses: int = MAX_RESPONSES,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_tenant_bytes = min(max_tenant_bytes, max_bytes)
        self._max_bytes = max_bytes
        self._tenants: dict[bytes, _OwnResponses] = {}
        self.num_bytes = 0

    def keep(self, tenant: bytes, name: str, body: bytes, conversation: list[Message]) -> bool:
        """Keep a response, unless it is too large: return whether it is kept."""
        kept = KeptResponse(body, _encode(conversation))
        if kept.num_bytes > self._max_tenant_bytes:
            return False
        own = self._tenants.setdefault(tenant, _OwnResponses())
        own.responses[name] = kept
        own.num_bytes += kept.num_bytes
        self.num_bytes += kept.num_bytes
        while len(own.responses) > self._max_responses or own.num_bytes > self._max_tenant_bytes:
            self._forget(tenant, next(iter(own.responses)))
        while self.num_bytes > self._max_bytes:
            largest = max(self._tenants, key=lambda one: self._tenants[one].num_bytes)
            self._forget(largest, next(iter(self._tenants[largest].responses)))
        return True

    def find(self, tenant: bytes, name: str, *, param: str) -> KeptResponse:
        """Return a tenant's response; it counts as used now. Raises NotFound, of an earlier one, as
        OpenAI does, InvalidRequest: clients send the whole conversation then."""
        own = self._tenants.get(tenant)
        if own is None or name not in own.responses:
            is_earlier = param == "previous_response_id"
            raise (InvalidRequest if is_earlier else NotFound)(
                f"{param}: this gateway process keeps no such response of yours. Each keeps the "
                f"newest {self._max_responses} of an API key, at most "
                f"{self._max_tenant_bytes >> 20} MiB (--response-memory-mib), in its own memory: "
                "it may be forgotten or deleted, was asked for with store false, or is another "
                "gateway's or process's. Send the whole conversation as input instead",
                param=param,
                code="previous_response_not_found" if is_earlier else "response_not_found",
            )
        own.responses.move_to_end(name)
        return own.responses[name]

    def delete(self, tenant: bytes, name: str, *, param: str) -> None:
        """Forget a tenant's response. Raises NotFound."""
        self.find(tenant, name, param=param)
        self._forget(tenant, name)

    def _forget(self, tenant: bytes, name: str) -> None:
        own = self._tenants[tenant]
        num_bytes = own.responses.pop(name).num_bytes
        own.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        if not own.responses:
            del self._tenants[tenant]
