"""The gateway as a process: platform, signals, exit code."""

from __future__ import annotations

import asyncio
import os

from services.gateway.app import Gateway
from services.gateway.core.routing.peer_table import OwnModel
from services.gateway.limits import SamplingForm, sampling_params
from services.gateway.mesh import ServedModel
from services.gateway.processes import run_gateways
from services.gateway.text.text_model import TextModel
from shared.address import Address
from shared.config import GatewayConfig
from shared.errors import InvalidRequest, ModelError
from shared.mesh_secret import mesh_secret
from shared.model_folder import TEXT_FILES, ModelFolder, read_template, resolve_model
from shared.rpc.tls import MeshTls
from shared.runtime.platform import real_platform
from shared.runtime.service import Process, run_service


def load(config: GatewayConfig) -> tuple[ModelFolder, TextModel]:
    """Return the model's folder, and its text: as many long prompts may wait to be tokenized as
    are let in afterwards. Raises ModelError."""
    folder = ModelFolder(resolve_model(config.model, TEXT_FILES))
    served = ServedModel(name="", vocab_size=folder.vocab_size, max_model_len=1, created=0)
    try:  # else each request that leaves them out would be told that it has them wrong
        sampling_params(
            SamplingForm(),
            model=served,
            num_prompt_tokens=0,
            default_max_tokens=1,
            defaults=folder.generation_defaults,
            seed=0,
        )
    except InvalidRequest as error:
        raise ModelError(f"{folder.path}/generation_config.json: {error.message}") from None
    template = None if config.chat_template is None else read_template(config.chat_template)
    most = config.max_running + config.max_waiting
    return folder, TextModel.load(folder, template=template, max_offloaded=most)


def run_gateway(config: GatewayConfig) -> int:
    """Run one gateway as this process, or the parent of several, until a signal, and return the
    exit code (``service.py``).

    Logs must be configured. Whatever keeps it from starting or ends it is one line on stderr.
    """

    if config.gateway_processes > 1:
        return run_gateways(config)

    async def main(process: Process) -> bool:
        def ready(http: Address, grpc: Address, mesh: Address, watched: Address | None) -> None:
            more = {} if watched is None else {"metrics_address": str(watched)}
            process.ready(http_port=http.port, grpc_port=grpc.port, mesh_port=mesh.port, **more)

        platform = real_platform(mesh_secret(config, os.environ), MeshTls.of(config))
        process.begins("loading the tokenizer")
        # A large tokenizer holds the thread for a second; signals are heard meanwhile.
        folder, text = await asyncio.to_thread(load, config)
        try:
            gateway = Gateway(
                config,
                platform,
                text,
                folder.generation_defaults,
                OwnModel(
                    name=config.model,
                    vocab_size=folder.vocab_size,
                    allow_mixed_engines=config.allow_mixed_engines,
                ),
                lambda wish: process.tell(planner=wish),
            )
            return await gateway.run(ready, process.stop)
        finally:
            text.close()

    return run_service("gateway", main, drain_s=config.drain_s, is_realtime=config.realtime)
