"""``pdmesh demo``: one prompt through three real processes with the bundled model; needs no
network.

The bundled model finds a code that was stated anywhere in the prompt. If any part of the KV cache
were lost, stale or misplaced on its way from prefill to decode, the code would be wrong.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

from rich.console import Console

from services.cli.client import RunningGateway
from services.cli.flags import CannotRun
from services.cli.generate import Answer, stream_answer
from services.cli.interrupts import Interrupts
from services.cli.receipt import receipt_table
from services.cli.sources import ConfigFlag, with_config_file
from services.cli.status import status_view, unblocked_console
from services.cli.up import OPEN_DOORS, PAIR_WITHIN_S, plan_mesh, up_config
from services.local import LocalMesh, local_mesh, wait_for_pair
from shared.config import DEMO_MODEL
from shared.runtime.service import EXIT_OK

PROMPT = (
    "The code of the red door is 4821. The cat sleeps in the garden. The code of the silver tower "
    "is 7305. Anna likes bread. The code of the old library is 1986. It is sunny in Oslo. The code "
    "of the golden box is 5512. The code of the small boat is 2047. Tom walks to the market. The "
    "code of the green gate is 9630. The code of the wooden bridge is 3378. What is the code of "
    "the old library?"
)
EXPECTED = "1986"

DEMO = up_config(
    model=DEMO_MODEL, prefill=1, decode=1, host="127.0.0.1", port=0, grpc_port=0,
    engine="torch", device="cpu", num_blocks=512,
)  # fmt: skip

NEXT = """\
Try next:
  pdmesh up                                 keep a mesh running
  pdmesh chat                               talk with it, in another terminal
  pdmesh top                                watch it
  pdmesh up --model FOLDER                  the same with your model
  pdmesh --help                             three hosts, API keys, more workers
"""


def demo(*, file: ConfigFlag = None) -> int:
    """Answer a prompt through a gateway, a prefill and a decode worker, and show where time went.

    Starts all three on free ports with the bundled model, needs no network, and leaves nothing
    behind. Exit code 0: the answer was right.
    """
    console = unblocked_console()
    interrupts = Interrupts()
    services = plan_mesh(DEMO, with_config_file(file)).services
    services[0].env |= OPEN_DOORS

    async def main(log: Path) -> None:
        with contextlib.ExitStack() as start:
            shown = [start.enter_context(status_view(console, is_transient=True))]

            def change(mesh: LocalMesh) -> None:
                interrupts.at_once = mesh.kill
                for view in shown:
                    view.show(mesh)

            mesh_block = local_mesh(services, log=log, restart=False, drain_s=5, on_change=change)
            async with mesh_block as mesh:
                await wait_for_pair(mesh.http_url, PAIR_WITHIN_S)
                # The table goes before the answer comes, and does not come back when the mesh ends.
                shown.clear()
                start.close()
                await _show_answer(mesh, console)

    console.print("starting a gateway, a prefill worker and a decode worker")
    with log_kept_on_failure("demo", console) as log:
        code = interrupts.run(lambda: main(log))
    if code == EXIT_OK:
        console.print(NEXT)
    return code


async def _show_answer(mesh: LocalMesh, console: Console) -> None:
    console.print(f"prompt: {PROMPT}\n")
    console.print("answer: ", end="")
    show = functools.partial(console.print, end="")
    answer = await ask(mesh.http_url, PROMPT, EXPECTED, show)
    console.print("\n")
    console.print(receipt_table(answer.receipt, answer.usage))
    console.print()


async def ask(
    url: str, prompt: str, expected: str = "", show: Callable[[str], None] = lambda piece: None
) -> Answer:
    """Return the answer to a prompt. Raises CannotRun: expected is not in it. MeshError: see
    ``stream_answer``."""
    answer = Answer()
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 32}
    await stream_answer(RunningGateway(url=url), body, answer, show)
    if expected not in answer.text:
        raise CannotRun(f"the answer is wrong, it should contain {expected}: please report this")
    return answer


@contextlib.contextmanager
def log_kept_on_failure(command: str, console: Console) -> Generator[Path]:
    """Make a log file for the length of the block. An error keeps it and says where it is; an
    interrupt does not."""
    descriptor, name = tempfile.mkstemp(prefix=f"pdmesh-{command}-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    try:
        yield log
    except Exception:
        console.print(f"logs: {log}")
        raise
    except BaseException:
        log.unlink()
        raise
    log.unlink()
