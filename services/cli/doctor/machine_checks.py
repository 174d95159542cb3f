"""What ``pdmesh doctor`` finds out about this installation and this machine: each function looks at
one thing and judges it. Facts of torch and of UCX come from ``shared.engine.probe`` and
``shared.transport.probe``; None = it is not installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import resource
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from services.cli.doctor.finding import Finding, absent, right, wrong
from services.cli.flags import CannotRun, require_free_port
from shared import grammar
from shared.control_groups import granted_cores, num_cores
from shared.engine.native.build import OWN_BITS
from shared.engine.vllm.release import INSTALL, release
from shared.errors import InvalidRequest, ModelError
from shared.runtime.realtime import RealTime
from shared.version import VERSION

Facts = Mapping[str, Any] | None

WANTED_FILES: Final = 4096
WANTED_SHARED_BYTES: Final = 256 << 20
UNLIMITED: Final = 1 << 60

LIBRARIES: Final = (
    "uvloop", "aiohttp", "betterproto2", "grpclib", "h2", "protobuf", "tokenizers", "numpy",
    "safetensors",
)  # fmt: skip
_KERNELS_REMEDY: Final = (
    "install pdmesh's wheel with kernels (manylinux), or g++ 11 or newer, or set CXX; what is "
    "compiled goes to XDG_CACHE_HOME, a folder that can be written and is not mounted noexec"
)
NO_WORKERS: Final = (
    "not installed: a gateway needs none; to run workers here: install torch in the build that "
    "fits (pytorch.org), then pip install 'pdmesh[worker]'"
)


def check_pdmesh() -> Finding:
    """Ours, and what decides how it behaves."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    return right("pdmesh", f"{VERSION} on {system} with {_versions(*LIBRARIES)}")


def check_torch(facts: Facts, error: str) -> Finding:
    """error: why it cannot be loaded."""
    if error:
        return wrong("torch", f"installed, but {error}", "install torch anew (pytorch.org)")
    if facts is None:
        return absent("torch", NO_WORKERS)
    build = f"built for CUDA {facts['cuda_built']}" if facts["cuda_built"] else "CPU build"
    granted = "1 core" if (cores := granted_cores()) == 1 else f"{cores:g} cores"
    threads = "1 thread" if num_cores() == 1 else f"{num_cores()} threads"
    return right("torch", f"{facts['version']}, {build}, {threads} on {granted}")


def check_kernels(facts: Facts) -> Finding:
    """What a worker on this CPU would compute with. facts: see ``check_torch``."""
    if facts is None:
        return absent("CPU kernels", NO_WORKERS)
    native = facts["native"]
    if not native["reason"]:
        chosen = ", ".join(f"{dtype} by {by}" for dtype, by in native["instructions"].items())
        text = f"native: {chosen}, {native['origin']}; the same bits on any CPU"
        if own := [it for it, by in native["instructions"].items() if by in OWN_BITS]:
            text += f" ({', '.join(own)}: with {OWN_BITS[0].upper()})"
        if not native["shortfall"]:
            return right("CPU kernels", text)
        return wrong("CPU kernels", f"{text}; {native['shortfall']}", _KERNELS_REMEDY)
    text = f"{native['reason']}: on CPUs torch computes, in float32, two to seven times slower"
    # Of the CPU or the system: nothing that could be installed here mends it.
    if native["reason"].startswith(("this CPU", "they are")):
        return absent("CPU kernels", text)
    return wrong("CPU kernels", text, _KERNELS_REMEDY)


def check_vllm(
    facts: Facts,
    *,
    is_wanted: bool,
    has_numa: bool,
    compiler: str,
) -> Finding:
    """Whether ``--engine vllm`` runs here. facts: see ``check_torch``. is_wanted: it is a fault not
    to have it. has_numa, compiler: what the CPU build looks at; '' = there is no C++ compiler."""
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


