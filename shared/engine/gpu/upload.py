"""Numbers from the host to the device and back, without making the host wait for its queue.

A copy from ordinary memory waits until everything queued before it is done; one from page-locked
memory is queued like a kernel. torch keeps page-locked memory and does not hand it out again before
the copy is done.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a tensor of these numbers on the device: on CPU the array's own memory, elsewhere a
    copy that is queued on the current stream."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cpu" or not numbers.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the host's memory: on CPU itself, elsewhere a copy that is queued on the
    current stream, and not there before a mark behind it is passed."""
    if tensor.device.type == "cpu":
        return tensor
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)
