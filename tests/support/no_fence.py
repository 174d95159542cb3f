"""The mistake that the safety tests must see: what a transfer holds is free while it may still be
written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from shared.transfer.effects import CancelReceive
from shared.transfer.receiver import Receiver
from shared.transfer.receivers import Receivers


def take_fence_away(patch: pytest.MonkeyPatch) -> None:
    """Have every sink of this process make the mistake, until ``patch`` is undone."""
    patch.setattr(Receiver, "_stop", _free_at_once)
    for name in ("receive_settled", "frame_placed"):
        patch.setattr(Receivers, name, _ignoring_what_is_over(getattr(Receivers, name)))


def _free_at_once(receiver: Receiver, now: float) -> None:
    """In place of ``Receiver._stop``, which quarantines."""
    receiver._progress_at = now
    for frame_idx in receiver._posted:
        receiver._effects.append(CancelReceive(receiver.key, frame_idx))
    receiver._free_slots += [*receiver._posted.values(), *receiver._placing.values()]
    receiver._posted.clear()
    receiver._placing.clear()


def _ignoring_what_is_over(method: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(method)
    def heard(receivers: Receivers, key: Any, frame_idx: int, error: Any, now: float) -> list[Any]:
        if key not in receivers._receivers:
            return receivers._take(now)
        return method(receivers, key, frame_idx, error, now)

    return heard
