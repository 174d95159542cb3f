"""What ``pdmesh doctor`` finds out about this installation and this machine without starting
anything: each function looks at one thing and judges it."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from services.cli.doctor.finding import Finding, absent, right, wrong
from services.cli.doctor.link import Link
from services.cli.machine import num_cores
from shared.lanes import is_within_host
from shared.runtime.realtime import RealTime
from shared.version import VERSION

MIB: Final = 1 << 20
OLDEST_PYTHON: Final = (3, 11)
FIRST_UNKNOWN_PYTHON: Final = (3, 14)
WANTED_FILES: Final = 4096
WANTED_SHARED_BYTES: Final = 256 * MIB
UNLIMITED: Final = 1 << 60

LIBRARIES: Final = (
    "aiohttp", "betterproto2", "grpclib", "h2", "protobuf", "tokenizers", "numpy", "safetensors",
)  # fmt: skip
WORKER_REMEDY: Final = (
    "to run workers here: install torch in the build that fits (pytorch.org), then "
    "pip install 'pdmesh[worker]'"
)


def version_of(package: str) -> str:
    """Return the installed version, '' if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# --- the installation ---------------------------------------------------------------------------


def check_python() -> Finding:
    """Whether this Python is one that we are tested with."""
    text = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    if not OLDEST_PYTHON <= sys.version_info[:2] < FIRST_UNKNOWN_PYTHON:
        return wrong("Python", text, "use Python 3.11, 3.12 or 3.13")
    return right("Python", text)


def check_pdmesh() -> Finding:
    """Ours and the libraries that decide how it behaves."""
    found = [f"{name} {version_of(name)}" for name in LIBRARIES if version_of(name)]
    return right("pdmesh", f"{VERSION} with {', '.join(found)}")


def check_uvloop() -> Finding:
    """The event loop of the services."""
    version = version_of("uvloop")
    if not version:
        return absent("uvloop", "not installed: services use asyncio's own loop, which is slower")
    return right("uvloop", version)


def check_torch(facts: Mapping[str, Any] | None, error: str) -> Finding:
    """facts: of ``shared.engine.probe``; None = there is no torch, or ``error``."""
    if error:
        return wrong("torch", f"installed, but {error}", "install torch anew (pytorch.org)")
    if facts is None:
        return absent("torch", "not installed: a gateway needs none; " + WORKER_REMEDY)
    build = f"built for CUDA {facts['cuda_built']}" if facts["cuda_built"] else "CPU build"
    text = f"{facts['version']}, {build}, {facts['threads']} threads on {num_cores()} cores"
    return right("torch", text)


def is_ucx_installed() -> bool:
    """Whether there is something to measure."""
    return find_spec("ucxx") is not None


# --- the link -----------------------------------------------------------------------------------


def check_ucx(link: Link | None) -> Finding:
    """Which UCX the measuring processes loaded."""
    if not is_ucx_installed():
        return absent("UCX", "not installed: a gateway needs none; " + WORKER_REMEDY)
    names = ("ucxx-cu13", "ucxx-cu12", "libucx-cu13", "libucx-cu12")
    found = ", ".join(f"{name} {version_of(name)}" for name in names if version_of(name))
    return right("UCX", f"{found}{f' ({link.library})' if link is not None else ''}")


def check_shared_memory_lane(link: Link | None, error: str) -> Finding:
    """Whether two processes of this machine use shared memory with our settings."""
    name = "shared memory"
    tls = os.environ.get("UCX_TLS", "")
    unset = f"unset UCX_TLS (it is {tls!r})" if tls else ""
    if link is None:
        remedy = unset or "run `python -m services.cli.doctor.link_end` to see UCX's own words"
        return wrong(name, f"two processes do not reach each other: {error}", remedy)
    text = f"{link.gb_per_s:.1f} GB/s between two processes, lane {link.lane}"
    if not is_within_host(link.lane):
        remedy = unset or "allow System V shared memory here (kernel.shmmax, kernel.shmall)"
        return wrong(name, text, remedy)
    return right(name, text)


def check_tcp_lane(link: Link | None, error: str) -> Finding:
    """What goes between hosts without RDMA."""
    if link is None:
        return wrong("TCP", f"UCX does not work over TCP: {error}", "look at UCX_NET_DEVICES")
    return right("TCP", f"{link.gb_per_s:.1f} GB/s between two processes, lane {link.lane}")


