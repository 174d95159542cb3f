"""Named points in the code where a fault test may stop or kill this very process.

``PDMESH_FAILPOINTS="prefill.mid_push:3=kill,decode.before_grant=stop"`` kills the process with
SIGKILL the third time it comes by ``prefill.mid_push``, and stops it with SIGSTOP (it looks alive
to the kernel and to UCX, and answers nothing) the first time it comes by ``decode.before_grant``.
A point acts once. With the variable unset a point costs one look-up in an empty dictionary.

Before it acts, a point writes ``failpoint <name> <action> pid=<pid>`` to stderr, so that a test
that watches stderr knows the instant. The points themselves are named where they are called; this
module knows none of them.
"""

from __future__ import annotations

import os
import signal
import sys

VARIABLE = "PDMESH_FAILPOINTS"

_SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


def parse(text: str) -> dict[str, tuple[int, str]]:
    """Return point -> (which hit acts, action).

    Raises ValueError: the text is not ``name[:count]=stop|kill`` joined by commas.
    """
    points: dict[str, tuple[int, str]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        target, _, action = entry.partition("=")
        name, colon, count = target.partition(":")
        if not (name and action in _SIGNALS and (count.isdecimal() or not colon)):
            raise ValueError(f"{VARIABLE}: {entry!r} is not name[:count]={'|'.join(_SIGNALS)}")
        points[name] = max(1, int(count or "1")), action
    return points


def arm() -> None:
    """Arm the points that the environment names."""
    _armed.update(parse(os.environ.get(VARIABLE, "")))


_armed: dict[str, tuple[int, str]] = {}
arm()


def failpoint(name: str) -> None:
    """Come by the point ``name``: nothing, unless the environment armed it."""
    armed = _armed.get(name)
    if armed is not None:
        _hit(name, *armed)


def _hit(name: str, hits_left: int, action: str) -> None:
    if hits_left > 1:
        _armed[name] = hits_left - 1, action
        return
    del _armed[name]
    pid = os.getpid()
    sys.stderr.write(f"failpoint {name} {action} pid={pid}\n")
    sys.stderr.flush()
    os.kill(pid, _SIGNALS[action])
