"""What a worker is launched for: the one thing in which workers differ. ``services/prefill`` and
``services/decode`` say it for each role."""

from __future__ import annotations

from dataclasses import dataclass

from shared.home import Role
from shared.worker.core.life import Task


@dataclass(frozen=True, slots=True)
class LaunchProfile:
    """home: what it is when nothing is asked of it. tasks: what it does; all of them = it may be
    either."""

    home: Role
    tasks: frozenset[Task]

    @property
    def serves(self) -> tuple[Role, ...]:
        """The roles for which it takes orders; of both it may change its home."""
        is_both = self.pushes and self.receives
        return (Role.PREFILL, Role.DECODE) if is_both else (self.home,)

    @property
    def pushes(self) -> bool:
        """Whether it computes prompts for other workers."""
        return Task.PROMPT in self.tasks

    @property
    def receives(self) -> bool:
        """Whether it takes KV over."""
        return Task.ANSWER in self.tasks

    @property
    def is_mixed(self) -> bool:
        """Whether prompts and answers share its steps."""
        return Task.WHOLE in self.tasks
