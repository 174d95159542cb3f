"""What the HTTP and the gRPC door share: who calls, what is served, and how a form becomes answers
to make.

Both doors do the same in the same order: ``authenticate`` the caller, make ``choices`` of the
form, and stream what ``open_answers`` gives. Everything that may be refused is refused here, before
any work. Knows neither JSON nor protobuf.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Gauge

from services.gateway import limits
from services.gateway.front.answers import Choice
from services.gateway.front.auth import NOBODY, ApiKey, KeyRing, tenant_salt
from services.gateway.front.quota import Hold
from services.gateway.limits import SamplingForm
from services.gateway.mesh import GenerationRequest, Mesh, ServedModel
from services.gateway.text.calls.families import chosen_family, chosen_thinking
from services.gateway.text.calls.harmony import HARMONY, call_header
from services.gateway.text.calls.thoughts import THINK
from services.gateway.text.chat_template import Rendering
from services.gateway.text.detokenizer import PROMPT_TAIL
from services.gateway.text.grammars import Structure, Thought
from services.gateway.text.text_model import TextModel
from shared.bounds import ToolFamily
from shared.config import GatewayConfig
from shared.errors import DeadlinePassed, NotFound
from shared.ids import ID_BYTES, RandomBytes, RequestId
from shared.telemetry.moments import Moment, note
from shared.telemetry.tallies import Counts
from shared.telemetry.tracing import NO_SPAN, NO_TRACER, Tracer, TraceSpan
from shared.tenants import NOTHING_ASKED, Asked

Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)  # frozen costs three times as much to make
class Caller:
    """Who calls, since when, and until when at most. arrived_at, deadline_at: loop time. span: of
    the call. hold: what of the key's limits the call takes until it is over. asked:
    what headers ask for (``asked_by``); a form's fields come before them."""

    request_id: RequestId
    key: ApiKey = NOBODY
    hold: Hold | None = None
    label: str = ""
    asked: Asked = NOTHING_ASKED
    arrived_at: float
    deadline_at: float | None = None
    span: TraceSpan = NO_SPAN


@dataclass(slots=True, kw_only=True)  # frozen costs three times as much to make
class Prompt:
    """One prompt, already tokenized. text: as the client gave it, None for token ids.
    thought: what its end leaves to the answer of a model that thinks."""

    token_ids: tuple[int, ...] = field(repr=False)
    text: str | None = field(default=None, repr=False)
    thought: Thought = ""


@dataclass(slots=True, kw_only=True)  # frozen costs three times as much to make
class Form:
    """What to generate, in nobody's wire format.

    num_choices: answers a prompt. default_max_tokens: None = the rest of the context. is_echo_only:
    see ``Choice``.
    continues_text: the answer continues the prompt's own text (completions), rather than answering
    it (chat). structure: what the answer shall match, until ``FrontDoor.structured`` has made a
    grammar of it.
    """

    sampling: SamplingForm
    num_choices: int = 1
    default_max_tokens: int | None = None
    prompt_param: str = "prompt"
    cache_salt: bytes = b""
    include_stop: bool = False
    skip_special_tokens: bool = True
    continues_text: bool = False
    is_echo_only: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    structure: Structure | None = None
    asked: Asked = NOTHING_ASKED


