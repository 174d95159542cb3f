"""``pdmesh models``: what a running gateway serves."""

from __future__ import annotations

import asyncio
from typing import Final

from services.cli.client import LOCAL_GATEWAY, RunningGateway
from services.cli.sources import JsonFlag
from services.cli.words import plain_console, plain_table, print_json

NONE_YET: Final = "no model yet: the first worker to join brings it"


def models(
    *,
    gateway: RunningGateway = LOCAL_GATEWAY,
    as_json: JsonFlag = False,
) -> None:
    """Show what a running gateway serves: the name for clients, and the longest context."""
    answer = asyncio.run(gateway.ask("/v1/models"))
    if as_json:
        print_json(answer)
        return
    if not answer["data"]:
        print(NONE_YET)
        return
    table = plain_table("model", "longest context", left=("model",))
    for model in answer["data"]:
        length = model.get("max_model_len")  # other servers may leave it out
        table.add_row(str(model.get("id")), f"{length:,} tokens" if length else "not said")
    plain_console().print(table)
