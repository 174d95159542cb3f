"""llama.cpp, asked by ``run.py`` in lines of JSON; runs in the environment of the peer llama-cpp.

The C API with one sequence a row: no server, no sampler but an argmax over the logits, flash
attention on. Idle it waits on its input and uses no core.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time

import llama_cpp as lc  # pyright: ignore[reportMissingImports]
import numpy as np


class End:
    """One loaded model; a context as large as the question needs."""

    def __init__(self, path: str, threads: int, vocab: int) -> None:
        lc.llama_log_set(_silent, ctypes.c_void_p(0))
        lc.llama_backend_init()
        self.model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        assert self.model, f"cannot load {path}"
        self.threads, self.vocab = threads, vocab
        self.context = None

    def open(self, num_rows: int, num_tokens: int) -> None:
        """A context for so many sequences of so many tokens each."""
        if self.context:
            lc.llama_free(self.context)
        params = lc.llama_context_default_params()
        params.n_ctx = num_rows * num_tokens + 64
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = num_rows
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = False  # a sequence reads its own KV, not the cells of all
        params.flash_attn_type = 1
        self.context = lc.llama_init_from_model(self.model, params)
        assert self.context
        self.batch = lc.llama_batch_init(max(512, num_rows), 0, 1)

    def decode(self, tokens: list[int], positions: list[int], rows: list[int], wanted: list[bool]):
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, want) in enumerate(
            zip(tokens, positions, rows, wanted, strict=True)
        ):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row
            batch.logits[i] = want
        assert lc.llama_decode(self.context, batch) == 0

    def prefill(self, prompt: list[int], row: int) -> int:
        """Compute a prompt in pieces of 512; return the next token."""
        part = prompt
        for start in range(0, len(prompt), 512):
            part = prompt[start : start + 512]
            is_last = start + 512 >= len(prompt)
            wanted = [False] * (len(part) - 1) + [is_last]
            self.decode(part, list(range(start, start + len(part))), [row] * len(part), wanted)
        return self.best(len(part) - 1)

    def best(self, idx: int) -> int:
        logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(self.context, idx), (self.vocab,))
        return int(logits.argmax())

    def clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)


@lc.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    pass


def main() -> None:
    path, threads, vocab = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    end = End(path, threads, vocab)
    print(json.dumps({"version": lc.__version__}), flush=True)
    rng = random.Random(0)
    last: list[int] = []
    position = 0
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "fill":
            end.open(job["rows"], job["context"] + job["steps"])
            prompts = [
                [rng.randrange(vocab) for _ in range(job["context"])] for _ in range(job["rows"])
            ]
            last = [end.prefill(prompt, row) for row, prompt in enumerate(prompts)]
            position = job["context"]
            answer = {}
        elif job["do"] == "decode":
            took = []
            for _ in range(job["steps"]):
                began_at = time.perf_counter()
                rows = len(last)
                end.decode(last, [position] * rows, list(range(rows)), [True] * rows)
                last = [end.best(row) for row in range(rows)]
                took.append(time.perf_counter() - began_at)
                position += 1
            answer = {"seconds": took}
        else:  # prefill
            end.open(1, job["tokens"] + 1)
            took = []
            for _ in range(job["times"] + 1):
                prompt = [rng.randrange(vocab) for _ in range(job["tokens"])]
                end.clear()
                began_at = time.perf_counter()
                end.prefill(prompt, 0)
                took.append(time.perf_counter() - began_at)
            answer = {"seconds": took[1:]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
