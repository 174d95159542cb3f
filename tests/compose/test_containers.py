"""What containers may not do, and what is not in their images."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time

import pytest

from tests.compose.project import ROOT, Container, Project, run, wait_until

PREFIX = os.environ.get("PDMESH_IMAGE", "")
TARGETS = ("gateway", "prefill", "decode")
UID = 10001

_LOOK_INSIDE = """
import json, os, resource
status = dict(line.split(":", 1) for line in open("/proc/1/status").read().splitlines())
def refusal(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return os.strerror(error.errno)
    return ""
print(json.dumps({
    "uid": os.getuid(),
    "caps": [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")],
    "no_new_privileges": int(status["NoNewPrivs"]),
    "seccomp": int(status["Seccomp"]),
    "refusals": [refusal("/x"), refusal("/app/x"), refusal("/model/x")],
    "tmp": refusal("/tmp/x"),
    "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
}))
"""


async def test_no_container_may_more_than_it_needs(mesh: Project) -> None:
    """Each runs as user 10001 without capabilities on a read-only root, with bounds on memory,
    processes, files and logs."""
    read_only = "Read-only file system"
    for one in mesh.containers():
        about = one.inspect()
        host = about["HostConfig"]
        assert about["Config"]["User"] == f"{UID}:{UID}", one.name
        assert host["ReadonlyRootfs"] is True
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert not host["Privileged"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert host["PidMode"] == ""
        assert host["Memory"] > 0
        assert host["PidsLimit"] > 0
        assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]}["core"] == 0
        assert host["LogConfig"]["Config"]["max-size"]
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        if one.service == "ipc":
            continue
        inside = json.loads(one.python(_LOOK_INSIDE))
        assert inside == {
            "uid": UID,
            "caps": [0, 0, 0],
            "no_new_privileges": 1,
            "seccomp": 2,
            "refusals": [read_only] * 3,
            "tmp": "",
            "core": 0,
        }, one.name


async def test_workers_have_no_way_out(mesh: Project) -> None:
    """Workers are in a network that leads nowhere else, and publish no port."""
    for one in mesh.workers:
        about = one.inspect()["NetworkSettings"]
        assert list(about["Networks"]) == [f"{mesh.name}_mesh"], one.name
        assert not any(about["Ports"].values())
    network = json.loads(run("docker", "network", "inspect", f"{mesh.name}_mesh"))[0]
    assert network["Internal"] is True


async def test_workers_share_the_anchors_ipc_namespace_alone(mesh: Project) -> None:
    """One namespace for all workers, which is neither the host's nor the gateway's."""
    ipc = {
        one.name: one.python("import os; print(os.readlink('/proc/1/ns/ipc'))")
        for one in mesh.containers()
    }
    workers = {ipc[one.name] for one in mesh.containers("prefill", "decode", "ipc")}
    others = {ipc[one.name] for one in mesh.containers("gateway")}
    assert len(workers) == 1
    assert workers.isdisjoint({*others, os.readlink("/proc/self/ns/ipc") + "\n"})


def python_in(target: str, code: str) -> str:
    """Run Python in an image that is not running."""
    image = f"{PREFIX}-{target}"
    command = ("docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", image)
    return run(*command, "-c", code)


def test_the_gateway_has_neither_torch_nor_ucx() -> None:
    """Nothing that computes or moves KV can be imported in the gateway's image."""
    names = ["torch", "ucxx", "safetensors", "xxhash", "cuda", "aiohttp"]
    found = python_in(
        "gateway",
        f"from importlib.util import find_spec as f; print([n for n in {names} if f(n)])",
    )
    assert found == "['aiohttp']\n"
    for target in TARGETS:
        size = int(run("docker", "image", "inspect", "--format", "{{.Size}}", f"{PREFIX}-{target}"))
        print(f"{target}: {size / 1e6:.0f} MB")


@pytest.mark.parametrize("target", TARGETS)
def test_images_hold_nothing_of_their_building(target: str) -> None:
    """No compiler, no pip in the environment, no caches, wheels or sources."""
    code = (
        "import os, shutil\n"
        "tools = [name for name in ('gcc', 'cc', 'g++', 'make', 'git') if shutil.which(name)]\n"
        "paths = ['/src', '/wheels', '/etc/pip.conf', '/opt/pdmesh/bin/pip', '/root/.cache']\n"
        "print(tools + [path for path in paths if os.path.lexists(path)])"
    )
    assert python_in(target, code) == "[]\n"
    config = json.loads(run("docker", "image", "inspect", f"{PREFIX}-{target}"))[0]["Config"]
    assert config["User"] == f"{UID}:{UID}"
    assert config["Entrypoint"] == ["pdmesh", target]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.parametrize("target", ["prefill", "decode"])
def test_a_workers_image_for_cpus_is_small(target: str) -> None:
    """1.2 GB, of which libtorch is a third."""
    if "+cpu" not in python_in(target, "import torch; print(torch.__version__)"):
        pytest.skip("it has a CUDA build of torch")
    size = run("docker", "image", "inspect", "--format", "{{.Size}}", f"{PREFIX}-{target}")
    assert int(size) <= 1.2e9


def test_a_service_as_process_1_ends_on_sigterm() -> None:
    """Without an init and without compose: it hears SIGTERM, drains, and says so with code 0."""
    model = ROOT / "shared" / "models" / "demo"
    id_ = run(
        *("docker", "run", "--detach", "--network", "none", "--read-only"),
        *("--volume", f"{model}:/model:ro", "--env", "PDMESH_MODEL=/model", f"{PREFIX}-gateway"),
    ).strip()
    try:
        container = Container(id_, "alone", "gateway")
        wait_until(lambda: '"event":"ready"' in container.logs(), "the gateway is up")
        assert container.python("print(open('/proc/1/cmdline').read().split('\\0')[1:3])") == (
            "['/app/bin/pdmesh', 'gateway']\n"
        )
        began_at = time.monotonic()
        subprocess.run(["docker", "stop", "--time", "60", id_], check=True, capture_output=True)
        assert time.monotonic() - began_at < 50
        state = container.inspect()["State"]
        assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
    finally:
        run("docker", "rm", "--force", id_)


async def test_a_limit_is_all_that_realtime_priority_takes() -> None:
    """What compose.realtime.yaml sets is enough for a user without capabilities."""
    program = (
        "import os; from shared.runtime.realtime import RealTime, take; take(RealTime.LOOP); "
        "print(os.getuid(), os.sched_getparam(0).sched_priority)"
    )
    command = ["docker", "run", "--rm", "--cap-drop=ALL", "--security-opt=no-new-privileges:true"]
    command += ["--ulimit=rtprio=2", "--entrypoint=python3", f"{PREFIX}-gateway", "-c", program]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False
    )
    if "error setting rlimit" in done.stderr:
        pytest.skip("this engine has no CAP_SYS_RESOURCE itself, so it cannot raise a limit")
    assert done.stdout.split() == [str(UID), "2"], done.stderr


async def test_a_refused_configuration_is_said_in_one_line() -> None:
    """A value out of range ends the container with code 2 and names the variable's flag."""
    done = await asyncio.to_thread(
        subprocess.run,
        ["docker", "run", "--rm", "--env", "PDMESH_MAX_ATTEMPTS=99", f"{PREFIX}-gateway"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--max-attempts" in done.stderr
