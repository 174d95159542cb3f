"""What ``--help`` says beside the flags: first steps, and examples that can be copied."""

from __future__ import annotations

from typing import Final

HELP: Final = """\
LLM serving with prefill and decode on separate machines: prefill workers compute a prompt's KV
cache and push it, layer by layer, to decode workers, which generate; the gateway speaks OpenAI's
and Anthropic's APIs, and gRPC.

First steps:

```
pdmesh demo       one prompt through three processes, offline, in seconds
pdmesh up         a mesh on this machine; --model FOLDER: with your model
pdmesh chat       talk with it, from another terminal
pdmesh top        watch it
pdmesh doctor     is everything here that a mesh needs?
```
"""

EPILOGUE: Final = """\
On three hosts:

```
pdmesh secret --out secret                copy it to all, and there:
export PDMESH_MESH_SECRET_FILE=secret
pdmesh gateway --host 0.0.0.0 --mesh-host 0.0.0.0
pdmesh prefill --host 0.0.0.0 --gateway 10.0.0.5:8200 --allow-unencrypted-kv
pdmesh decode  --host 0.0.0.0 --gateway 10.0.0.5:8200 --allow-unencrypted-kv
```

UCX does not encrypt: the last flag says that the network between the two workers is private.

A setting is a flag (--max-running), a variable (PDMESH_MAX_RUNNING) or a line of the file that
--config or PDMESH_CONFIG names; the first of these that is there wins. `pdmesh config` shows the
outcome.

Exit codes: 0 done, 1 failed, 2 wrong flag or configuration, 3 a drain came to its limit, 130
Ctrl-C.
"""

PLAN_IS: Final = (
    "What would happen, what to buy: simulations, calculators, papers' results. docs/planner.md "
    "explains."
)

