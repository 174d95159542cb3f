"""An engine in a process of its own, asked over a pipe: vLLM keeps so much that is global that a
process holds one engine of it, and a test often wants two.

    with remote_engine(PrefillConfig(engine="vllm", ...)) as engine:
        Driver(engine).run_alone(...)

Layer events come with the results of their step. Calls of several threads take turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import traceback
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shared.config import WorkerConfig
from shared.engine.base import Engine, OnLayer, QueuedStep
from shared.engine.worker import fill_in
from shared.errors import MeshError
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.request import SamplingParams
from shared.step import Guide, RowResult, SampleSpec, StepRow

STARTS_WITHIN_S = 400.0


@contextlib.contextmanager
def remote_engine(
    config: WorkerConfig, begin: Callable[[], None] | None = None
) -> Iterator[RemoteEngine]:
    """Load an engine in a child for the length of the block. begin: called there before.

    Raises MeshError: as ``load_engine``."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(config, theirs, begin))
    child.start()
    theirs.close()
    try:
        assert ours.poll(STARTS_WITHIN_S), "the engine does not start"
        engine = RemoteEngine(ours, _result(ours))
        yield engine
        engine.call("close")
    finally:
        ours.close()
        child.join(30.0)
        if child.is_alive():
            child.kill()


class RemoteEngine(Engine):
    """See Engine."""

    def __init__(self, pipe: Connection, facts: Mapping[str, Any]) -> None:
        self._pipe = pipe
        self._facts = facts
        self._lock = threading.Lock()
        self._known: dict[int, object] = {}  # alive, so that their names stay their own

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the child's engine."""
        with self._lock:
            self._pipe.send((name, *arguments))
            return _result(self._pipe)

    @property
    def spec(self) -> ModelSpec:
        return self._facts["spec"]

    @property
    def layout(self) -> KvLayout:
        return self._facts["layout"]

    @property
    def num_blocks(self) -> int:
        return self._facts["num_blocks"]

    @property
    def block_size(self) -> int:
        return self._facts["block_size"]

    @property
    def machine(self) -> Mapping[str, str]:
        return self._facts["machine"]

    def pool_arrays(self) -> list[np.ndarray]:
        return []

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        sent: list[tuple[int, int, StepRow]] = []
        for row in rows:
            table = row.block_table
            self._known[id(table)] = table
            sample, guide = row.sample, None
            if sample is not None:
                prompt, output, guide = list(sample.prompt), list(sample.output), sample.guide
                self._known[id(guide)] = guide
                # What it waited for is on the other side.
                own = None if guide is None else Guide(guide.grammar, guide.output)
                sample = SampleSpec(sample.params, sample.index, prompt, output, own)
            plain = row._replace(
                token_ids=list(row.token_ids),
                block_table=list(table),
                sample=sample,
                prompt_targets=list(row.prompt_targets),
            )
            sent.append((id(table), id(guide), plain))
        results, layers = self.call("step", sent, on_layer is not None)
        for layer in layers:
            if on_layer is not None:
                on_layer(layer)
        return results

    def step_ahead(self, steps: Sequence[Sequence[StepRow]]) -> list[list[RowResult]]:
        """Run steps of single tokens, each queued before the results of the one before it are read.
        Rows of a table that was in the step before lack their token. Such an engine may lie on a
        CPU, where it gains nothing: everything is done when it is queued."""
        return self.call("step_ahead", [[(id(row.block_table), row) for row in it] for it in steps])

    def layer_times(self) -> Sequence[float]:
        return ()

    def enter_thread(self) -> None:
        pass

    def new_buffer(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, np.uint8)

    def gather(self, *arguments: Any) -> None:
        *at, out = arguments
        octets = np.frombuffer(memoryview(out).cast("B"), np.uint8)
        octets[:] = np.frombuffer(self.call("gather", _plain(at), len(octets)), np.uint8)

    def scatter(self, *arguments: Any) -> None:
        *at, data = arguments
        self.call("scatter", _plain(at), bytes(memoryview(data).cast("B")))

    def close(self) -> None:
        pass