class ClientMetrics:
    """What both doors feed; rendered by ``/metrics`` from ``registry``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counts(
            "pdmesh_gateway_requests",
            "Calls by route and how they ended (ok, cancelled, or the error type)",
            ["route", "outcome"],
            registry=self.registry,
        )
        self.num_running = 0
        Gauge(
            "pdmesh_gateway_requests_running",
            "Calls in progress, this scrape among them",
            registry=self.registry,
        ).set_function(lambda: self.num_running)


async def in_time(caller: Caller, work: Awaitable[Result]) -> Result:
    """Wait for what comes before the mesh is asked: many long prompts, or slow grammars, may stand
    before it. Raises DeadlinePassed."""
    limit = asyncio.timeout_at(caller.deadline_at)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlinePassed("the deadline passed before the request could be read") from None


class FrontDoor:
    """One gateway's client side.

    defaults: sampling defaults of the model folder (``ModelFolder.generation_defaults``).
    salt_key: see ``tenant_salt``. stall_s: how long a client may leave a full stream unread before
    it is cut off.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        mesh: Mesh,
        text: TextModel,
        random_bytes: RandomBytes,
        metrics: ClientMetrics,
        keys: KeyRing,
        defaults: Mapping[str, float],
        tracer: Tracer = NO_TRACER,
        salt_key: bytes = b"",
        stall_s: float = limits.STALL_S,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self._salt_key = salt_key
        self.text = text
        self.tool_family: ToolFamily | None = chosen_family(config.tool_parser, text.template)
        self.thinking = chosen_thinking(config.reasoning_parser, text.template)
        """What stands around thinking; None = answers do not think."""
        self.speaks_harmony = self.tool_family == "harmony" or self.thinking is HARMONY
        marks = HARMONY if self.speaks_harmony else self.thinking or THINK
        text.grammars.thinking = marks
        text.name_marks(marks.begin, marks.end, marks.then, marks.answer, call_header(""))
        self.metrics = metrics
        self.keys = keys
        self._random_bytes = random_bytes
        self._tracer = tracer
        self._defaults = defaults
        self.stall_s = stall_s

    def new_caller(self, span_name: str, headers: Mapping[str, str]) -> Caller:
        """Give a call its id and its arrival time; its body has not been read yet.

        span_name: '' = it is not traced. headers: may bring the client's trace context."""
        arrived_at = asyncio.get_running_loop().time()
        timeout_s = self.config.request_timeout_s
        return Caller(
            request_id=RequestId(self._random_bytes(ID_BYTES)),
            arrived_at=arrived_at,
            deadline_at=arrived_at + timeout_s if timeout_s else None,
            span=self._tracer.request(span_name, arrived_at, headers) if span_name else NO_SPAN,
        )

    def authenticate(
        self,
        caller: Caller,
        *,
        authorization: str | None,
        is_metered: bool = False,
        right: str = "",
    ) -> Caller:
        """Return the caller with its key. is_metered: the call counts against the key's limits.
        right: which the key must have, '' = any key may.

        Raises Unauthorized, Forbidden, QuotaExceeded.
        """
        key = self.keys.check(authorization)
        key.require(right)
        # ``NOBODY``: without keys there are no limits to count against.
        if key is caller.key:
            return caller
        hold = key.quota.take(asyncio.get_running_loop().time()) if is_metered else None
        return replace(caller, key=key, hold=hold)

    def deadline_at(self, caller: Caller, timeout: str | None) -> float | None:
        """Return when a call must be over. timeout: the client's own, as its header has it.

        Raises InvalidRequest: no number, or out of range.
        """
        param = "x-request-timeout"
        timeout_s = _number(timeout, param, "seconds")
        if timeout_s is None:
            return caller.deadline_at
        checked = limits.checked_above_zero(timeout_s, limits.MAX_TIMEOUT_S, param=param)
        return caller.arrived_at + checked

    async def model(self, name: str | None, caller: Caller) -> ServedModel:
        """Return the model of this name; empty or None = the one served.

        Raises NotFound: another is served. Overloaded, ShuttingDown: none is served.
        """
        model = self.mesh.model or await self.mesh.wait_for_model(caller.deadline_at)
        if name and name != model.name:
            raise NotFound(
                f"no model of this name is served here: its name is {model.name}",
                param="model",
                code="model_not_found",
            )
        return model

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering,
        caller: Caller,
        cache_salt: bytes = b"",
    ) -> Prompt:
        """Render messages and tokenize them. Raises InvalidRequest, Overloaded."""
        if rendering.continue_final_message and rendering.add_generation_prompt:
            raise limits.refusal(
                "continue_final_message", "does not go with add_generation_prompt: true"
            )
        limits.checked_count(
            len(rendering.arguments), limits.MAX_TEMPLATE_ARGUMENTS, param="chat_template_kwargs"
        )
        template = rendering.chat_template
        if template is not None:
            if not self.config.trust_templates:
                raise limits.refusal(
                    "chat_template",
                    "the model's own template is always used here (the gateway was started "
                    "without --trust-templates)",
                    code="unsupported",
                )
            limits.checked_count(
                len(template), limits.MAX_TEMPLATE_CHARS, param="chat_template", what="characters"
            )
        rendered = await self.text.render(messages, rendering)
        if rendering.add_special_tokens:
            ids = await self.text.encode(rendered, add_special_tokens=True)
        else:
            owner = b"/".join((caller.key.cache_salt, cache_salt))  # a salt has no slash
            ids = await self.text.encode_chat(rendered, owner)
        end = rendered.rstrip()
        marks = self.thinking or THINK
        thought: Thought = "may"
        if end.endswith(marks.begin):
            thought = "open"
        elif end.endswith(marks.end) or rendering.continue_final_message:
            thought = ""
        return Prompt(token_ids=tuple(ids), thought=thought)

    async def structured(self, form: Form) -> None:
        """Have a form's answers follow its structure, if it has one.

        Raises InvalidRequest: nothing can follow it, or not beside the form's other fields.
        Overloaded: too many grammars wait to be checked.
        """
        if form.structure is not None:
            limits.require_guidable(form.sampling, form.structure.param)
            form.sampling.grammar = await self.text.grammars.checked(form.structure)

    def choices(
        self, caller: Caller, model: ServedModel, prompts: Sequence[Prompt], form: Form
    ) -> list[Choice]:
        """Check the form and return the answers to make, prompt by prompt.

        Raises InvalidRequest: the first rule that is broken. QuotaExceeded: the key's limits have
        no room for so many.
        """
        limits.checked_count(
            len(prompts), limits.MAX_PROMPTS, param=form.prompt_param, what="prompts", least=1
        )
        limits.checked_int(form.num_choices, 1, self.config.max_choices, param="n")
        if len(prompts) > 1:
            num = len(prompts) * form.num_choices
            limits.checked_count(num, limits.MAX_ANSWERS, param="n", what="answers in all")
        # The first was counted with the call itself (``authenticate``).
        num_more = len(prompts) * form.num_choices - 1
        if num_more and caller.hold is not None:
            caller.hold.add(asyncio.get_running_loop().time(), num_more)
        stop = limits.checked_stop(form.sampling.stop)
        seed = form.sampling.seed
        if seed is None:
            seed = int.from_bytes(self._random_bytes(8), "little")
        asked = limits.checked_asked(form.asked, caller.asked, tenant=caller.key.name)
        salt = tenant_salt(caller.key, form.cache_salt, self._salt_key)
        if form.is_echo_only:
            # A step needs one (``Choice``).
            form = replace(form, sampling=replace(form.sampling, max_tokens=1))
        bad_words = self.text.bad_words(limits.checked_bad_words(form.sampling.bad_words))
        allowed = limits.checked_allowed(form.sampling.allowed_token_ids, model.vocab_size)
        longest = model.max_model_len - (form.sampling.max_tokens or form.default_max_tokens or 1)
        choices: list[Choice] = []
        for prompt_idx, prompt in enumerate(prompts):
            kept = limits.truncated(
                prompt.token_ids,
                form.truncate_prompt_tokens,
                form.truncation_side,
                longest=longest,
            )
            token_ids = limits.checked_prompt(kept, model, param=form.prompt_param)
            sampling = limits.sampling_params(
                form.sampling,
                model=model,
                num_prompt_tokens=len(token_ids),
                default_max_tokens=form.default_max_tokens,
                defaults=self._defaults,
                seed=seed,
                bad_words=bad_words,
                allowed=allowed,
            )
            for number in range(form.num_choices):
                # A client's seed gives every prompt the same answers as alone; a random one must
                # not make equal prompts answer alike.
                nth = len(choices) if form.sampling.seed is None else number
                own = sampling
                if nth:
                    own = replace(sampling, seed=limits.seed_of_choice(sampling.seed, nth))
                is_first = not choices
                choices.append(
                    Choice(
                        index=len(choices),
                        prompt_idx=prompt_idx,
                        request=GenerationRequest(
                            request_id=caller.request_id
                            if is_first
                            else RequestId(self._random_bytes(ID_BYTES)),
                            label=caller.label,
                            token_ids=token_ids,
                            sampling=own,
                            deadline_at=caller.deadline_at,
                            cache_salt=salt,
                            arrived_at=caller.arrived_at,
                            span=caller.span,
                            asked=asked,
                            follows=b"" if is_first else caller.request_id,
                        ),
                        text=self.text.new_answer(
                            own,
                            stop=stop,
                            include_stop=form.include_stop,
                            skip_special=form.skip_special_tokens,
                            prompt_tail=token_ids[-PROMPT_TAIL:] if form.continues_text else (),
                        ),
                        is_echo_only=form.is_echo_only,
                        structure_param="" if form.structure is None else form.structure.param,
                    )
                )
        for choice in choices:
            num_tokens = len(choice.request.token_ids)
            note(Moment.TOKENIZED, choice.request.request_id, num_tokens=num_tokens)
        return choices


def asked_by(headers: Mapping[str, str]) -> Asked:
    """Return what headers ask for (X-Priority, X-TTFT-Ms, X-TPOT-Ms); ranges are checked with the
    form. Raises InvalidRequest: no number."""
    priority, ttft, tpot = map(headers.get, ("X-Priority", "X-TTFT-Ms", "X-TPOT-Ms"))
    if priority is None and ttft is None and tpot is None:
        return NOTHING_ASKED
    if priority is not None and re.fullmatch(r"-?\d{1,9}", priority) is None:
        raise limits.refusal("x-priority", "must be a whole number")
    return Asked(
        "",
        None if priority is None else int(priority),
        _number(ttft, "x-ttft-ms", "milliseconds"),
        _number(tpot, "x-tpot-ms", "milliseconds"),
    )


def _number(text: str | None, param: str, unit: str) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise limits.refusal(param, f"must be a number of {unit}") from None
