"""The commands below ``pdmesh plan``: imported when one of them is asked for, because no other
command shall wait for numpy and the simulator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from cyclopts import App, Group

from services.cli import help_texts
from services.cli.interrupts import EXIT_INTERRUPTED
from services.cli.plan.distserve import distserve, distserve_placement
from services.cli.plan.fleet import fleet
from services.cli.plan.kv import kv
from services.cli.plan.mooncake import mooncake
from services.cli.plan.simulate import compare, map_, simulate
from services.cli.plan.splitwise import splitwise
from services.cli.plan.tables import founding, muxserve, orca, pope, sarathi
from services.cli.plan.verify import verify
from services.cli.plan.watch import watch
from services.cli.sources import PLAIN, SOURCES

COMMANDS: Final = Group("Commands")
PLANS: Final = (simulate, compare, fleet, map_, verify, watch, kv)
plan_app: Final = App(
    name="plan",
    help=help_texts.PLAN_IS,
    group_commands=COMMANDS,
    help_epilogue=help_texts.examples("plan"),
    config=SOURCES,
    default_parameter=PLAIN,
)
paper_app: Final = App(
    name="paper",
    help="A paper's figures, ours beside them, what differs and why.",
    help_epilogue=help_texts.examples("plan paper"),
    group_commands=COMMANDS,
    sort_key=len(PLANS),
    config=SOURCES,
    default_parameter=PLAIN,
)
PAPERS: Final = (
    *(distserve, distserve_placement, splitwise, mooncake, muxserve),
    *(orca, sarathi, pope, founding),
)


def _interruptible(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Let Ctrl-C end a command that computes and has nothing to show yet with a word."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> int | None:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            print("pdmesh: interrupted, with nothing to show yet", file=sys.stderr)
            return EXIT_INTERRUPTED

    return run


plan_app.command(paper_app)
for app, path, commands in ((plan_app, "plan", PLANS), (paper_app, "plan paper", PAPERS)):
    for place, command in enumerate(commands):
        name = command.__name__.rstrip("_").replace("_", "-")
        help_epilogue = help_texts.examples(f"{path} {name}")
        run = _interruptible(command)
        app.command(run, name=name, help_epilogue=help_epilogue, sort_key=place)
