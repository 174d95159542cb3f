"""Runs another simulator with a given load, in its own interpreter, which has none of our packages.

    python peer_run.py splitwise|simdistserve|vidur CLONE LOAD.json FOLDER

``peers.py`` starts it. Prints one line of JSON: CPU seconds of the simulation alone (user and
system; neither imports nor reading files nor writing results), events, and what requests felt.
"""

from __future__ import annotations

import csv
import heapq
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Felt = list[tuple[float, float]]
"""Of each request that ended: time to first token and to last, in seconds."""


def clocked(run: Callable[[], Any]) -> float:
    """Return the CPU of this process that a call took, in seconds."""
    began = time.process_time()
    run()
    return time.process_time() - began


def write_csv(path: Path, columns: str, rows: list[tuple[Any, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns.split(), *rows])


def splitwise(clone: Path, load: dict[str, Any], folder: Path) -> tuple[float, int, Felt]:
    """Its own ``run.py`` by its paper's scheduler, Llama2-70B on eight H100; the loop is timed."""
    rows = [(idx, 2, 0, at, 1, *its) for idx, (at, *its) in enumerate(load["asks"])]
    columns = "request_id request_type application_id arrival_timestamp batch_size"
    write_csv(folder / "load.csv", f"{columns} prompt_size token_size", rows)
    launcher = folder / "conf" / "hydra" / "launcher" / "ray.yaml"  # a plugin that nothing uses
    launcher.parent.mkdir(parents=True)
    launcher.write_text("_target_: none\nray: {init: {address: none}}\n")
    os.chdir(clone)
    sys.path[0] = str(clone)
    simulator: Any = import_module("simulator")
    taken, popped = list[float](), [0]

    def pop(events: list[Any]) -> Any:
        popped[0] += 1
        return heapq.heappop(events)

    simulator.heapq = SimpleNamespace(heappush=heapq.heappush, heappop=pop)
    loop = simulator.Simulator.run
    simulator.Simulator.run = lambda self: taken.append(clocked(lambda: loop(self)))
    num = {"prompt": load["prefill"], "token": load["decode"]}
    overrides = {
        "cluster": "half_half", "cluster.servers.0.count": 0,
        "cluster.servers.1.count": sum(num.values()), "start_state": "splitwise",
        **{f"start_state.{kind}.num_instances": count for kind, count in num.items()},
        "performance_model": "db", "applications.0.scheduler": "mixed_pool",
        "applications.0.model_architecture": "llama2-70b",
        "applications.0.model_size": "llama2-70b-fp16",
        "trace.dir": folder, "trace.filename": "load", "hydra.run.dir": folder / "out",
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in overrides.items()]
    sys.argv = ["run.py", "--config-dir", str(folder / "conf"), *words]
    runpy.run_path(str(clone / "run.py"), run_name="__main__")
    with (folder / "out" / "detailed" / "0.csv").open() as file:
        rows = list(csv.DictReader(file))
    felt = [(float(row["ttft_times"]), float(row["response_times"])) for row in rows]
    return taken[0], popped[0], felt


def simdistserve(clone: Path, load: dict[str, Any], folder: Path) -> tuple[float, int, Felt]:
    """What ``simulate_dist`` does for OPT-13B, with more than one instance of each kind."""
    sys.path[0] = str(clone)
    simpy = import_module("simpy")
    base, model = "simdistserve.base", import_module("simdistserve.constants").ModelTypes.opt_13b
    pairs = [(prompt, answer) for _, prompt, answer in load["asks"]]
    requests = import_module(f"{base}.workload").convert_pd_pair_to_request(pairs)
    most = import_module("simdistserve.estimators.memory_estimator").get_max_num_tokens(model, 1, 1)
    config = import_module(f"{base}.worker").WorkerConfig(
        model_type=model, TP=1, TP_Prefill=1, TP_Decode=1, prefill_max_batch_size=10**7,
        decode_max_batch_size=10**7, prefill_max_tokens=most, decode_max_tokens=most,
        enable_chunked_prefill=False, engine_type="distserve",
    )  # fmt: skip
    env = simpy.Environment()
    cluster = import_module("simdistserve.clusters.disagg").DisaggCluster(
        env, load["prefill"], load["decode"], worker_configs=config
    )
    times = [at * 1000 for at, *_ in load["asks"]]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    put = import_module(f"{base}.scheduler").put_requests_with_interarrivals

    def run() -> None:
        cluster.run()
        put(env, cluster.scheduler, gaps, requests)
        env.run()

    taken, felt = clocked(run), Felt()
    for request in requests:
        at = {event: when for when, event, _ in reversed(request.log)}  # the first of each
        if "exit_system" in at:
            felt.append(
                tuple((at[end] - at["init"]) / 1e3 for end in ("wait_decode", "exit_system"))  # type: ignore[arg-type]
            )
    return taken, next(env._eid), felt


def attention(path: Path) -> None:
    """Write a profile of attention in Llama2-70B on four A100 by arithmetic: the one that Vidur's
    predictor is fitted to is not in every clone."""
    same = "n_embd n_q_head n_kv_head block_size num_tensor_parallel_workers"
    times = " ".join(f"time_stats.attn_{name}.median" for name in ("prefill", "decode"))
    rows: list[tuple[Any, ...]] = []
    for kv in range(0, 16385, 1024):
        for chunk in (0, 32, 64, 128, 256, 512):
            for batch in (1, 2, 4, 8, 16, 32, 64, 128) if chunk == 0 else (1,):
                prefill_ms = 0.02 + 2.7e-8 * chunk**2 + 2.8e-5 * kv
                decode_ms = 0.02 + 5e-7 * batch * kv
                rows.append((8192, 64, 8, 16, 4, batch, chunk, kv, prefill_ms, decode_ms, 0.01))
    columns = f"{same} batch_size prefill_chunk_size kv_cache_size {times}"
    write_csv(path, f"{columns} time_stats.attn_kv_cache_save.median", rows)


def vidur(clone: Path, load: dict[str, Any], folder: Path) -> tuple[float, int, Felt]:
    """Colocated replicas of Llama2-70B by its defaults (Sarathi, chunks of 512); its linear
    predictor; of what it can write down requests alone."""
    sys.path[0] = str(clone)
    rows = [tuple(ask) for ask in load["asks"]]
    write_csv(folder / "load.csv", "arrived_at num_prefill_tokens num_decode_tokens", rows)
    attention(folder / "attention.csv")
    os.chdir(folder)
    config = import_module("vidur.config.config")
    most, files = (
        max(prompt + answer for _, prompt, answer in load["asks"]),
        clone / "data/profiling",
    )
    replica = config.ReplicaConfig(
        model_name="meta-llama/Llama-2-70b-hf", tensor_parallel_size=4, network_device="a100_dgx"
    )
    num = load["prefill"] + load["decode"]
    off = ("chrome_trace", "plots", "batch_metrics", "utilization_metrics")
    simulation = config.SimulationConfig(
        log_level="warning",
        cluster_config=config.ClusterConfig(num_replicas=num, replica_config=replica),
        request_generator_config=config.TraceRequestGeneratorConfig(
            trace_file="load.csv", max_tokens=most
        ),
        execution_time_predictor_config=config.LinearRegressionExecutionTimePredictorConfig(
            compute_input_file=f"{files}/compute/{{DEVICE}}/{{MODEL}}/mlp.csv",
            all_reduce_input_file=f"{files}/network/{{NETWORK_DEVICE}}/all_reduce.csv",
            attention_input_file="attention.csv", k_fold_cv_splits=2, num_training_job_threads=1,
            prediction_max_prefill_chunk_size=512, prediction_max_tokens_per_request=2 * most,
            polynomial_degree=[1, 2],
        ),
        metrics_config=config.MetricsConfig(
            **{f"{'enable' if 'trace' in name else 'store'}_{name}": False for name in off}
        ),
    )  # fmt: skip
    simulator = import_module("vidur.simulator").Simulator(simulation)
    arrivals = [event for _, event in simulator._event_queue]
    requests = [event._request for event in arrivals]
    taken = clocked(simulator.run)
    felt = [
        (it.prefill_completed_at - it.arrived_at, it.completed_at - it.arrived_at)
        for it in requests
        if it.completed
    ]
    return taken, import_module("vidur.events.base_event").BaseEvent._id, felt


def main() -> None:
    """Run, print, leave at once: Vidur would draw its figures at exit."""
    name, clone, load, folder = sys.argv[1:]
    peer = {"splitwise": splitwise, "simdistserve": simdistserve, "vidur": vidur}[name]
    cpu_s, num_events, felt = peer(Path(clone), json.loads(Path(load).read_text()), Path(folder))
    print(json.dumps({"cpu_s": cpu_s, "num_events": num_events, "felt": felt}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
