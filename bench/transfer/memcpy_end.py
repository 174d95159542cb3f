"""One end of a plain copy between two processes' memory, ordered about by ``pairs.py``: what the
machine itself does, without any transport.

The writer maps the receiver's tensor (on a device: cudaIpcOpenMemHandle, as UCX's cuda_ipc does)
and copies into it; nobody tells the other end, which looks at its bytes afterwards.
"""

from __future__ import annotations

import pickle  # noqa: TID251  (between our own two processes, as torch hands memory over)
import sys
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # teaches the pickler tensors

from bench.transfer.end import obey, other_address, pin

MAX_BYTES = 64 << 20


def main() -> None:
    pin(sys.argv[2])
    device = sys.argv[3]
    torch.multiprocessing.set_sharing_strategy("file_system")  # names, which a pipe can carry
    own = torch.ones(MAX_BYTES, dtype=torch.uint8, device=device)

    def settle() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    settle()
    theirs = pickle.loads(bytes.fromhex(other_address(bytes(ForkingPickler.dumps(own)).hex())))

    def write(num_bytes: int, count: int) -> None:
        for _ in range(count):
            theirs[:num_bytes].copy_(own[:num_bytes])
        settle()

    obey(own, write, "copy", settle)


if __name__ == "__main__":
    main()
