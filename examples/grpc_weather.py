"""A model calls a tool over gRPC: this program runs it, and the model answers with what it gave.

pdmesh up --model demo-tools; pip install grpcio grpcio-tools
"""

import json
import os
import sys
from pathlib import Path

import grpc

sys.path.append(str(Path(__file__).parents[1] / "proto"))
messages, services = grpc.protos_and_services("pdmesh/v1/inference.proto")

ADDRESS = os.environ.get("PDMESH_GRPC", "127.0.0.1:8001")
METADATA = (("authorization", f"Bearer {os.environ.get('PDMESH_API_KEY', 'none')}"),)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = messages.Tool(name="get_weather", description="Weather.", parameters=json.dumps(SCHEMA))
TOOL_CALLS = 3  # FinishReason: the answer waits for its calls to be run


def get_weather(city: str) -> str:
    """The tool itself."""
    return "sunny" if city == "Rome" else "rainy"


def ask(stub, conversation: list):
    """Return what the model says as one message, and why it ended; calls come in parts."""
    said = messages.ChatMessage(role="assistant")
    params = messages.GenerateParams(temperature=0, max_tokens=100)
    request = messages.GenerateRequest(messages=conversation, tools=[TOOL], params=params)
    for reply in stub.Generate(request, timeout=60, metadata=METADATA):
        said.content += reply.text
        for part in reply.tool_calls:
            if part.index == len(said.tool_calls):
                said.tool_calls.add(id=part.id, name=part.name)
            said.tool_calls[part.index].arguments += part.arguments
    return said, reply.finish_reason


with grpc.insecure_channel(ADDRESS) as channel:
    stub = services.InferenceStub(channel)
    talk = [messages.ChatMessage(role="user", content="What is the weather in Rome?")]
    said, reason = ask(stub, talk)
    while reason == TOOL_CALLS:
        talk.append(said)
        for call in said.tool_calls:
            print(f"{call.name}({call.arguments})")
            result = get_weather(**json.loads(call.arguments))
            talk.append(messages.ChatMessage(role="tool", tool_call_id=call.id, content=result))
        said, reason = ask(stub, talk)
    print(said.content)
