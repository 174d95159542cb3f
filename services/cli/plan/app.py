"""The commands below ``pdmesh plan``. They are imported when they are asked for: no other command
waits for them."""

from __future__ import annotations

from typing import Final

from cyclopts import App

from services.cli import help_texts
from services.cli.sources import SOURCES

plan_app: Final = App(
    name="plan",
    help="What would happen, what to buy: simulations, calculators, papers' results. "
    "docs/planner.md explains.",
    help_epilogue=help_texts.PLAN,
    config=SOURCES,
)
paper_app: Final = App(
    name="paper",
    help="A paper's figures, ours beside them, what differs and why.",
    help_epilogue=help_texts.PLAN_PAPER,
    config=SOURCES,
)

_HERE: Final = "services.cli.plan"
_COMMANDS: Final = (
    (
        paper_app,
        (
            "distserve",
            "distserve:distserve",
            help_texts.PLAN_DISTSERVE,
            "DistServe (OSDI'24): its simulator by its rules, exact to the printed decimals.\n\n"
            "With --requests: what every request of the file would feel. Without: its closed "
            "forms of a prefill queue, theirs beside ours.",
        ),
        (
            "distserve-placement",
            "placement:distserve_placement",
            help_texts.PLAN_PLACEMENT,
            "DistServe's placement (OSDI'24, algorithms 1 and 2) for the lengths of a file of "
            "requests.\n\n"
            "Tries every placement that the GPUs and the model's shape allow, and finds by "
            "bisection the highest rate a GPU that attains, as their code does. Ctrl-C shows "
            "what has been found.",
        ),
        (
            "splitwise",
            "splitwise:splitwise",
            help_texts.PLAN_SPLITWISE,
            "Splitwise (ISCA'24): equal power, its performance model, machines for a rate "
            "under nine SLOs.\n\n"
            "With --data: how well the performance model predicts runs that it has not seen, "
            "and by simulation of its router and machines the fewest prompt machines for each "
            "number of token machines. Ctrl-C shows what has been found.",
        ),
        (
            "mooncake",
            "mooncake:mooncake",
            help_texts.PLAN_MOONCAKE,
            "Mooncake (arXiv 2407.00079, FAST'25): when a fetch pays, and what one global "
            "cache hits.\n\n"
            "With --replay: the share of a trace's blocks that a cache of so many blocks "
            "would have had, counting each request's leading blocks up to the first that is "
            "missing.",
        ),
        (
            "muxserve",
            "tables:muxserve",
            "",
            "MuxServe (ICML'24): its greedy placement beside every other one, on four GPUs; ADBS.",
        ),
        (
            "orca",
            "tables:orca",
            "",
            "Orca (OSDI'22): iteration-level scheduling, first come first served.",
        ),
        (
            "sarathi",
            "tables:sarathi",
            "",
            "Sarathi-Serve (OSDI'24): stall-free batches, what chunks cost, capacity under limits.",
        ),
        (
            "pope",
            "tables:pope",
            "",
            "Pope et al. (MLSys'23): longest contexts, use of the peak, layouts of PaLM 540B.",
        ),
        (
            "founding",
            "tables:founding",
            "",
            "The figures of pdmesh's founding documents, recomputed, and which of them are wrong.",
        ),
    ),
    (
        plan_app,
        (
            "simulate",
            "simulate:simulate",
            help_texts.PLAN_SIMULATE,
            "Simulate a mesh: pdmesh's own cores (admission, routing, leases, schedulers, "
            "transfers) under a virtual clock, with a time model for what computes.\n\n"
            "Every frame of KV is an event, equal decode steps are one (--fidelity). The time "
            "model is affine in a step's tokens; its defaults are OPT-13B on one A100 by "
            "DistServe's profile.",
        ),
        (
            "compare",
            "simulate:compare",
            help_texts.PLAN_COMPARE,
            "Simulate several meshes with the same requests, and say which serves most within "
            "the limits.\n\n"
            "All meshes see the same arrivals and lengths. Ctrl-C shows what has been found.",
        ),
        (
            "fleet",
            "fleet:fleet",
            help_texts.PLAN_FLEET,
            "Find the cheapest mesh that attains, or the best goodput for a budget of devices, "
            "euros or watts.\n\n"
            "Closed forms rule out what cannot attain; the rest is simulated by rising cost until "
            "two meshes attain. Ctrl-C shows what has been found.",
        ),
        (
            "map",
            "pd_map:pd_map",
            help_texts.PLAN_MAP,
            "Show which numbers of prefill and decode workers attain, and what mixed ones do.\n\n"
            "All meshes see the same arrivals and lengths. Ctrl-C shows what has been found.",
        ),
        (
            "verify",
            "verify:verify",
            help_texts.PLAN_VERIFY,
            "Replay what a live mesh served last in the simulator, and print predicted beside "
            "seen.\n\n"
            "Arrivals, lengths and what was cached come from the gateway's receipts, the mesh as "
            "it stands and its step times from what workers report, unless a time model is given. "
            "The exit code is 1 if a figure is off by more than its bar.",
        ),
        (
            "watch",
            "watch:watch",
            help_texts.PLAN_WATCH,
            "Follow a live mesh, and say what the planner would do now, and why.\n\n"
            "Decides by the very function of --planner advise, from what the gateway tells of its "
            "last requests, whatever its own --planner is, and changes nothing. A gateway that "
            "goes away is waited for; Ctrl-C leaves.",
        ),
        (
            "kv",
            "kv:kv",
            help_texts.PLAN_KV,
            "Size and travel time of a context's KV, and whether to fetch it or compute it anew.",
        ),
    ),
)
"""Of each: its name, where it stands, its examples, what it does."""

for above, *commands in _COMMANDS:
    for name, place, epilogue, text in commands:
        above.command(f"{_HERE}.{place}", name=name, help=text, help_epilogue=epilogue)
plan_app.command(paper_app)
