"""CUDA: the same engine path on a device, and KV that goes from device memory to device memory.

Skipped where there is no device; the path itself (gather, frames, scatter, marks per layer) is
covered on CPU.
"""

from __future__ import annotations

import aiohttp
import pytest

from services.local import local_mesh, plan_services, wait_for_pair
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from shared.engine.torch_engine import TorchEngine
from shared.model_folder import DEMO_FOLDER
from shared.request import SamplingParams
from tests.support.engine_driver import Driver
from tools.demo_model.data import recall_prompt

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_PROMPTS = 20


def _continuation(device: str, prompt: list[int], num_tokens: int) -> list[int]:
    engine = TorchEngine.load(DEMO_FOLDER, device=device, dtype="float32", num_blocks=256)
    driver = Driver(engine)
    sequence = driver.start(prompt, SamplingParams(max_tokens=num_tokens))
    for _ in range(num_tokens):
        row = sequence.row(len(prompt))
        sequence.commit(row, engine.step([row])[0])
    engine.close()
    return list(sequence.output)


def test_the_engine_on_cuda_continues_as_on_cpu() -> None:
    """Greedy tokens in float32 are the same on both devices."""
    prompt = [5 + 7 * index % 1200 for index in range(300)]
    assert _continuation("cuda", prompt, 24) == _continuation("cpu", prompt, 24)


@pytest.mark.process
@pytest.mark.ucx
@pytest.mark.parametrize("mode", ["layerwise", "serialized"])
async def test_kv_crosses_from_device_to_device(mode: str) -> None:
    """Two processes on a GPU answer recall prompts right: no block was lost on the way."""
    device = {"device": "cuda", "num_blocks": 2048}
    services = plan_services(
        GatewayConfig(http_port=0, grpc_port=0),
        [PrefillConfig(transfer_mode=mode, **device)],
        [DecodeConfig(**device)],
    )
    prompts = [
        recall_prompt(8_000_000 + index, 10, 200 + 30 * index) for index in range(NUM_PROMPTS)
    ]
    num_right = 0
    async with local_mesh(services, restart=False) as mesh, aiohttp.ClientSession() as session:
        await wait_for_pair(mesh.http_url, 60)
        for prompt in prompts:
            body = {"messages": prompt.messages, "temperature": 0, "max_tokens": 24}
            async with session.post(f"{mesh.http_url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            text = answer["choices"][0]["message"]["content"]
            num_right += text == prompt.expected_reply
    assert num_right >= 0.95 * NUM_PROMPTS
