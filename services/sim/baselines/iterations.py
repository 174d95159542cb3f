"""Systems that batch anew for every iteration: Orca (OSDI'22) and Sarathi-Serve (OSDI'24).

A policy says what the next iteration computes; `serve` runs it on one engine with a time model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

StepTime = Callable[[Sequence["Part"]], float]
"""Seconds of one iteration."""


@dataclass(slots=True, eq=False)
class Stream:
    """One request and how far it is. Times in seconds."""

    idx: int
    at: float
    prompt_len: int
    output_len: int
    num_computed: int = 0
    num_iterations: int = 0
    is_running: bool = False
    token_times: list[float] = field(default_factory=list[float])

    @property
    def is_decoding(self) -> bool:
        """Whether its whole prompt is computed."""
        return self.num_computed >= self.prompt_len

    @property
    def is_finished(self) -> bool:
        return len(self.token_times) >= self.output_len

    @property
    def gaps(self) -> list[float]:
        """Between its tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Part:
    """What of one request an iteration computes: tokens from ``start`` on."""

    stream: Stream
    num_tokens: int
    start: int


class OrcaPolicy:
    """Iteration-level scheduling, first come first served (algorithm 1): a request is let in when
    its prompt and its longest answer fit into the slots; nobody overtakes one that does not fit.

    num_workers: iterations under way at once, the depth of the pipeline.
    """

    def __init__(self, max_batch: int, num_slots: int, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self.num_reserved = 0
        self._max_batch, self._num_slots = max_batch, num_slots
        self._pool: list[Stream] = []

    def arrive(self, stream: Stream) -> None:
        self._pool.append(stream)

    def select(self) -> list[Part]:
        batch: list[Part] = []
        for stream in self._pool:
            if stream.is_running:
                continue
            if len(batch) == self._max_batch:
                break
            if not stream.num_iterations:
                needed = stream.prompt_len + stream.output_len
                if self.num_reserved + needed > self._num_slots:
                    break
                self.num_reserved += needed
            num = 1 if stream.is_decoding else stream.prompt_len
            batch.append(Part(stream, num, stream.num_computed))
        return batch

    def finish(self, stream: Stream) -> None:
        self._pool.remove(stream)
        self.num_reserved -= stream.prompt_len + stream.output_len


class SarathiPolicy:
    """Stall-free batching (algorithm 3): every decode, then prompts under way, then new ones, as
    far as the token budget reaches. A decode is never left out for a prompt."""

    num_workers = 1

    def __init__(self, budget: int) -> None:
        """budget: tokens of an iteration that prompts may fill; decodes count first."""
        self._budget = budget
        self._running: list[Stream] = []
        self._waiting: deque[Stream] = deque()

    def arrive(self, stream: Stream) -> None:
        self._waiting.append(stream)

    def select(self) -> list[Part]:
        batch = [Part(s, 1, s.num_computed) for s in self._running if s.is_decoding]
        left = self._budget - len(batch)
        # The paper asks for memory and for a place among 128, too: here there is always both.
        while self._waiting and left > sum(map(_uncomputed, self._running)):
            self._running.append(self._waiting.popleft())
        for stream in self._running:
            num = min(_uncomputed(stream), left)
            if num > 0:
                batch.append(Part(stream, num, stream.num_computed))
                left -= num
        return batch

    def finish(self, stream: Stream) -> None:
        self._running.remove(stream)


def _uncomputed(stream: Stream) -> int:
    """Tokens of its prompt that are to be computed before it decodes."""
    return max(0, stream.prompt_len - stream.num_computed)


def serve(
    policy: OrcaPolicy | SarathiPolicy,
    streams: Iterable[Stream],
    step_s: StepTime,
    watch: Callable[[Sequence[Part]], None] = lambda batch: None,
) -> None:
    """Serve requests, by arrival; token times are written into them. watch: sees every batch.

    With n workers an iteration takes as long, and the next begins an n-th later.
    """
    arrivals = deque(streams)
    flying: deque[tuple[float, list[Part]]] = deque()
    now = free_at = last_end = 0.0
    while True:
        while arrivals and arrivals[0].at <= now:
            policy.arrive(arrivals.popleft())
        batch = policy.select() if len(flying) < policy.num_workers and free_at <= now else []
        if batch:
            watch(batch)
            took = step_s(batch)
            for part in batch:
                part.stream.is_running = True
            ends_at = max(now + took, last_end)  # nobody overtakes in a pipeline
            flying.append((ends_at, batch))
            last_end = ends_at
            free_at = now + took / policy.num_workers
            continue
        times = [flying[0][0]] if flying else []
        times += [arrivals[0].at] if arrivals else []
        times += [free_at] if free_at > now and len(flying) < policy.num_workers else []
        if not times:
            return
        now = min(times)
        while flying and flying[0][0] <= now:
            _, done = flying.popleft()
            for part in done:
                _advance(policy, part, now)


def _advance(policy: OrcaPolicy | SarathiPolicy, part: Part, now: float) -> None:
    stream = part.stream
    stream.is_running = False
    stream.num_iterations += 1
    stream.num_computed += part.num_tokens
    if not stream.is_decoding:
        return
    stream.token_times.append(now)
    if stream.is_finished:
        policy.finish(stream)
