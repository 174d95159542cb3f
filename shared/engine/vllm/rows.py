"""Our rows as vLLM's SchedulerOutput, and its output as our results.

vLLM's runner keeps a state of each request between steps: its blocks and tokens. A row that goes on
where its last one ended is "cached" for it: one more token, perhaps one more block. Every other row
(a chunk of a prompt, a hand-over, a sequence that paused) is "new", under a name of its own; what
is before it has its KV in the blocks, and nobody reads the ids that are named for it. So no state
has to be kept true, and an engine stays as free of requests as base.py says.
"""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from shared.engine.sampling import sampler
from shared.engine.sampling.guides import Masks
from shared.engine.vllm.plugins import ROW, Choices, StepMeta
from shared.request import SamplingParams, TokenLogprobs
from shared.step import RowResult, SampleSpec, StepRow, ToCome

FIRST_BLOCK = 1
"""vLLM's block 0 is nobody's: ours come behind it."""


@dataclass(slots=True)
class _Live:
    """A sequence that vLLM's runner knows. table: its blocks, by identity: nothing in it ever
    changes. stop, token: where its last row ended, and what was sampled there."""

    name: str
    table: Sequence[int]
    params: SamplingParams | None
    num_blocks: int
    stop: int
    token: int = -1
    num_outputs: int = 0


class PlannedStep(NamedTuple):
    """One step. number: counts up. order: it in vLLM's words. live: the sequence of each row."""

    number: int
    order: SchedulerOutput
    live: Sequence[_Live]


class Rows:
    """The rows of one step after the other."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._live: dict[int, _Live] = {}
        self._num_names = 0
        self._num_steps = 0
        self._last: Sequence[_Live] = ()

    def follow(self, rows: Sequence[StepRow], to_come: ToCome) -> bool:
        """Whether rows that lack a token are, for vLLM's runner, the next of the sequences in the
        step planned last whose token they lack."""
        sources = {id(lacking): source for lacking, source in to_come}
        for row in rows:
            source = sources.get(id(row.token_ids))
            if source is not None:
                one = self._last[source]
                is_known = self._live.get(id(row.block_table)) is one
                if not is_known or not _goes_on(one, row, is_to_come=True):
                    return False
        return True

    def plan(
        self,
        rows: Sequence[StepRow],
        masks: Future[Masks] | Masks | None = None,
        *,
        follows_layers: bool = False,
        to_come: ToCome = (),
    ) -> PlannedStep:
        """Return the step that computes these rows. masks: of those that follow a grammar. to_come:
        rows that ``follow`` the step planned last, whose results nobody has read."""
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        specs: dict[str, SampleSpec] = {}
        forced: dict[str, int] = {}
        guided: list[str] = []
        counts: dict[str, int] = {}
        lacking = {id(token_ids) for token_ids, _ in to_come}
        live: list[_Live] = []
        before, self._live = self._live, {}
        for row in rows:
            num_blocks = -(-row.stop // self._block_size)
            one = before.get(id(row.block_table))
            is_to_come = id(row.token_ids) in lacking
            if one is not None and _goes_on(one, row, is_to_come=is_to_come):
                _continue(cached, one, row, num_blocks)
            else:
                self._num_names += 1
                params = None if row.sample is None else row.sample.params
                name = f"r{self._num_names}"
                one = _Live(name, row.block_table, params, num_blocks, row.stop)
                new.append(_new(one, row))
                if _wants_last_target(row):
                    forced[name] = row.prompt_targets[-1]
            one.num_blocks, one.stop = num_blocks, row.stop
            self._live[id(row.block_table)] = one
            live.append(one)
            counts[one.name] = len(row.token_ids)
            if row.sample is None:
                continue
            if row.sample.guide is not None:
                guided.append(one.name)
            if row.sample.guide is not None or not sampler.is_most_likely(row.sample):
                specs[one.name] = _to_travel(row.sample)
        kept = {one.name for one in live}
        self._num_steps += 1
        self._last = live
        choices = Choices(specs, forced, guided, masks)
        meta = StepMeta(self._num_steps, choices, follows_layers=follows_layers)
        order = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids={one.name for one in before.values()} - kept,
            free_encoder_mm_hashes=[],
            kv_connector_metadata=meta,
        )
        return PlannedStep(self._num_steps, order, live)

    @staticmethod
    def results(rows: Sequence[StepRow], step: PlannedStep, output: Any) -> list[RowResult]:
        """Return what a planned step has brought. output: vLLM's ModelRunnerOutput."""
        results: list[RowResult] = []
        for row, one in zip(rows, step.live, strict=True):
            idx = output.req_id_to_index[one.name]
            prompt = _prompt_logprobs(row, one, idx, output)
            if row.sample is None:
                results.append(RowResult(-1, None, prompt))
                continue
            (one.token,) = output.sampled_token_ids[idx]
            one.num_outputs += 1
            wanted = row.sample.params.logprobs
            logprobs = None if wanted is None else _logprobs(output.logprobs, idx, wanted)
            results.append(RowResult(one.token, logprobs, prompt))
        return results

    def forget(self) -> None:
        """A step has failed: nobody knows what vLLM knows."""
        self._live = {}


