"""Token ids in, token ids out: for programs with a tokenizer of their own (evaluation,
reinforcement learning), which need the very ids and their log-probabilities.

pip install grpcio grpcio-tools
"""

import os
import struct
import sys
from pathlib import Path

import grpc

sys.path.append(str(Path(__file__).parents[1] / "proto"))
messages, services = grpc.protos_and_services("pdmesh/v1/inference.proto")

ADDRESS = os.environ.get("PDMESH_GRPC", "127.0.0.1:8001")
METADATA = (("authorization", f"Bearer {os.environ.get('PDMESH_API_KEY', 'none')}"),)


def unpack(kind: str, column: bytes) -> tuple:
    """A column is packed little-endian: I for ids, f for log-probabilities."""
    return struct.unpack(f"<{len(column) // 4}{kind}", column)


with grpc.insecure_channel(ADDRESS) as channel:
    stub = services.InferenceStub(channel)
    tokenized = stub.Tokenize(messages.TokenizeRequest(text="Once upon a time"), metadata=METADATA)
    prompt = unpack("I", tokenized.token_ids)
    print("prompt:", *prompt)
    request = messages.GenerateRequest(
        token_ids=struct.pack(f"<{len(prompt)}I", *prompt),
        params=messages.GenerateParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0),
    )
    for reply in stub.Generate(request, timeout=60, metadata=METADATA):
        ids, logprobs = unpack("I", reply.token_ids), unpack("f", reply.logprobs)
        for place, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            print(f"{reply.first_index + place}: {token_id} {logprob:.4f}")
