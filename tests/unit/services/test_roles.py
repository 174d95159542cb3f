"""What the two services launch the worker for, each on its page `role.py`."""

from __future__ import annotations

import pytest

from services.decode.role import decode_launch
from services.prefill.role import prefill_launch
from shared.config import DecodeConfig, PrefillConfig
from shared.home import Role
from shared.worker.core.life import Task
from shared.worker.launch import LaunchProfile

BOTH = (Role.PREFILL, Role.DECODE)


@pytest.mark.parametrize(
    ("launch", "home", "tasks", "serves", "needs_nobody"),
    [
        (prefill_launch(PrefillConfig()), Role.PREFILL, {Task.PROMPT}, BOTH[:1], False),
        (prefill_launch(PrefillConfig(movable=True)), Role.PREFILL, set(Task), BOTH, True),
        (decode_launch(DecodeConfig()), Role.DECODE, {Task.ANSWER}, BOTH[1:], False),
        (
            decode_launch(DecodeConfig(colocated=True)),
            *(Role.DECODE, {Task.ANSWER, Task.WHOLE}, BOTH[1:], True),
        ),
        (decode_launch(DecodeConfig(movable=True)), Role.DECODE, set(Task), BOTH, True),
    ],
)
def test_a_role_is_what_its_worker_does(
    launch: LaunchProfile,
    home: Role,
    tasks: set[Task],
    serves: tuple[Role, ...],
    needs_nobody: bool,
) -> None:
    """Who does whole requests needs no partner; who does all takes orders of either role."""
    assert (launch.home, launch.tasks, launch.serves) == (home, tasks, serves)
    assert launch.is_mixed == needs_nobody