def _plain(at: list[Any]) -> list[Any]:
    return [list(at[0]), *at[1:]]


def _result(pipe: Connection) -> Any:
    is_right, value = pipe.recv()
    if not is_right:
        raise value
    return value


def _serve(config: WorkerConfig, pipe: Connection, begin: Callable[[], None] | None) -> None:
    if begin is not None:
        begin()
    from shared.engine.load import load_engine

    try:
        engine = load_engine(config)
    except MeshError as error:
        pipe.send((False, error))
        return
    facts = ("spec", "layout", "num_blocks", "block_size", "machine")
    pipe.send((True, {name: getattr(engine, name) for name in facts}))
    # Engines know sequences by the identity of their block tables and params, and keep grammars'
    # states in guides; a pipe makes copies.
    tables: dict[int, array[int]] = {}
    guides: dict[int, Guide] = {}
    params: dict[SamplingParams, SamplingParams] = {}
    with contextlib.suppress(EOFError):
        while True:
            name, *arguments = pipe.recv()
            try:
                value = _answer(engine, name, arguments, tables, guides, params)
            except MeshError as error:
                pipe.send((False, error))
            except Exception:
                pipe.send((False, RuntimeError(traceback.format_exc())))
            else:
                pipe.send((True, value))
            if name == "close":
                return


def _answer(
    engine: Engine,
    name: str,
    arguments: list[Any],
    tables: dict[int, array[int]],
    guides: dict[int, Guide],
    params: dict[SamplingParams, SamplingParams],
) -> Any:
    if name == "close":
        engine.close()
        return None
    if name == "gather":
        at, num_bytes = arguments
        out = np.zeros(num_bytes, np.uint8)
        engine.gather(*at, out)
        return out.tobytes()
    if name == "scatter":
        at, data = arguments
        engine.scatter(*at, np.frombuffer(bytearray(data), np.uint8))
        return None
    if name == "step_ahead":
        steps = [[row._replace(block_table=tables[at]) for at, row in it] for it in arguments[0]]
        return _step_ahead(engine, steps)
    if name == "expect":
        engine.expect(*arguments)
        return None
    sent, follows_layers = arguments
    rows: list[StepRow] = []
    for key, guide_key, row in sent:
        table = tables.setdefault(key, array("i"))
        table.extend(row.block_table[len(table) :])
        if row.sample is not None:
            spec = row.sample
            known = params.setdefault(spec.params, spec.params)
            guide = None if spec.guide is None else guides.setdefault(guide_key, spec.guide)
            sample = SampleSpec(known, spec.index, spec.prompt, spec.output, guide)
            row = row._replace(sample=sample)
        rows.append(row._replace(block_table=table))
    layers: list[int] = []
    results = engine.step(rows, layers.append if follows_layers else None)
    return results, layers


def _step_ahead(engine: Any, steps: list[list[StepRow]]) -> list[list[RowResult]]:
    engine._queues = True
    found: list[list[RowResult]] = []
    running: QueuedStep | None = None
    before: list[StepRow] = []
    tokens: dict[int, int] = {}
    for rows in steps:
        sources = {id(row.block_table): idx for idx, row in enumerate(before)}
        to_come: list[tuple[list[int], int]] = []
        for idx, row in enumerate(rows):
            at = id(row.block_table)
            if at in sources:
                to_come.append(([-1], sources[at]))
                rows[idx] = row._replace(token_ids=to_come[-1][0])
            elif at in tokens:
                rows[idx] = row._replace(token_ids=[tokens[at]])
        following = engine.prepare(rows, to_come)()
        if running is not None:
            found.append(running.results())
            fill_in(to_come, found[-1])
            for row, result in zip(before, found[-1], strict=True):
                tokens[id(row.block_table)] = result.token_id
        running, before = following, rows
    assert running is not None
    return [*found, running.results()]
