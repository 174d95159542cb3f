"""The commands below ``pdmesh plan``: imported when one of them is asked for, because no other
command shall wait for numpy and the simulator."""

from __future__ import annotations

from typing import Final

from cyclopts import App

from services.cli import help_texts
from services.cli.plan.distserve import distserve
from services.cli.plan.fleet import fleet
from services.cli.plan.kv import kv
from services.cli.plan.mooncake import mooncake
from services.cli.plan.pd_map import pd_map
from services.cli.plan.placement import distserve_placement
from services.cli.plan.simulate import compare, simulate
from services.cli.plan.splitwise import splitwise
from services.cli.plan.tables import founding, muxserve, orca, pope, sarathi
from services.cli.plan.verify import verify
from services.cli.plan.watch import watch
from services.cli.sources import SOURCES

plan_app: Final = App(
    name="plan",
    help=help_texts.PLAN_IS,
    help_epilogue=help_texts.PLAN,
    config=SOURCES,
)
paper_app: Final = App(
    name="paper",
    help="A paper's figures, ours beside them, what differs and why.",
    help_epilogue=help_texts.PLAN_PAPER,
    config=SOURCES,
)
plan_app.command(paper_app)
plan_app.command(simulate, help_epilogue=help_texts.PLAN_SIMULATE)
plan_app.command(compare, help_epilogue=help_texts.PLAN_COMPARE)
plan_app.command(fleet, help_epilogue=help_texts.PLAN_FLEET)
plan_app.command(pd_map, name="map", help_epilogue=help_texts.PLAN_MAP)
plan_app.command(verify, help_epilogue=help_texts.PLAN_VERIFY)
plan_app.command(watch, help_epilogue=help_texts.PLAN_WATCH)
plan_app.command(kv, help_epilogue=help_texts.PLAN_KV)
paper_app.command(distserve, help_epilogue=help_texts.PLAN_DISTSERVE)
paper_app.command(distserve_placement, help_epilogue=help_texts.PLAN_PLACEMENT)
paper_app.command(splitwise, help_epilogue=help_texts.PLAN_SPLITWISE)
paper_app.command(mooncake, help_epilogue=help_texts.PLAN_MOONCAKE)
for command in (muxserve, orca, sarathi, pope, founding):
    paper_app.command(command, help_epilogue="")