def _goes_on(one: _Live, row: StepRow, *, is_to_come: bool) -> bool:
    return (
        row.sample is not None
        and one.table is row.block_table
        and one.params is row.sample.params
        and one.stop == row.start
        and len(row.token_ids) == 1
        and (is_to_come or one.token == row.token_ids[0])
        and not row.prompt_targets
    )


def _continue(cached: CachedRequestData, one: _Live, row: StepRow, num_blocks: int) -> None:
    more = [block + FIRST_BLOCK for block in row.block_table[one.num_blocks : num_blocks]]
    cached.req_ids.append(one.name)
    cached.new_token_ids.append([])
    cached.num_computed_tokens.append(row.start)
    cached.new_block_ids.append((more,) if more else None)
    cached.num_output_tokens.append(one.num_outputs)


def _new(one: _Live, row: StepRow) -> NewRequestData:
    ids = [0] * row.start + list(row.token_ids)
    wants_last = _wants_last_target(row)
    if row.sample is None and not wants_last:
        ids.append(0)  # its prompt goes on: vLLM samples nothing that counts
    num_top = row.sample.params.logprobs if row.sample is not None else None
    prompt_top = row.prompt_logprobs if row.prompt_targets else None
    params = VllmParams(
        temperature=0.0,
        max_tokens=1 << 20,
        ignore_eos=True,
        detokenize=False,
        logprobs=prompt_top if wants_last else num_top,
        prompt_logprobs=prompt_top,
        extra_args={ROW: one.name},
    )
    return NewRequestData(
        req_id=one.name,
        prompt_token_ids=ids,
        prefill_token_ids=ids,
        mm_features=[],
        sampling_params=params,
        pooling_params=None,
        lora_request=None,
        block_ids=([block + FIRST_BLOCK for block in row.block_table[: one.num_blocks]],),
        num_computed_tokens=row.start,
    )


def _wants_last_target(row: StepRow) -> bool:
    """Whether a prompt token behind this chunk is predicted by its last one. vLLM tells logprobs of
    a prompt for tokens that it has; this one it is made to sample."""
    return (
        row.sample is None
        and row.prompt_logprobs is not None
        and len(row.prompt_targets) == len(row.token_ids)
    )


def _to_travel(spec: SampleSpec) -> SampleSpec:
    """What a rank in another process needs of it: prompts are long, and seldom looked at; of a
    grammar its mask."""
    params = replace(spec.params, grammar="") if spec.params.grammar else spec.params
    if params.needs_history:
        return SampleSpec(params, spec.index, list(spec.prompt), list(spec.output))
    return SampleSpec(params, spec.index, (), ())


def _logprobs(lists: Any, idx: int, num_top: int) -> TokenLogprobs:
    return _entry(lists.logprob_token_ids[idx], lists.logprobs[idx], num_top)


def _entry(ids: Any, values: Any, num_top: int) -> TokenLogprobs:
    """vLLM's row: the token itself, then the most likely ones. Ties by id, as in sampler.py."""
    pairs = zip(ids[1:].tolist(), values[1:].tolist(), strict=True)
    top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(float(values[0]), tuple(top[:num_top]))


def _prompt_logprobs(row: StepRow, one: _Live, idx: int, output: Any) -> tuple[TokenLogprobs, ...]:
    if row.prompt_logprobs is None or not row.prompt_targets:
        return ()
    num_here = min(len(row.prompt_targets), len(row.token_ids) - 1)
    entries: list[TokenLogprobs] = []
    if num_here:
        tensors = output.prompt_logprobs_dict[one.name]
        ids = tensors.logprob_token_ids.numpy()
        values = tensors.logprobs.numpy()
        num_top = row.prompt_logprobs
        # vLLM's first runner tells of what is before the chunk, too, the second of the chunk alone.
        here = range(len(ids) - num_here, len(ids))
        entries += [_entry(ids[line], values[line], num_top) for line in here]
    if _wants_last_target(row):
        entries.append(_logprobs(output.logprobs, idx, row.prompt_logprobs))
    return tuple(entries)
