"""Which device a benchmark of devices is asked about, and what it says where there is none."""

from __future__ import annotations

import argparse
import re
import sys

from bench.record import NOT_HERE


def add_device(parser: argparse.ArgumentParser) -> None:
    words = "cuda, cuda:N; cpu: a tiny rehearsal"
    parser.add_argument("--device", type=_device, default="cuda", help=words)


def _device(text: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError("it must be cuda, cuda:N or cpu")
    return text


def name_or_exit(device: str) -> str:
    """Return the device's name; without the device, say so and exit with NOT_HERE."""
    if device == "cpu":
        return "CPU"
    import torch

    from shared.engine.device import resolve_device
    from shared.errors import EngineFailed

    try:
        return torch.cuda.get_device_name(resolve_device(device))
    except EngineFailed as error:
        print(f"{error}: nothing was measured")
        sys.exit(NOT_HERE)
