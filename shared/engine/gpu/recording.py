"""Doing the same device work again without Python: CUDA graphs, or nothing of the kind on CPU.

A recording is of work that reads and writes fixed places: who replays it first writes new numbers
there. On CPU the work is simply done again, so all but the capture itself is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

Work = Callable[[], torch.Tensor]
"""Queues device work and returns its result; no host reads a number of it on the way. A recording
is called like the work: it does it again on the current stream, and the result lives until the
recorder's next recording is called."""


class Recorder:
    """Makes recordings, which may share memory: no two of one recorder are replayed at once. This
    one is a CPU's."""

    def record(self, work: Work) -> Work:
        """Do the work at least once, and return its recording.

        Raises torch.OutOfMemoryError: there is no room for it; nothing is left behind.
        """
        work()
        return work


class CudaRecorder(Recorder):
    """CUDA graphs in one memory pool: record the largest first, and the others fit into its memory.

    Belongs into ``Streams.computing``: the current stream is captured, and replayed on."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
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

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
