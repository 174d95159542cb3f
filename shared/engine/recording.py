"""Doing the same device work again without Python: CUDA graphs, or nothing of the kind on CPU.

A recording is of work that reads and writes fixed places: who replays it first writes new numbers
there. On CPU the work is simply done again, so all but the capture itself is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

Work = Callable[[], torch.Tensor]
"""Queues device work and returns its result; no host reads a number of it on the way."""


class Recording(Protocol):
    """Work that can be done again."""

    def replay(self) -> torch.Tensor:
        """Do it again on the current stream; the result lives until the recorder's next replay."""
        ...


class Recorder(Protocol):
    """Makes recordings, which may share memory: no two of one recorder are replayed at once."""

    def record(self, work: Work) -> Recording:
        """Do the work at least once, and remember it.

        Raises torch.OutOfMemoryError: there is no room for it; nothing is left behind.
        """
        ...


class InlineRecorder:
    """CPU: a recording is the work itself."""

    def record(self, work: Work) -> Recording:
        """See Recorder."""
        work()
        return _Inline(work)


class _Inline:
    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> torch.Tensor:
        """See Recording."""
        return self._work()


class CudaRecorder:
    """CUDA graphs in one memory pool: record the largest first, and the others fit into its memory.

    Belongs into ``Streams.computing``: the current stream is captured, and replayed on."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Recording:
        """See Recorder."""
        # Once before: kernels are compiled, and libraries take memory of their own at first use,
        # which must not be the graph's.
        work()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (copies) may use the device meanwhile: what they do is not of this capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # says that the capture failed, which is known
                graph.capture_end()
            raise
        graph.capture_end()
        return _CudaGraph(graph, result)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> torch.Tensor:
        """See Recording."""
        self._graph.replay()
        return self._result