def has_numa() -> bool:
    """Whether the library is here that vLLM's CPU build is linked with."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    return True


def check_grammars() -> Finding:
    try:
        return right("llguidance", f"{grammar.release()}, for structured output")
    except InvalidRequest as error:
        fault, _, remedy = error.message.partition("; ")
        return wrong("llguidance", fault, remedy)


def check_ucx(facts: Facts, error: str) -> Finding:
    """Which UCX a worker would load. error: why it cannot."""
    found = _versions("ucxx-cu13", "ucxx-cu12", "libucx-cu13", "libucx-cu12")
    if error:
        return wrong("UCX", f"{found}: {error}", "look at LD_LIBRARY_PATH and UCX_* variables")
    if facts is None:
        return absent("UCX", NO_WORKERS)
    return right("UCX", f"{found} ({facts['library']})")


def check_rdma(devices: Sequence[str], ucx: Facts) -> Finding:
    """devices: names in /sys/class/infiniband."""
    if not devices:
        return absent("RDMA", "no device in /sys/class/infiniband: between hosts KV goes over TCP")
    names = ", ".join(devices)
    if ucx is not None and "ib" in ucx["modules"]:
        return right("RDMA", f"{names}, and UCX can use it")
    return wrong(
        "RDMA",
        f"{names} is here, but UCX is built without RDMA: KV goes over TCP",
        "install a UCX built with verbs, and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true and "
        "LD_LIBRARY_PATH",
    )


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def check_gpu(torch: Facts, num_driver_gpus: int) -> Finding:
    """num_driver_gpus: as nvidia-smi counts them."""
    if torch is not None and torch["devices"]:
        devices = [
            f"cuda:{i} {d['name']} ({d['free_gib']:.0f} of {d['total_gib']:.0f} GiB free)"
            for i, d in enumerate(torch["devices"])
        ]
        return right("GPU", ", ".join(devices))
    if not num_driver_gpus or torch is None:
        return absent("GPU", "none: models run on the CPU (a small one, for trying things out)")
    remedy = "this torch is a CPU build: install one with CUDA (pytorch.org)"
    if built := torch["cuda_built"]:
        remedy = f"look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for {built}"
    return wrong("GPU", f"the driver has {num_driver_gpus}, torch sees none", remedy)


def check_cuda_ipc(torch: Facts, ucx: Facts) -> Finding:
    """Whether KV can go from one process's GPU memory to another's without the host."""
    name = "CUDA IPC"
    if torch is None or not torch["devices"]:
        return absent(name, "no GPU here")
    if torch["ipc_error"]:
        text = f"this process cannot share device memory: {torch['ipc_error']}"
        return wrong(name, text, "containers need one IPC namespace and all GPUs visible in each")
    if torch["expandable_segments"]:
        text = "torch is told to use expandable_segments: workers refuse to start with them"
        remedy = "leave them out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
        return wrong(name, text, remedy)
    if ucx is not None and not ("cuda" in ucx["modules"] and torch["has_nvml"]):
        remedy = "libnvidia-ml.so.1 must be loadable, and UCX built with CUDA"
        return wrong(name, "UCX cannot drive GPUs here", remedy)
    peers = "" if torch["all_peers"] else "; some GPUs cannot reach each other directly"
    return right(name, f"device memory can be shared with other processes{peers}")


def check_port(port: int, taken_by: str) -> Finding:
    """taken_by: '' = nobody, 'pdmesh' = a gateway of ours, else why we cannot listen there."""
    name = f"port {port}"
    if taken_by == "pdmesh":
        return absent(name, "a gateway of pdmesh listens there")
    remedy = "pdmesh up --port N takes others (N and N + 1)"
    return wrong(name, taken_by, remedy) if taken_by else right(name, "free")


def why_taken(port: int) -> str:
    """Return '' if we can listen on a port of this machine, else why not."""
    try:
        require_free_port("127.0.0.1", port, "--port")
    except CannotRun as error:
        return error.message.partition(": ")[0]
    return ""


def check_sysv(kernel: Path = Path("/proc/sys/kernel")) -> Finding:
    """The kind of shared memory that our lane uses."""
    name = "SysV limits"
    try:
        largest = int((kernel / "shmmax").read_text())
        total = int((kernel / "shmall").read_text()) * resource.getpagesize()
    except (OSError, ValueError):
        return absent(name, "the kernel does not tell")
    text = f"largest segment {_mebibytes(largest)}, together {_mebibytes(total)}"
    if min(largest, total) < WANTED_SHARED_BYTES:
        wanted = f"kernel.shmmax={WANTED_SHARED_BYTES} kernel.shmall={WANTED_SHARED_BYTES // 4096}"
        return wrong(name, text, f"sysctl -w {wanted}")
    return right(name, text)


def check_memlock(limit: int, has_rdma: bool) -> Finding:
    """limit: bytes that may be locked. Only RDMA locks memory."""
    name, text = "locked memory", _mebibytes(limit)
    if text == "unlimited":
        return right(name, text)
    if has_rdma:
        remedy = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
        return wrong(name, f"{text}: RDMA must lock all staging", remedy)
    return absent(name, f"{text}; only RDMA needs more")


def check_open_files(most: int) -> Finding:
    """most: the hard limit, which services take. Each client and each worker is a socket."""
    name, endless = "open files", resource.RLIM_INFINITY
    if most == endless or most >= WANTED_FILES:
        return right(name, "unlimited" if most == endless else f"{most:,}")
    how = "systemd: LimitNOFILE=, containers: --ulimit nofile="
    remedy = f"ulimit -Hn {WANTED_FILES}, as root ({how})"
    return wrong(name, f"{most:,}: a gateway takes no more connections than that", remedy)


def check_realtime(is_allowed: bool) -> Finding:
    """is_allowed: whether this user may have what ``--realtime`` takes."""
    if is_allowed:
        return right("real-time", "--realtime may be used")
    remedy = f"ulimit -r {max(RealTime):d}, LimitRTPRIO=, --ulimit rtprio={max(RealTime):d}"
    return absent("real-time", f"not allowed; only --realtime needs it ({remedy})")


def _versions(*packages: str) -> str:
    found: list[str] = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _mebibytes(count: int) -> str:
    is_endless = count >= UNLIMITED or count == resource.RLIM_INFINITY
    return "unlimited" if is_endless else f"{count / (1 << 20):,.4g} MiB"
