"""Numbers from the host to the device, without making the host wait for the device's queue.

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
