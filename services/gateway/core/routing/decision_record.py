"""A routing decision as a record: all that the policy looked at, in numbers, so that anybody can
see why a request went where it went, and decide again.

``record_of`` writes it, ``replay`` rebuilds the workers from it and asks the policy anew: with the
same views, the same memory and the same random number it takes the same pair, or says what differs.
Records are JSON; incarnations are 16 hexadecimal digits. No text and no token is in it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from dataclasses import replace as dataclass_replace
from typing import Any, cast

from services.gateway.core.index.fetches import NOTHING, Fetch, Hit
from services.gateway.core.routing.pools import pool_of
from services.gateway.core.routing.routing import POLICIES, RouteDecision, Seen
from services.gateway.core.routing.sides import AnswerTerms, PromptTerms, RouteRequest, Sides
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.address import Address
from shared.errors import InvalidRequest
from shared.ids import Incarnation
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.predict.step_time import NO_FIT, StepFit

Record = dict[str, Any]


def record_of(decision: RouteDecision, *, attempt: int, at_s: float) -> Record:
    """Return the record. at_s: loop time of the decision.

    Of each worker: score, what the policy compared, lower is better, and its terms, None where it
    is no sum (``PromptTerms``, ``AnswerTerms``); unseen_tokens
    and unseen_blocks, what this gateway had ordered that the report, report_age_s old, did not
    count, and that is part of pending_tokens and reserved_blocks; cached_tokens of the prompt, as
    far as the gateway knows, of which the first in_pool lie where they can be sent from, and of
    those after them in_dram and on_ssd below; dram_token_s and ssd_token_s, what a token's load
    takes, 0 = not known. partners: of each prefill worker the decode workers that it reaches, by
    their places. fetchable_tokens: what one worker has of the prompt at most. prediction: seconds
    until token 1 and what they consist of, None = the prefill worker knew no step times.
    """
    seen, sides, scores = decision.seen, decision.sides, decision.scores
    request, prediction, memory = seen.request, decision.prediction, seen.memory
    return {
        "attempt": attempt,
        "policy": decision.policy,
        "random": seen.random,
        "memory": {_hex(it): turn for it, turn in memory.items()}
        if isinstance(memory, Mapping)
        else memory,
        "num_tokens": request.num_tokens,
        "max_new_tokens": request.max_new_tokens,
        "avoid": [_hex(it) for it in sorted(request.avoid)],
        "num_output_tokens": request.num_output_tokens,
        "affinity": f"{request.affinity:016x}",
        "fetchable_tokens": 0 if request.fetches is None else request.fetches.most_tokens,
        "layout": asdict(sides.decodes[0].layout),
        "hand_over_speeds": _speeds_of(decision),
        "prefill": _hex(decision.prefill),
        "decode": _hex(decision.decode),
        "prefills": _side(sides.prefills, seen, scores.prefills, scores.terms, at_s),
        "decodes": _side(sides.decodes, seen, scores.decodes, scores.answer_terms, at_s),
        "partners": [list(sides.partners_of(place)) for place in range(len(sides.prefills))],
        "prediction": prediction and {**prediction._asdict(), "ttft_s": prediction.ttft_s},
    }


def chosen(decision: RouteDecision) -> Record:
    """Return the policy, and of the pair that it took the scores with their terms, as in its
    record."""
    (prefill, decode), scores = decision.places, decision.scores
    return {
        "policy": decision.policy,
        "prefill": _scored(scores.prefills[prefill], scores.terms, prefill),
        "decode": _scored(scores.decodes[decode], scores.answer_terms, decode),
    }


def _scored(score: float, terms: Sequence[PromptTerms | AnswerTerms], place: int) -> Record:
    if not terms:
        return {"score": score, "terms": None}
    told = terms[place]._asdict()
    if "source" in told:
        told["source"] = _hex(told["source"]) if told["source"] else None
    return {"score": score, "terms": told}


def _speeds_of(decision: RouteDecision) -> list[float]:
    """Bytes a second to each decode worker from the prefill worker by which these are scored."""
    source = decision.scores.source
    if source is None:
        return []
    view = decision.seen.views[decision.sides.prefills[source].place]
    assert view is not None
    speeds = view.status.speeds
    return [speeds.get(worker.incarnation, 0.0) for worker in decision.sides.decodes]


def _side(
    workers: Sequence[Worker],
    seen: Seen,
    scores: Sequence[float],
    terms: Sequence[PromptTerms | AnswerTerms],
    at_s: float,
) -> list[Record]:
    return [
        {
            "worker": _hex(worker.incarnation),
            "address": str(Address(worker.host, worker.port)),
            **_scored(score, terms, place),
            "pending_tokens": view.pending_tokens,
            "unseen_tokens": view.pending_tokens - view.status.pending_tokens,
            "reserved_blocks": view.reserved_blocks,
            "unseen_blocks": view.reserved_blocks - view.status.reserved_blocks,
            "queued": view.num_queued,
            "prompts": view.num_prompts,
            "answers": view.num_answers,
            "queue_s": view.status.queue_s,
            "prompt_steps": (view.status.prompt_steps if view.is_believed else NO_FIT)._asdict(),
            "answer_steps": (view.status.answer_steps if view.is_believed else NO_FIT)._asdict(),
            "step_tokens": view.status.step_tokens,
            **_hit_to_json(seen.request.cached.get(worker.place, NOTHING)),
            "dram_token_s": view.status.dram_token_s,
            "ssd_token_s": view.status.ssd_token_s,
            "report_age_s": max(0.0, at_s - view.reported_at),
            "role": worker.role.value,
            "serves": [role.value for role in worker.serves],
            "home": None if view.status.home is None else view.status.home.value,
            "colocated": worker.incarnation in view.status.paired,
            "blocks": worker.num_blocks,
            "block_size": worker.block_size,
        }
        for place, (worker, score) in enumerate(zip(workers, scores, strict=True))
        if (view := seen.views[worker.place]) is not None
    ]


def replay(record: Mapping[str, Any]) -> list[str]:
    """Decide again from a record. Returns what differs, in sentences; none = all is as recorded.

    Raises InvalidRequest: it is no record, or of a policy that this release does not have.
    """
    try:
        return _replay(record)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidRequest(
            f"this is no decision's record ({type(error).__name__}: {error}): save one with "
            "`pdmesh explain REQUEST_ID --json`",
            code="no_record",
        ) from None


def _replay(record: Mapping[str, Any]) -> list[str]:
    name = record["policy"]
    if name not in POLICIES:
        raise InvalidRequest(
            f"this release has no policy {name!r}, only {', '.join(POLICIES)}; --policy names one "
            "of your own",
            code="no_record",
        )
    policy = POLICIES[name]()
    memory = policy.memory = record["memory"]
    if isinstance(memory, Mapping):
        turns = cast("Mapping[str, int]", memory)
        policy.memory = {Incarnation(int(name, 16)): turn for name, turn in turns.items()}
    bits: dict[str, int] = {}
    prefills: list[Worker] = [_worker(it, bits) for it in record["prefills"]]
    by_name = {
        it["worker"]: worker for it, worker in zip(record["prefills"], prefills, strict=True)
    }
    # Who stands on both sides is one worker, with one load.
    decodes = [by_name.get(it["worker"]) or _worker(it, bits) for it in record["decodes"]]
    # Of decode workers alone: by it go the bytes of a hand-over; no policy here reads others'.
    layout = KvLayout(**record["layout"])
    for worker in decodes:
        worker.layout = layout
    partners = [
        sum([decodes[int(place)].bit for place in places])
        for _, places in zip(prefills, record["partners"], strict=True)
    ]
    sides = Sides(prefills, partners, decodes)
    request = RouteRequest(
        num_tokens=record["num_tokens"],
        max_new_tokens=record["max_new_tokens"],
        avoid=frozenset(Incarnation(int(it, 16)) for it in record["avoid"]),
        affinity=int(record["affinity"], 16),
        cached={
            worker.place: _hit_from_json(it)
            for workers, side in ((prefills, "prefills"), (decodes, "decodes"))
            for worker, it in zip(workers, record[side], strict=True)
        },
        fetches=_RecordedFetches(record, prefills) if record["fetchable_tokens"] else None,
        num_output_tokens=record["num_output_tokens"],
    )
    # Whose they are is found by the policy: it was the same one, or the scores differ anyway.
    speeds = {
        worker.incarnation: speed
        for worker, speed in zip(decodes, record["hand_over_speeds"], strict=False)
    }
    for worker in prefills:
        worker.status = dataclass_replace(worker.status, speeds=speeds)
    scores = policy.scores(request, sides)
    prefill, decode = policy.choose(request, sides, scores, record["random"])
    differences = [
        f"{side} worker {it['worker']} had score {it['score']}, and has {score} now"
        for side, recorded, scored in (
            ("prefill", record["prefills"], scores.prefills),
            ("decode", record["decodes"], scores.decodes),
        )
        for it, score in zip(recorded, scored, strict=True)
        if it["score"] != score
    ]
    return differences + [
        f"{side}: {record[side]} was taken ({pool_of(worker).value} now is {now})"
        for side, worker in (("prefill", prefills[prefill]), ("decode", decodes[decode]))
        if (now := _hex(worker.incarnation)) != record[side]
    ]


class _RecordedFetches:
    """The fetches that were taken into a score, as they were (``Fetches``)."""

    def __init__(self, record: Mapping[str, Any], prefills: Sequence[Worker]) -> None:
        self.most_tokens: int = record["fetchable_tokens"]
        self._by_sink = {
            worker.incarnation: Fetch(
                Incarnation(int(terms["source"], 16)), terms["cached_tokens"], terms["fetch"]
            )
            for worker, it in zip(prefills, record["prefills"], strict=True)
            if (terms := it.get("terms")) and terms["source"]
        }

    def to(self, sink: Worker) -> Fetch | None:
        """See ``Fetches``."""
        return self._by_sink.get(sink.incarnation)


def _worker(it: Mapping[str, Any], bits: dict[str, int]) -> Worker:
    """Return a worker with the load that the record tells of it."""
    incarnation, terms = Incarnation(int(it["worker"], 16)), it.get("terms")
    worker = Worker(
        role=Role(it["role"]),
        incarnation=incarnation,
        host="",
        port=0,
        model=_NO_MODEL,
        layout=_NO_LAYOUT,
        num_blocks=it["blocks"],
        block_size=it["block_size"],
        serves=tuple(map(Role, it["serves"])),
        bit=bits.setdefault(it["worker"], 1 << len(bits)),
    )
    worker.report(
        WorkerStatus(
            pending_tokens=it["pending_tokens"],
            reserved_blocks=it["reserved_blocks"],
            num_waiting=it["queued"],
            num_prompts=it["prompts"],
            num_answers=it["answers"],
            # As it was predicted, our own orders in it: all that there was to wait for.
            queue_s=terms["wait"] if terms and terms.get("is_s") else it["queue_s"],
            prompt_steps=StepFit(**it["prompt_steps"]),
            answer_steps=StepFit(**it["answer_steps"]),
            step_tokens=it["step_tokens"],
            dram_token_s=it.get("dram_token_s", 0.0),
            ssd_token_s=it.get("ssd_token_s", 0.0),
            home=None if it["home"] is None else Role(it["home"]),
            paired=frozenset({incarnation} if it["colocated"] else ()),
        )
    )
    return worker


_NO_MODEL = ModelSpec(name="", fingerprint=b"", vocab_size=1, max_model_len=1, dtype="float32")
_NO_LAYOUT = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8)


def _hit_to_json(hit: Hit) -> Record:
    found = hit._asdict()
    return {"cached_tokens": found.pop("tokens"), **found}


def _hit_from_json(it: Mapping[str, Any]) -> Hit:
    return Hit(it["cached_tokens"], *(it.get(name, 0) for name in Hit._fields[1:]))


def _hex(incarnation: int) -> str:
    return f"{incarnation:016x}"
