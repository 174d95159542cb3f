"""What ``pdmesh doctor`` finds out about ``--engine vllm``: what its workers would refuse to start
with."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.cli.doctor.finding import Finding, absent, right, wrong
from shared.engine.vllm.release import INSTALL, release
from shared.errors import ModelError


def check_vllm(
    facts: Mapping[str, Any] | None,
    *,
    is_wanted: bool,
    has_amx: bool,
    has_numa: bool,
    compiler: str,
) -> Finding:
    """Whether ``--engine vllm`` runs here. facts: see ``check_torch``. is_wanted: it is a fault not
    to have it. has_amx, has_numa, compiler: what the CPU build looks at; '' = there is no C++
    compiler."""
    if find_spec("vllm") is None:
        if is_wanted:
            return wrong("vLLM", "not installed", INSTALL)
        return absent("vLLM", f"not installed; only --engine vllm needs it: {INSTALL}")
    try:
        text = f"{release()}, for --engine vllm"
    except ModelError as error:
        return wrong("vLLM", error.message.removeprefix("--engine vllm: "), INSTALL)
    if facts is None or facts["devices"]:
        return right("vLLM", text)
    faults = (
        (
            has_amx,
            "this CPU has AMX, for which vLLM packs KV in a layout of its own",
            "take --engine torch on this machine, or --engine vllm on a CPU without AMX",
        ),
        (
            not has_numa,
            "its CPU build loads libnuma, and there is none",
            "install libnuma1 (numactl-libs)",
        ),
        (
            not compiler,
            "it compiles models, and there is no C++ compiler",
            "install g++, or say --vllm-args enforce_eager=true",
        ),
    )
    for is_so, fault, remedy in faults:
        if is_so:
            return wrong("vLLM", f"{text}: {fault}", remedy)
    return right("vLLM", f"{text}, compiles with {compiler}")


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has Intel's matrix units."""
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return "amx_tile" in flags.split()


def has_numa() -> bool:
    """Whether the library is here that vLLM's CPU build is linked with."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    return True
