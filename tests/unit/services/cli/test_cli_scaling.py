"""`pdmesh up --planner act`: what is refused, and who is started and ended."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.cli.scaling import RETRY_S, LocalScaler
from services.cli.up import MAX_WORKERS, plan_mesh, up_config
from services.local import LocalMesh, Phase, Service
from shared.errors import InvalidRequest
from shared.mesh_secret import SECRET_VARIABLE


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"max_workers": 4}, "--max-workers is the most that --planner act may want"),
        ({"max_workers": 4, "planner": "advise"}, "--max-workers is the most that --planner act"),
        ({"max_workers": 0, "planner": "act"}, f"--max-workers must be 1..{MAX_WORKERS}"),
        ({"max_workers": 65, "planner": "act"}, f"--max-workers must be 1..{MAX_WORKERS}"),
        (
            {"max_workers": 2, "planner": "act", "prefill": 2, "decode": 1},
            "--max-workers 2 is less than the 3 that it starts with",
        ),
        ({"planner": "act", "planner_ttft_s": 0.0}, "--planner-ttft-s must be above 0"),
        ({"planner": "act", "planner_target": 1.0}, "--planner-target must be above 0"),
        ({"planner": "never"}, "--planner must be off, advise or act"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(
    flags: dict[str, Any], sentence: str
) -> None:
    """Before anything is started."""
    with pytest.raises(InvalidRequest, match=sentence):
        plan_mesh(up_config(port=0, engine="fake", **flags), {})


def test_the_machine_is_divided_among_as_many_as_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes later finds its cores; it has the mesh's secret, and a name of its own."""
    monkeypatch.setattr("services.cli.up.num_cores", lambda: 8)
    config = up_config(port=0, engine="fake", prefill=1, decode=1, planner="act", max_workers=4)
    plan = plan_mesh(config, {})
    assert plan.gateway.max_workers == 4
    assert {it.env["PDMESH_THREADS"] for it in plan.services[1:]} == {"2"}
    more = plan.new_worker("prefill")
    assert (more.name, more.module) == ("prefill-1", "services.prefill")
    assert more.env["PDMESH_THREADS"] == "2"
    assert more.env[SECRET_VARIABLE] == plan.services[0].env[SECRET_VARIABLE]


def test_who_comes_later_gets_the_gpu_that_has_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on one GPU have equal parts of it: that does not make the part taken for both."""
    monkeypatch.setattr("services.cli.up.find_gpus", lambda environment: ["a", "b"])
    config = up_config(port=0, device="cuda", prefill=1, decode=1, planner="act", max_workers=4)
    plan = plan_mesh(config, {})
    for role in ("prefill", "decode"):
        plan.services.append(plan.new_worker(role))
    firsts = [it.env["CUDA_VISIBLE_DEVICES"].partition(",")[0] for it in plan.services[1:]]
    assert sorted(firsts) == ["a", "a", "b", "b"]


def test_without_a_number_it_starts_nobody() -> None:
    """Homes may move all the same."""
    config = up_config(port=0, engine="fake", workers=3, planner="act")
    assert plan_mesh(config, {}).gateway.max_workers == 3
    assert plan_mesh(up_config(port=0, engine="fake"), {}).gateway.max_workers == 0


class Mesh:
    """Stands for a local mesh: keeps what it is told."""

    def __init__(self, *names: str) -> None:
        self.services = [Service(name="gateway", module="g", env={})]
        for port, name in enumerate(names, 1):
            worker = Service(name=name, module="m", env={}, phase=Phase.READY)
            worker.facts["grpc_port"] = port
            self.services.append(worker)
        self.retired: list[str] = []

    @property
    def workers(self) -> list[Service]:
        return self.services[1:]

    def add(self, worker: Service) -> None:
        worker.phase = Phase.STARTING
        self.services.append(worker)

    def retire(self, worker: Service) -> None:
        worker.is_retired = True
        self.retired.append(worker.name)

    def forget(self, worker: Service) -> None:
        self.services.remove(worker)


class Scaled:
    """A scaler, its mesh and its clock."""

    def __init__(self, *names: str, max_workers: int = 4) -> None:
        self.mesh, self.now, self.said = Mesh(*names), 0.0, list[str]()
        self.made: list[str] = []
        self.scaler = LocalScaler(self.new, max_workers, self.said.append, lambda: self.now)

    def new(self, role: str) -> Service:
        self.made.append(role)
        return Service(name=f"{role}-{len(self.made)}x", module="m", env={})

    def wish(
        self, prefill: int, decode: int, *, present: tuple[int, int] = (1, 1), drain: Any = ()
    ) -> None:
        wish = {
            "wanted": {"prefill": prefill, "decode": decode},
            "present": {"prefill": present[0], "decode": present[1]},
            "drain": list(drain),
        }
        self.scaler.wish(cast("LocalMesh", self.mesh), wish)


def test_what_is_wanted_is_started_once() -> None:
    """The wish comes again until it is so, and never more than allowed."""
    scaled = Scaled("prefill-0", "decode-0")
    scaled.wish(3, 2)
    scaled.wish(3, 2)
    assert sorted(scaled.made) == ["prefill", "prefill"]  # four in all
    assert len(scaled.mesh.workers) == 4


def test_who_is_named_ends_and_no_more_than_are_too_many() -> None:
    """By the port that the gateway knows."""
    scaled = Scaled("prefill-0", "prefill-1", "decode-0")
    scaled.wish(1, 1, present=(2, 1), drain=[2, 3])
    assert scaled.mesh.retired == ["prefill-1"]
    scaled.wish(1, 1, present=(1, 1), drain=[3])
    assert scaled.mesh.retired == ["prefill-1"]
    assert scaled.made == []


def test_who_cannot_start_is_told_and_tried_again_later() -> None:
    """The mesh goes on meanwhile."""
    scaled = Scaled("prefill-0", "decode-0")
    scaled.wish(2, 1)
    failed = scaled.mesh.workers[-1]
    failed.phase, failed.error = Phase.CRASHED, "no memory"
    scaled.wish(2, 1)
    assert scaled.said[-1] == "planner: prefill-1x could not start: no memory"
    assert scaled.made == ["prefill"]
    scaled.now = RETRY_S
    scaled.wish(2, 1)
    assert scaled.made == ["prefill", "prefill"]
