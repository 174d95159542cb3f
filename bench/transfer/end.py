"""What the ends of our Transport have in common."""

from __future__ import annotations

import json
import sys
from typing import Any

from shared.transport.base import Outcome


async def done(operation: Any) -> None:
    """Wait for an operation; anything but success ends the measurement."""
    if await operation.settled() is not Outcome.DONE:
        sys.exit(f"{operation}")


def say(answer: Any) -> None:
    """Answer the parent."""
    print(json.dumps(answer), flush=True)