EXAMPLES: Final = {
    "demo": """
pdmesh demo                               needs no network and no GPU
""",
    "up": """
pdmesh up                                 the bundled model, workers as this machine has room
pdmesh up --prefill 2 --decode 2 --port 9000
pdmesh up --model Qwen/Qwen3-0.6B         from the hub: pip install 'pdmesh[hub]'
pdmesh up --config mesh.toml              settings without a flag here, too
""",
    "gateway": """
pdmesh gateway --model /models/llama --host 0.0.0.0 --mesh-host 0.0.0.0 --mesh-secret-file secret
pdmesh gateway --config mesh.toml --api-keys keys.txt --tls-cert server.pem --tls-key server.key
pdmesh gateway --gateway-processes 2      workers: --gateway HOST:8200,HOST:8201
""",
    "prefill": r"""
pdmesh prefill --model /models/llama --host 0.0.0.0 --gateway 10.0.0.5:8200 \
    --mesh-secret-file secret --allow-unencrypted-kv
pdmesh prefill --config mesh.toml --device cuda:1 --metrics-port 9100
""",
    "decode": r"""
pdmesh decode --model /models/llama --host 0.0.0.0 --gateway 10.0.0.5:8200 \
    --mesh-secret-file secret --allow-unencrypted-kv
pdmesh decode --config mesh.toml --kv-gib 24
""",
    "chat": r"""
pdmesh chat
pdmesh chat --system "Answer in one sentence." --temperature 0
printf 'My name is Ada.\nWhat is my name?\n' | pdmesh chat
PDMESH_API_KEY=… pdmesh chat --url https://10.0.0.5:8000 --tls-ca ca.pem
""",
    "generate": """
pdmesh generate "What is 17 + 25?"
pdmesh generate --raw --max-tokens 30 --temperature 0 "Once upon a time"
pdmesh generate --no-receipt < question.txt > answer.txt
""",
    "models": """
pdmesh models
pdmesh models --json | jq -r '.data[0].id'
""",
    "top": """
pdmesh top                                live, q leaves
pdmesh top --once                         one frame, also into a file
pdmesh top --json | jq .window
""",
    "role": """
pdmesh role 127.0.0.1:34567 token         by address, as pdmesh top shows it
pdmesh role 1f2e3d prompt                 by the beginning of its incarnation
""",
    "explain": """
pdmesh explain chatcmpl-1f2e3d4c5b6a79881f2e3d4c5b6a7988
pdmesh explain 1f2e3d4c5b6a79881f2e3d4c5b6a7988 --replay      decide again, from the record
pdmesh explain 1f2e3d4c5b6a79881f2e3d4c5b6a7988 --json > why.json
pdmesh explain why.json --replay          later, without the mesh
""",
    "bench": """
pdmesh bench                              the local mesh, 1 request/s for 30 s
pdmesh bench --rates 0.5,1,2 --scale-lengths 0.1 --output report
pdmesh bench --goodput --slo-ttft 500ms --slo-tpot 50ms
pdmesh bench --trace mooncake.jsonl --scale-lengths 0.1 --rate 2
pdmesh bench http://10.0.0.5:8000 http://10.0.0.6:8000 --rate 20 --synthetic code
""",
    "doctor": """
pdmesh doctor                             this machine
pdmesh doctor --engine vllm
pdmesh doctor --gateway http://10.0.0.5:8000
pdmesh doctor --json | jq .ok
""",
    "profile": """
pdmesh profile                            the bundled model on this machine
pdmesh profile --model /models/llama --device cuda:1
pdmesh profile --force --json | jq .saturating_tokens
pdmesh profile --from http://127.0.0.1:8000 -o mesh.json    what its workers have learned
""",
    "plan": """
pdmesh plan paper distserve               their figures, ours beside them
pdmesh plan kv demo --tokens 8192 --link 25GB/s
pdmesh plan simulate 3P+2D --workload azure-conv --rate 8
pdmesh plan fleet --rate 8 --device a100 --model llama-3-8b
pdmesh plan verify                        a live mesh's last minutes, predicted beside seen
pdmesh plan watch                         what the live planner would do on it now
""",
    "plan paper": """
pdmesh plan paper distserve               needs no files
pdmesh plan paper splitwise --data data   with what its authors have published
""",
    "plan paper distserve": r"""
pdmesh plan paper distserve
pdmesh plan paper distserve --requests requests.csv --model opt-66b --prefill 4,1 --decode 2,2 \
    --data data --out latencies.csv
pdmesh plan paper distserve --requests requests.csv --system vllm --prefill 1,1 --decode 1,1 \
    --data data --fidelity exact
""",
    "plan paper mooncake": """
pdmesh plan paper mooncake
pdmesh plan paper mooncake --replay trace.jsonl --policy lfu --blocks 50000
pdmesh plan paper mooncake --replay trace.jsonl --blocks inf --json | jq .hit_rate
""",
    "plan paper distserve-placement": r"""
pdmesh plan paper distserve-placement --requests requests.csv --data data --gpus 4
pdmesh plan paper distserve-placement --requests requests.csv --data data --model opt-66b \
    --nodes 4 --gpus 8 --affinity high --slo-ttft 400ms --success joint
""",
    "plan paper splitwise": """
pdmesh plan paper splitwise
pdmesh plan paper splitwise --data data --most-token 10
pdmesh plan paper splitwise --data data --model llama2-70b --design HA --workload conv
""",
    "plan simulate": """
pdmesh plan simulate 3P+2D --workload azure-conv --rate 10
pdmesh plan simulate 4M --rate 10 --policy least_loaded --json | jq .attainment
pdmesh plan simulate 2P+2D --workload trace.jsonl --rate 2 --model llama-3-8b --link 100Gb/s
pdmesh plan simulate 2P+2D --workload mooncake --dram-cache 100GB --ssd-cache 1TB
""",
    "plan compare": """
pdmesh plan compare 5M 3P+2D 4P+1D --workload azure-conv --rate 10
pdmesh plan compare 2P+2D 4M --workload trace.jsonl --rate 4 --slo-ttft 500ms --json
""",
    "plan fleet": r"""
pdmesh plan fleet --rate 8 --device a100 --model llama-3-8b --tp 1,2
pdmesh plan fleet --rate 8 --devices a100,h100 --model llama-3-8b --price a100=1.80,h100=3.20
pdmesh plan fleet --budget 6000 --watts --device h100 --model llama-3-70b --tp 4 --output plan
""",
    "plan map": """
pdmesh plan map 6 --workload azure-conv --rate 8
pdmesh plan map 8 --profile profile.json --rate 3 --output plan
""",
    "plan verify": """
pdmesh plan verify                        the mesh at http://127.0.0.1:8000
pdmesh plan verify --last 2min --keep seen.json --output verified
pdmesh plan verify seen.json --profile profile.json    later, without the mesh, by a profile
pdmesh bench --rate 2 --output report && pdmesh plan verify report
""",
    "plan watch": """
pdmesh plan watch                         every 5 s; Ctrl-C leaves
pdmesh plan watch --slo-ttft 500ms --slo-tpot 50ms --max-workers 8
pdmesh plan watch --once --json | jq .headroom
""",
    "plan kv": """
pdmesh plan kv llama-3-70b --tokens 8192 --link 25GB/s
pdmesh plan kv /models/qwen --tokens 32768 --link 400Gb/s --device h100 --devices 4
pdmesh plan kv demo --tokens 512 --json | jq .move_s
""",
    "config": """
pdmesh config --example > mesh.toml       every setting with its default, commented out
pdmesh config --config mesh.toml          what each service makes of it
""",
    "completion": """
pdmesh completion bash --install          for good
source <(pdmesh completion bash)          in this shell
""",
    "secret": """
pdmesh secret --out secret                then copy it to every host
pdmesh gateway --mesh-host 0.0.0.0 --mesh-secret-file secret
""",
    "hash-key": """
pdmesh hash-key alice >> keys.txt && pdmesh up --api-keys keys.txt
pdmesh hash-key bob --requests-per-minute 60 --concurrent-requests 4 >> keys.txt
pdmesh hash-key ops --may roles >> keys.txt
""",
}
"""By command: lines that can be copied."""


def examples(command: str) -> str:
    """Return what ``--help`` of a command says below its flags; '' where that needs no example."""
    lines = EXAMPLES.get(command, "").strip()
    return lines and f"Examples:\n\n```\n{lines}\n```\n"
