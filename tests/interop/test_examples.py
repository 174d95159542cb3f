"""Every program in examples/ runs against `pdmesh up` and says what is true."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import Overloaded
from tests.interop.conftest import pdmesh_up
from tests.support.demo_truth import recall_prompts
from tests.support.foreign_client import run_client, run_client_well
from tests.support.house import ROOT
from tests.support.scripted_mesh import ScriptedMesh, http_gateway

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

EXAMPLES = ROOT / "examples"
RUNS_WITHIN_S = 120.0
DOOR = "The code of the red door is 4821."

SAYS = {
    "openai_stream.py": rf"{DOOR}\n\d+ tokens in, 14 out; first token after \d+ ms\n",
    "openai_many.py": r"What is 11 \+ 25\?  11 \+ 25 = 36\.\n(.*\n)*"
    r"What is 18 \+ 40\?  18 \+ 40 = 58\.\n",
    "langchain_chain.py": rf"{DOOR}\nThe code of the blue lift is 5044\.\n{DOOR}\n",
    "grpc_stream.py": rf"{DOOR}\nprefill [0-9a-f]{{16}}, decode [0-9a-f]{{16}}, 1 attempt\n",
    "grpc_stream.js": rf"{DOOR}\nfirst token after \d+ ms\n",
    "grpc_tokens.py": r"prompt:( \d+)+\n"
    + "".join(rf"{i}: \d+ -?\d+\.\d{{4}}\n" for i in range(8)),
    "grpc_weather.py": r'get_weather\(\{"city": ?"Rome"\}\)\nThe weather in Rome is sunny\.\n',
    "curl.sh": r'\{"object":"list".*\n.*17 \+ 25 = 42\..*\n(data: .*\n\n)+data: \[DONE\]\n\n'
    r'\{"count":\d+,.*\n',
    "receipt.py": r"(.|\n)+\n +queue_s .* ms(.|\n)+ttft_s +\d+\.\d\d ms\n[\d,]+ bytes of KV.*\n",
    "retry.py": r"17 \+ 25 = 42\.\n",
    "batch.py": "",
}
"""What each one prints, as a pattern of the whole."""

Run = Callable[..., "asyncio.Future[str]"]


def command(name: str, client_bin: Callable[[str], Path]) -> list[str | Path]:
    """What a reader would type."""
    path = EXAMPLES / name
    if name.endswith(".sh"):
        return [shutil.which("bash") or "", path]
    if name.endswith(".js"):
        return [shutil.which("node") or "", path]
    return [client_bin("langchain") / "python" if "langchain" in name else sys.executable, path]


def test_every_example_has_a_test_and_a_line_in_the_readme() -> None:
    """A new file in examples/ needs its pattern here, and a reader must find it."""
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert files == set(SAYS)
    listed = re.findall(r"\| \[`([\w.]+)`\]\(([\w.]+)\) \|", (EXAMPLES / "README.md").read_text())
    assert {name for name, _ in listed} == {target for _, target in listed} == files
    for name in files:
        assert len((EXAMPLES / name).read_text().splitlines()) < 60, name


@pytest.mark.parametrize(
    "name", [name for name in SAYS if name not in ("batch.py", "grpc_weather.py")]
)
async def test_an_example_says_what_is_true(
    name: str,
    client_bin: Callable[[str], Path],
    node_modules: Callable[[str], Path],
    running_mesh: tuple[str, str],
    tmp_path: Path,
) -> None:
    """It ends well, and prints what it shall."""
    environment = {"PDMESH_URL": running_mesh[0], "PDMESH_GRPC": running_mesh[1]}
    if name.endswith(".js"):
        if shutil.which("node") is None or shutil.which("npm") is None:
            pytest.skip("node and npm are not installed")
        environment["NODE_PATH"] = str(node_modules("node"))
    words = await run_client_well(
        *command(name, client_bin), cwd=tmp_path, within_s=RUNS_WITHIN_S, environment=environment
    )
    assert re.fullmatch(SAYS[name], words), words


async def test_a_tool_is_called_and_run_over_grpc(tmp_path: Path) -> None:
    """By the bundled model that calls tools."""
    with pdmesh_up("--model", "demo-tools") as (_, address):
        words = await run_client_well(
            *(sys.executable, EXAMPLES / "grpc_weather.py"),
            cwd=tmp_path,
            within_s=RUNS_WITHIN_S,
            environment={"PDMESH_GRPC": address},
        )
    assert re.fullmatch(SAYS["grpc_weather.py"], words), words


async def test_the_batch_answers_every_line(running_mesh: tuple[str, str], tmp_path: Path) -> None:
    """More prompts than it sends at once; a prompt that cannot be answered has its error, and
    holds nobody up."""
    prompts = recall_prompts(40)
    rows = [
        {"id": index, "prompt": prompt.messages[0]["content"]}
        for index, prompt in enumerate(prompts)
    ]
    rows.append({"id": "too long", "prompt": "The cat " * 3000})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    await run_client_well(
        *(sys.executable, EXAMPLES / "batch.py", "prompts.jsonl", "answers.jsonl"),
        cwd=tmp_path,
        within_s=RUNS_WITHIN_S,
        environment={"PDMESH_URL": running_mesh[0]},
    )
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    answers = {row["id"]: row for row in map(json.loads, lines)}
    assert len(answers) == len(lines) == len(rows)
    assert "maximum context length" in answers["too long"]["error"]
    for index, prompt in enumerate(prompts):
        assert answers[index]["answer"] == prompt.expected_reply


async def test_the_retry_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    """Refused once with a hint of a second, it comes back and is served; what a retry does not
    mend, it reports at once."""
    mesh = ScriptedMesh()
    mesh.refusal = Overloaded("full", retry_after_s=1)

    async def make_room() -> None:
        while not mesh.requests:
            await asyncio.sleep(0.01)
        mesh.refusal = None

    async with http_gateway(mesh) as url:
        environment = {"PDMESH_URL": url}
        example = (sys.executable, EXAMPLES / "retry.py")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(make_room())
            words = await run_client_well(
                *example, cwd=tmp_path, within_s=RUNS_WITHIN_S, environment=environment
            )
        assert re.fullmatch(r"refused \(overloaded\): again in 1\.\d s\nhello and the end\n", words)
        assert len(mesh.requests) == 2
        mesh.refusal = ValueError("a bug")
        ended = await run_client(
            *example, cwd=tmp_path, within_s=RUNS_WITHIN_S, environment=environment
        )
        assert ended.code == 1
        assert "500: internal error" in ended.words
        assert len(mesh.requests) == 3