def check_rdma(devices: Sequence[str], link: Link | None) -> Finding:
    """devices: names in /sys/class/infiniband."""
    if not devices:
        return absent("RDMA", "no device in /sys/class/infiniband: between hosts KV goes over TCP")
    names = ", ".join(devices)
    if link is None or "ib" not in link.modules:
        library = link.library if link is not None else "this UCX"
        return wrong(
            "RDMA",
            f"{names} is here, but {library} is built without RDMA: KV goes over TCP",
            "install a UCX built with verbs, and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true and "
            "LD_LIBRARY_PATH",
        )
    return right("RDMA", f"{names}, and UCX can use it")


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the RDMA devices of this machine."""
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


# --- GPUs ---------------------------------------------------------------------------------------


def check_gpu(facts: Mapping[str, Any] | None, num_driver_gpus: int) -> Finding:
    """num_driver_gpus: as nvidia-smi counts them."""
    devices: list[Any] = list(facts["devices"]) if facts is not None else []
    if devices:
        return right(
            "GPU",
            ", ".join(f"cuda:{i} {d['name']} ({d['free_gib']:.0f} of {d['total_gib']:.0f} GiB free)"
                      for i, d in enumerate(devices)),
        )  # fmt: skip
    if not num_driver_gpus or facts is None:
        return absent("GPU", "none: models run on the CPU (a small one, for trying things out)")
    text = f"the driver has {num_driver_gpus}, torch sees none"
    if not facts["cuda_built"]:
        return wrong("GPU", text, "this torch is a CPU build: install one with CUDA (pytorch.org)")
    return wrong(
        "GPU",
        text,
        "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for CUDA "
        f"{facts['cuda_built']}",
    )


def check_cuda_ipc(facts: Mapping[str, Any] | None, link: Link | None) -> Finding:
    """Whether KV can go from one process's GPU memory to another's without the host."""
    name = "CUDA IPC"
    if facts is None or not facts["devices"]:
        return absent(name, "no GPU here")
    if facts["ipc_error"]:
        return wrong(
            name,
            f"this process cannot share device memory: {facts['ipc_error']}",
            "containers need one IPC namespace and all GPUs visible in each",
        )
    if facts["expandable_segments"]:
        return wrong(
            name,
            "torch is told to use expandable_segments: workers refuse to start with them",
            "leave them out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF",
        )
    if link is not None and not ("cuda" in link.modules and facts["has_nvml"]):
        return wrong(
            name,
            "UCX cannot drive GPUs here",
            "libnvidia-ml.so.1 must be loadable, and UCX built with CUDA",
        )
    peers = "" if facts["all_peers"] else "; some GPUs cannot reach each other directly"
    return right(name, f"device memory can be shared with other processes{peers}")


# --- limits -------------------------------------------------------------------------------------


def check_ports(taken: Mapping[int, str]) -> list[Finding]:
    """taken: port -> who has it: '' = nobody, 'pdmesh' = a gateway of ours, else why not."""
    findings: list[Finding] = []
    for port, by in taken.items():
        name = f"port {port}"
        if not by:
            findings.append(right(name, "free"))
        elif by == "pdmesh":
            findings.append(absent(name, "a gateway of pdmesh listens there"))
        else:
            remedy = "pdmesh up --port N takes others (N and N + 1)"
            findings.append(wrong(name, by, remedy))
    return findings


def why_taken(port: int) -> str:
    """Return '' if we can listen on a port of this machine, else why not."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            return "something else listens there" if is_taken else os.strerror(error.errno or 0)
    return ""


def check_sysv(kernel: Path = Path("/proc/sys/kernel")) -> Finding:
    """The kind of shared memory that our lane uses."""
    name = "SysV limits"
    try:
        largest = int((kernel / "shmmax").read_text())
        total = int((kernel / "shmall").read_text()) * resource.getpagesize()
    except (OSError, ValueError):
        return absent(name, "the kernel does not tell")
    text = f"largest segment {_bytes(largest)}, together {_bytes(total)}"
    if min(largest, total) < WANTED_SHARED_BYTES:
        wanted = f"kernel.shmmax={WANTED_SHARED_BYTES} kernel.shmall={WANTED_SHARED_BYTES // 4096}"
        return wrong(name, text, f"sysctl -w {wanted}")
    return right(name, text)


def check_dev_shm(folder: Path = Path("/dev/shm")) -> Finding:
    """Not used by our lane, but by others that UCX may choose."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return absent("/dev/shm", "not here; KV goes through System V segments")
    size = _bytes(stat.f_frsize * stat.f_blocks)
    return right("/dev/shm", f"{size}; KV goes through System V segments, which are no part of it")


def check_memlock(limit: int, has_rdma: bool) -> Finding:
    """limit: bytes that may be locked. Only RDMA locks memory."""
    text = _bytes(limit)
    if limit >= UNLIMITED or limit == resource.RLIM_INFINITY:
        return right("locked memory", "unlimited")
    if has_rdma:
        remedy = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
        return wrong("locked memory", f"{text}: RDMA must lock all staging", remedy)
    return absent("locked memory", f"{text}; only RDMA needs more")


def check_open_files(soft: int, hard: int) -> Finding:
    """Each client and each worker is a socket."""
    if soft == resource.RLIM_INFINITY or soft >= WANTED_FILES:
        return right("open files", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    how = "" if hard == resource.RLIM_INFINITY or hard >= WANTED_FILES else ", as root"
    return wrong(
        "open files",
        f"{soft:,}: a gateway takes no more connections than that",
        f"ulimit -n {WANTED_FILES}{how} (systemd: LimitNOFILE=, containers: --ulimit nofile=)",
    )


def check_realtime(is_allowed: bool) -> Finding:
    """is_allowed: whether this user may have what ``--realtime`` takes."""
    if is_allowed:
        return right("real-time", "--realtime may be used")
    remedy = f"ulimit -r {max(RealTime):d}, LimitRTPRIO=, --ulimit rtprio={max(RealTime):d}"
    return absent("real-time", f"not allowed; only --realtime needs it ({remedy})")


def limits() -> tuple[int, int, int]:
    """Return this process's limits: locked memory, open files soft and hard."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return memlock, soft, hard


def _bytes(count: int) -> str:
    if count >= UNLIMITED or count == resource.RLIM_INFINITY:
        return "unlimited"
    for size, unit in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
