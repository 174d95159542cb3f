"""Generated messages; never edited. `make proto` writes them from proto/."""

from .pdmesh.v1 import *  # noqa: F403
