"""Where vLLM is not installed, its tests skip; the engines they ask live as long as a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shared.config import PrefillConfig
from shared.model_folder import BUNDLED
from tests.support import service_process
from tests.support.remote_engine import RemoteEngine, remote_engine
from tests.support.second_runner import take_second_runner
from tests.support.vllm_checkpoints import make

EAGER = "enforce_eager=true"
NUM_BLOCKS = 96

EngineOf = Callable[..., RemoteEngine]

RUNNERS = ["first", pytest.param("second", marks=pytest.mark.nightly)]
"""vLLM's model runners. Of the second each step takes a quarter of a second here."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no vLLM."""
    if find_spec("vllm") is None:
        reason = "vLLM is not installed here: make test-vllm makes an environment for it"
        for item in items:
            if item.get_closest_marker("vllm") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers that import vLLM at once need more than a minute where others work, too."""
    monkeypatch.setattr(service_process, "ENDS_WITHIN_S", 240.0)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the shared, read-only folder of a family, or of a bundled model."""
    made = dict(BUNDLED)

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make(family, tmp_path_factory.mktemp("vllm") / family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def runner() -> str:
    """Return the model runner of every engine that a test does not ask for by another."""
    return "first"


@pytest.fixture(scope="module")
def engine_of(folder_of: Callable[[str], Path], runner: str) -> Iterator[EngineOf]:
    """Start a vLLM engine of a family, or return the one that runs."""
    with ExitStack() as running:
        known: dict[tuple[object, ...], RemoteEngine] = {}

        def engine(
            family: str, *, ranks: int = 1, runner: str = runner, **settings: Any
        ) -> RemoteEngine:
            arguments = [EAGER, *(settings.pop("vllm_args", "").split())]
            if ranks > 1:
                arguments.append(f"tensor_parallel_size={ranks}")
            wanted = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "threads": 1, **settings}
            key = (family, runner, *arguments, *sorted(wanted.items()))
            if key not in known:
                config = PrefillConfig(
                    engine="vllm",
                    device="cpu",
                    model=str(folder_of(family)),
                    vllm_args=" ".join(arguments),
                    **wanted,
                )
                config.check()
                known[key] = running.enter_context(
                    remote_engine(config, take_second_runner if runner == "second" else None)
                )
                assert known[key].machine["runner"] == runner
            return known[key]

        yield engine
