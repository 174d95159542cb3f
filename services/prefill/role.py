"""What a prefill worker is: the worker of ``shared/worker``, launched for prompts.

* Policy: it computes prompts, in order of arrival, several in a step up to ``batch_tokens`` and
  longer ones in chunks; it pushes each one's KV to the decode worker that the gateway chose, layer
  by layer, emits token 1 and forgets the request when all is acknowledged. ``movable``: it answers,
  too, within ``tbt_target_s``, when decode workers lack room or an operator moves it.
* Defaults: ``PrefillConfig``.
* Health: ready while a gateway has it, unless every decode worker has refused to pair with it.
* Command: ``pdmesh prefill``, or ``python -m services.prefill`` configured by ``PDMESH_*``.
"""

from __future__ import annotations

from shared.config import PrefillConfig
from shared.home import Role
from shared.worker.core.life import Task
from shared.worker.launch import LaunchProfile


def prefill_launch(config: PrefillConfig) -> LaunchProfile:
    """Return what a worker of this configuration does."""
    return LaunchProfile(
        Role.PREFILL, frozenset(Task) if config.movable else frozenset({Task.PROMPT})
    )
