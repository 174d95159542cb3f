"""Shell completion: the scripts are valid, and bash completes commands, flags and choices."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from services.cli import main

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pdmesh completion bash`` prints."""
    path = tmp_path_factory.mktemp("completion") / "pdmesh.bash"
    with path.open("w") as out, contextlib.redirect_stdout(out):
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.skipif(BASH is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("pdmesh ge", {"generate"}),
        ("pdmesh co", {"config", "completion"}),
        ("pdmesh config --ex", {"--example"}),
        ("pdmesh decode --max-r", {"--max-running", "--max-requests"}),
        ("pdmesh up --policy r", {"round_robin", "random"}),
        ("pdmesh completion ", {"bash", "zsh", "fish"}),
        ("pdmesh nonsense", set()),
    ],
)
def test_bash_completes(line: str, wanted: set[str], script: Path) -> None:
    """The script is loaded into a real bash, which is asked what may follow."""
    program = f"""
source {script} || exit 9
COMP_WORDS=({line}{' ""' if line.endswith(" ") else ""})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE='{line}' COMP_POINT={len(line)}
complete -p pdmesh >/dev/null
_pdmesh
printf '%s\\n' ${{COMPREPLY[@]+"${{COMPREPLY[@]}}"}}
"""
    assert BASH is not None
    run = subprocess.run(
        [BASH, "--norc", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert {word.strip() for word in run.stdout.split()} == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "sign"), [("zsh", "#compdef pdmesh"), ("fish", "complete -c pdmesh")]
)
def test_other_shells_have_a_script(
    shell: str, sign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command is in it; where the shell is here, it finds no mistake."""
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert sign in text
    for command in ("generate", "chat", "top", "doctor", "prefill"):
        assert command in text
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=text, text=True, timeout=60, check=True)


def test_install_writes_the_script_and_tells_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the user's own folders; once, however often it is asked."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        assert main(["completion", "bash", "--install"]) == 0
    path = tmp_path / ".local/share/bash-completion/completions/pdmesh"
    assert str(path) in capsys.readouterr().out
    assert "_pdmesh()" in path.read_text()
    assert (tmp_path / ".bashrc").read_text().count(f'. "{path}"') == 1
