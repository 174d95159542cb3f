"""What a decode worker is: the worker of ``shared/worker``, launched for answers.

* Policy: it reserves blocks before a prompt is computed, takes its KV over, acknowledges what it
  has, and gives every running answer one token a step. ``colocated``: it takes whole requests,
  too, and computes their prompts in chunks that keep a step within ``tbt_target_s``. ``movable``:
  it also computes prompts for others.
* Defaults: ``DecodeConfig``.
* Health: ready while a gateway has it, unless no prefill worker may pair with it; one that takes
  whole requests needs none.
* Command: ``pdmesh decode``, or ``python -m services.decode`` configured by ``PDMESH_*``.
"""

from __future__ import annotations

from shared.config import DecodeConfig
from shared.home import Role
from shared.worker.core.life import Task
from shared.worker.launch import LaunchProfile


def decode_launch(config: DecodeConfig) -> LaunchProfile:
    """Return what a worker of this configuration does."""
    tasks = frozenset({Task.ANSWER, Task.WHOLE} if config.colocated else {Task.ANSWER})
    return LaunchProfile(Role.DECODE, frozenset(Task) if config.movable else tasks)
