"""vLLM's second model runner without a GPU: its Triton kernels by Triton's interpreter.

That runner's class for CPUs wants a Triton that compiles for them, which is not to be had as a
package; interpreted kernels compute the same, a hundred times slower. ``make setup-vllm`` puts
Triton into a folder of its own, where nothing else finds it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "interpreter"


def variables() -> dict[str, str]:
    """Return what has a process take it that is started with this in its environment."""
    folders = [str(Path(__file__).with_name("second_runner_path")), *sys.path]
    return {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "PYTHONPATH": os.pathsep.join(folders),
    }


def take_second_runner() -> None:
    """Have this process take it, before vLLM is imported, and whatever it starts."""
    os.environ |= variables()
    sys.path.append(str(FOLDER))
    import triton.backends as triton_backends

    known: dict[str, Any] = triton_backends.backends
    known.clear()
    known["cpu"] = triton_backends.Backend(None, _Interpreter)


class _Interpreter:
    """Stands where Triton's driver for a device would."""

    @classmethod
    def is_active(cls) -> bool:
        """There is a CPU everywhere."""
        return True

    def get_current_target(self) -> Any:
        """Of what it would compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 0)
