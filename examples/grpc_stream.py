"""Stream an answer over gRPC. The receipt comes in the trailers of the call, a failure as a status
with a typed error beside it.

pip install grpcio grpcio-tools; the stubs are made from proto/ as the program starts
"""

import json
import os
import sys
from pathlib import Path

import grpc

sys.path.append(str(Path(__file__).parents[1] / "proto"))
messages, services = grpc.protos_and_services("pdmesh/v1/inference.proto")

ADDRESS = os.environ.get("PDMESH_GRPC", "127.0.0.1:8001")
QUESTION = "The code of the red door is 4821. What is the code of the red door?"

request = messages.GenerateRequest(
    messages=[messages.ChatMessage(role="user", content=QUESTION)],
    params=messages.GenerateParams(temperature=0, max_tokens=64),
)
key = os.environ.get("PDMESH_API_KEY", "none")
with grpc.insecure_channel(ADDRESS) as channel:
    call = services.InferenceStub(channel).Generate(
        request, timeout=60, metadata=(("authorization", f"Bearer {key}"),)
    )
    try:
        for reply in call:
            print(reply.text, end="", flush=True)
    except grpc.RpcError as error:
        told = dict(error.trailing_metadata()).get("pdmesh-error", "{}")
        sys.exit(f"\n{error.code().name}: {error.details()} {told}")
    receipt = json.loads(dict(call.trailing_metadata())["pdmesh-receipt"])
print(f"\nprefill {receipt['prefill']}, decode {receipt['decode']}, {receipt['attempts']} attempt")
