"""Ordinary or real-time priority of a mesh's loops: what rows 6 and 8 are asked with."""

from __future__ import annotations

import argparse

from shared.runtime.realtime import is_allowed

ORDINARY, REALTIME = "ordinary", "realtime"


def add_priorities(parser: argparse.ArgumentParser) -> None:
    """``--priorities``: both, unless this process may not take the second."""
    here = [ORDINARY, REALTIME] if is_allowed() else [ORDINARY]
    parser.add_argument(
        "--priorities", nargs="+", choices=(ORDINARY, REALTIME), default=here,
        help="of event loops and threads that carry KV: meshes without --realtime and with it",
    )  # fmt: skip
