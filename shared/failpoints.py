"""Named points in the code where a fault test may stop, kill or hold this very process.

``PDMESH_FAILPOINTS="prefill.mid_push:3=kill,decode.before_grant=stop"`` kills the process with
SIGKILL the third time it comes by ``prefill.mid_push``, and stops it with SIGSTOP the first time it
comes by ``decode.before_grant``. A point acts once. With the variable unset a point costs one
look-up in an empty dictionary.

Before it acts, a point writes ``failpoint <name> <action> pid=<pid>`` to stderr, so that a test
that watches stderr knows the instant. The points themselves are named where they are called; this
module knows none of them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from enum import Enum

VARIABLE = "PDMESH_FAILPOINTS"


class Action(Enum):
    """What happens at an armed point."""

    STOP = "stop"  # SIGSTOP to itself: looks alive to the kernel and to UCX, and answers nothing
    KILL = "kill"  # SIGKILL to itself
    WAIT = "wait"  # the calling thread never goes on: a test kills the process from outside


@dataclass(slots=True)
class _Armed:
    action: Action
    hits_left: int


def parse(text: str) -> dict[str, tuple[int, Action]]:
    """Return point -> (which hit acts, action).

    Raises ValueError: the text is not ``name[:count]=stop|kill|wait`` joined by commas.
    """
    points: dict[str, tuple[int, Action]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        target, equals, action = entry.partition("=")
        name, colon, count = target.partition(":")
        actions = [a.value for a in Action]
        if not (equals and name and action in actions and (count.isdecimal() or not colon)):
            raise ValueError(f"{VARIABLE}: {entry!r} is not name[:count]={'|'.join(actions)}")
        points[name] = (max(1, int(count or "1")), Action(action))
    return points


def _armed_from_environment() -> dict[str, _Armed]:
    points = parse(os.environ.get(VARIABLE, ""))
    return {name: _Armed(action, count) for name, (count, action) in points.items()}


_armed: dict[str, _Armed] = _armed_from_environment()


def failpoint(name: str) -> None:
    """Come by the point ``name``: nothing, unless the environment armed it."""
    armed = _armed.get(name)
    if armed is not None:
        _hit(name, armed)


def _hit(name: str, armed: _Armed) -> None:
    armed.hits_left -= 1
    if armed.hits_left > 0:
        return
    del _armed[name]
    pid = os.getpid()
    sys.stderr.write(f"failpoint {name} {armed.action.value} pid={pid}\n")
    sys.stderr.flush()
    match armed.action:
        case Action.STOP:
            os.kill(pid, signal.SIGSTOP)
        case Action.KILL:
            os.kill(pid, signal.SIGKILL)
        case Action.WAIT:
            threading.Event().wait()
