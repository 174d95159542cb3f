"""Objects of packages outside this one, named ``package.module:name`` as entry points name theirs:
how a routing policy or an engine that somebody else keeps comes in.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import Any

from shared.errors import InvalidRequest

_REFERENCE = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def is_reference(text: str) -> bool:
    """Whether this names an object of a module."""
    return _REFERENCE.fullmatch(text) is not None


def load_object(reference: str, flag: str) -> Any:
    """Import the module, from where Python looks or the current folder, and return its object.

    Raises InvalidRequest, with the flag that named it: the module's own code failed, or it has no
    such name.
    """
    module, _, name = reference.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: a file here replaces no package
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"{flag} {reference}: {why}", param=flag.lstrip("-")) from error
