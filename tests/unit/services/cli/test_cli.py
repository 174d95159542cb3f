"""The command line without processes: flags, variables, errors, and what each command makes of
them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic as _pydantic  # noqa: F401  cyclopts checks more where it is imported
import pytest
from rich.console import Console

from services.cli import main
from services.cli.app import app
from services.cli.machine import Share, find_gpus, shape_for, shares
from services.cli.status import LineView, LiveView
from services.cli.up import UpConfig, plan_mesh, up_config
from services.cli.words import print_lines
from services.gateway.front.auth import KeyRing, hash_key
from services.local import LocalMesh, Phase, Service, plan_services
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig, ServiceConfig
from shared.settings import environment_of, read_config
from tests.support.certificates import Authority
from tests.support.house import ROOT
from tests.support.stub_gateway import StubGateway

SERVICES = [("gateway", GatewayConfig), ("prefill", PrefillConfig), ("decode", DecodeConfig)]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests decide alone what PDMESH_* says."""
    for name in os.environ:
        if name.startswith("PDMESH_"):
            monkeypatch.delenv(name)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def parsed(*arguments: str) -> Any:
    """The configuration that a command would run with."""
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return bound.arguments["config"]


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The text of ``--help``, without frames and line breaks."""
    assert main([*command, "--help"]) == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


# --- flags and variables ---------------------------------------------------------------------


@pytest.mark.parametrize(("command", "kind"), SERVICES)
def test_every_setting_is_a_flag_with_its_help_and_its_variable(
    command: str, kind: type[ServiceConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """A field of shared/config.py needs nothing else to be settable."""
    text = help_of(capsys, command)
    for field in dataclasses.fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        assert f"{flag} " in text
        assert f"[env var: PDMESH_{field.name.upper()}]" in text
    assert "Seconds to finish what is in hand after SIGTERM or Ctrl-C." in text


def test_a_flag_wins_over_its_variable_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flag, then PDMESH_*, then default; a bool has a --no- flag."""
    monkeypatch.setenv("PDMESH_MAX_RUNNING", "7")
    monkeypatch.setenv("PDMESH_KV_GIB", "0.5")
    monkeypatch.setenv("PDMESH_MODEL_NAME", "for the gateway, not for --model")
    config = parsed("decode", "--max-running", "9", "--no-cache-prefixes")
    assert isinstance(config, DecodeConfig)
    assert (config.max_running, config.kv_gib, config.cache_prefixes) == (9, 0.5, False)
    assert config.model == DecodeConfig().model
    assert config.block_size == DecodeConfig().block_size


def test_an_empty_variable_is_not_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for the services themselves: compose files leave variables empty."""
    monkeypatch.setenv("PDMESH_MAX_RUNNING", "")
    assert main(["version"]) == 0
    assert parsed("gateway").max_running == GatewayConfig().max_running


def test_a_flag_with_an_empty_path_names_no_file() -> None:
    """As an empty variable: it is not the current folder, which "" is to ``Path``."""
    assert parsed("decode", "--ssd-cache", "").ssd_cache is None
    assert parsed("up", "--ssd-cache", "").ssd_cache is None
    assert parsed("decode", "--ssd-cache", "/kv").ssd_cache == Path("/kv")


@pytest.mark.parametrize(
    "config",
    [
        GatewayConfig(api_keys=Path("/keys"), max_wait_s=0.25, model_name="m"),
        PrefillConfig(cache_prefixes=False, group_kib=64),
        DecodeConfig(gateway="a:1,b:2", kv_gib=1.5),
    ],
)
def test_a_child_reads_back_what_its_parent_wrote(config: ServiceConfig) -> None:
    """environment_of and read_config are inverse."""
    assert read_config(type(config), environment_of(config)) == config


# --- errors ----------------------------------------------------------------------------------

FREE_PORTS = "gateway --http-port 0 --grpc-port 0 --mesh-port 0"


@pytest.mark.parametrize(
    ("command", "words", "code"),
    [
        ("frobnicate", "Unknown command", 2),
        ("up --frobnicate", "Unknown option: --frobnicate", 2),
        ("up --tenants t.toml", "give it by PDMESH_TENANTS, or in --config", 2),
        ("up --mesh-port=8300", "give it by PDMESH_MESH_PORT, or in --config", 2),
        ("generate -hello", "begins with a dash goes after all options and --", 2),
        ("gateway --max-runing 3", "Did you mean --max-running?", 2),
        ("up --prefill two", "--prefill", 2),
        ("up --prefill 0", "--prefill must be 1..64", 2),
        ("up --port 70000", "--port must be a port", 2),
        ("up --engine steam", "torch, vllm, fake or package.module:load", 2),
        ("up --engine vllm --vllm-args block_size=16", "block_size is set by --block-size", 2),
        ("up --device quantum", "--device must be auto, cpu, cuda or cuda:N", 2),
        ("up extra", "Unexpected argument: extra. See `pdmesh up --help`", 2),
        ("gateway --cors-origins example.org", "--cors-origins must be origins", 2),
        ("prefill --block-size 5000", "--block-size must be 0..4096", 2),
        ("decode --log-level loud", "--log-level must be debug, info, warning or error", 2),
        ("prefill --gateway 10.0.0.5:port", "--gateway must be host:port", 2),
        ("generate hi --url ftp://x", "--url must be http://", 2),
        ("chat --url http:/x", "--url must be http://", 2),
        ("top --interval 0", "--interval must be 0.1..3600 seconds", 2),
        ("top --intervall 3", "Did you mean --interval?", 2),
        ("doctor --gateway 10.0.0.5:8001", "--gateway must be http://", 2),
        ("completion tcsh", '"bash", "zsh", "fish"', 2),
        ("gateway --config /no/such/file", "cannot read the configuration /no/such/file", 2),
        ("up --config /no/such/file", "cannot read the configuration /no/such/file", 2),
        ("demo --config /no/such/file", "cannot read the configuration /no/such/file", 2),
        ("config --config /no/such/file", "cannot read the configuration /no/such/file", 2),
        ("models --url http://127.0.0.1:1", "pdmesh up", 1),
        ("top --once --url http://127.0.0.1:1", "pdmesh up", 1),
        ("chat --url http://127.0.0.1:1", "pdmesh up", 1),
        ("hash-key not/a/name", "a key's name is", 2),
        ("hash-key a --requests-per-minute -1", "its limits at most 9 digits", 2),
        ("up --port 0 --model /no/such/folder", "--model wants a folder", 1),
        ("up --port 0 --host 203.0.113.1", "with --host", 1),
        ("up --port 0 --api-keys /no/such/file", "cannot read the API keys", 2),
        ("gateway --tls-cert a.pem", "--tls-cert goes together with --tls-key", 2),
        ("gateway --tls-client-ca a.pem", "--tls-client-ca needs --tls-cert", 2),
        ("gateway --mesh-tls-cert a.pem", "--mesh-tls-key is missing: --mesh-tls-cert, ", 2),
        ("gateway --mesh-tls-cert /no/a --mesh-tls-key /no/b --mesh-tls-ca /no/c", "read /no/a", 2),
        ("decode --mesh-tls-cert /no/a --mesh-tls-key /no/b --mesh-tls-ca /no/c", "read /no/a", 2),
        ("up --port 0 --tls-cert /no/a --tls-key /no/b", "--tls-cert: cannot read /no/a", 2),
        ("gateway --key-requests-per-minute 3", "limits API keys: give --api-keys", 2),
        ("gateway --metrics-address nine", "--metrics-address must be host:port", 2),
        ("models --url https://127.0.0.1:1 --tls-ca /no/ca", "--tls-ca: cannot read /no/ca", 2),
        ("generate hi --url http://127.0.0.1:1", "pdmesh up", 1),
        ("bench --rates 1,x", "must be numbers like 1,2,4", 2),
        ("bench --rate 1 --rates 1,2", "give --rates alone", 2),
        ("bench --rate 0", "above 0", 2),
        ("bench --rate inf", "needs --requests", 2),
        ("bench --slo-ttft 5parsecs", "must be a number with a unit", 2),
        ("bench --trace /nothing/here", "no such file", 2),
        ("bench ftp://x", "must be http://host:port", 2),
        ("bench grpc://nobody", "must be http://host:port", 2),
        ("bench http://127.0.0.1:9", "nothing answers", 1),
        ("bench http://[::1", "must be http://host:port", 2),
        ("doctor --gateway http://h:port", "--gateway must be http://host:port", 2),
        ("bench --duration 1e999999999s", "must be a number with a unit", 2),
        ("up --colocated 1 --prefill 2", "--prefill and --colocated are two answers", 2),
        ("up --workers 4 --decode 2", "--decode and --workers are two answers", 2),
        ("profile --measure 9", "--measure is how long --output may take", 2),
        ("profile --from http://h:1 -o x --measure 3", "--from measures nothing", 2),
        ("profile -o x --force", "--output measures in any case", 2),
        ("explain chatcmpl-1 --policy a.b:C", "--policy is of --replay alone", 2),
        ("explain chatcmpl-1 --replay --json", "give --replay or --json", 2),
        ("secret --keep", "give --out, too", 2),
        ("up --host=", "--host must be an IP address or a host name", 2),
        ("gateway --mesh-host [::1", "--mesh-host must be an IP address or a host name", 2),
        ("up --port 0 --host no.such.invalid", "an address of this machine with --host", 1),
        (f"{FREE_PORTS} --mesh-host 203.0.113.1", "with --mesh-host", 1),
        (f"{FREE_PORTS} --metrics-address no.such.invalid:1", "with --metrics-address", 1),
        ("up --port 0 --model ~nobody-of-that-name/model", "there is no model folder ~nobody", 1),
        ("secret --out /no/such/folder/secret", "cannot write /no/such/folder/secret", 1),
        ("explain \udcfc", "must be UTF-8", 2),
    ],
)
def test_what_the_user_can_mend_is_one_line_with_a_remedy(
    command: str, words: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, without a traceback; 2 = a flag is wrong, 1 = something else is."""
    assert main(command.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdmesh: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_log_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """In words, without the system's number."""
    assert main(["up", "--port", "0", "--engine", "fake", "--log", "/no/such/log"]) == 1
    assert capsys.readouterr().err == "pdmesh: /no/such/log: no such file or directory\n"


def test_a_prompt_is_asked_for_where_nobody_pipes_one_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that waits for a terminal's input without a word looks dead."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate"]) == 2
    assert "give a PROMPT" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[""], ["  "], ["--raw", ""], []])
def test_an_empty_prompt_is_no_question(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given or piped, it is refused before anybody is asked."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(["generate", *arguments, "--url", "http://127.0.0.1:1"]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_ctrl_c_between_an_answer_and_the_next_line_leaves_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where nothing is typed: with 0, and the shell's next line is its own."""

    def lines(*_: object, **__: object) -> Iterator[str]:
        signal.raise_signal(signal.SIGINT)
        yield "nobody is asked this"

    monkeypatch.setattr("services.cli.chat_input.typed_lines", lines)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with StubGateway({"/v1/models": {"data": []}}) as gateway:
        assert main(["chat", "--url", gateway.url]) == 0
    out, err = capsys.readouterr()
    assert (out[-2:], err) == ("\n\n", "")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_is_piped_in_another_encoding_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every locale: C's would have let it through, as half characters."""
    piped = io.TextIOWrapper(io.BytesIO(b"Gr\xfc\xdfe"), "utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", piped)
    with StubGateway({"/v1/models": {"data": []}}) as gateway:
        assert main([command, "--url", gateway.url]) == 2
    assert "input must be UTF-8" in capsys.readouterr().err


def test_a_terminal_that_cannot_show_a_character_gets_an_escape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer, or a mark of ``pdmesh doctor``, ended in a traceback there."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "latin-1"))
    assert main(["version"]) == 0
    print("\u2713 \xfc", flush=True)
    assert shown.getvalue().endswith(b"\\u2713 \xfc\n")


def test_a_family_that_is_not_served_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that its tokenizer, which it has in another form, is missing."""
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.json").write_text("{}")
    assert main(["up", "--port", "0", "--model", str(tmp_path)]) == 1
    assert "architecture GPT2LMHeadModel is not supported" in capsys.readouterr().err


def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the flag that the user never typed."""
    monkeypatch.setenv("PDMESH_MAX_JOBS", "many")
    assert main(["prefill"]) == 2
    assert "PDMESH_MAX_JOBS" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "up --port {}",
        "up --port 0 --grpc-port {}",
        "gateway --http-port {}",
        "gateway --http-port 0 --grpc-port {}",
        "gateway --http-port 0 --grpc-port 0 --mesh-port {}",
        "decode --port {}",
        "prefill --metrics-port {}",
    ],
)
def test_a_port_in_use_is_one_line_that_names_the_flag(
    command: str, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started."""
    arguments = command.format(taken_port).split()
    assert main(arguments) == 1
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert f"port {taken_port} (address already in use): choose another with {arguments[-2]}" in err


def test_a_hub_name_without_the_extra_tells_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model by hub name needs one more package."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["up", "--port", "0", "--model", "some/model"]) == 1
    assert "pip install 'pdmesh[hub]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prefill --port 0", "up --port 0 --engine fake"])
def test_workers_without_their_packages_tell_how_to_install_them(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gateway's installation has neither torch nor ucxx."""
    found = dict.fromkeys(("torch", "ucxx"))
    monkeypatch.setattr(
        "services.cli.flags.find_spec", lambda name: found.get(name, True), raising=True
    )
    assert main(command.split()) == 1
    assert "pip install 'pdmesh[worker]'" in capsys.readouterr().err


def test_a_gateway_command_loads_neither_torch_nor_ucxx() -> None:
    """Its image has none of them, so the whole command line must do without; and nothing that draws
    on terminals, which structlog and other commands would bring."""
    program = """
import sys
from services.cli import main
ports = ["--http-port", "0", "--grpc-port", "0", "--mesh-port", "0"]
code = main(["gateway", *ports, "--model", "/no/such/folder"])
heavy = {"torch", "numpy", "ucxx", "xxhash", "safetensors", "transformers"} & set(sys.modules)
heavy |= {"pygments", "rich", "prompt_toolkit"} & set(sys.modules)
ours = [name for name in sys.modules if name.startswith(("shared.engine.load", "shared.transport"))]
assert "services.gateway.app" in sys.modules
print(code, sorted(heavy), ours)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout == "1 [] []\n", run.stderr


# --- small commands --------------------------------------------------------------------------


def test_version_is_a_command_and_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Both print the same line."""
    assert main(["version"]) == 0
    first = capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == first
    assert first.strip()


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """``pdmesh`` alone is help, too."""
    assert main([]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in (
        "demo", "up", "doctor", "gateway", "prefill", "decode", "chat", "generate", "models", "top",
        "config", "completion", "hash-key", "version",
    ):  # fmt: skip
        assert f"│ {name} " in text
    assert "Exit codes: 0 done, 1 failed, 2 wrong flag" in text


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in a name, a path or an IPv6 address are no markup, which would be left out."""
    served = {"data": [{"id": "[red]m[/dim]", "max_model_len": 5}]}
    with StubGateway({"/v1/models": served}) as gateway:
        assert main(["models", "--url", gateway.url]) == 0
    print_lines(["http://[fe80::1]:8000"])
    out = capsys.readouterr().out
    assert "[red]m[/dim]" in out
    assert out.endswith("http://[fe80::1]:8000\n")


def test_a_made_key_opens_a_gateway_with_the_printed_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """stdout is the line of the file, stderr the key."""
    assert main(["hash-key", "alice", "--salt", "team"]) == 0
    out, err = capsys.readouterr()
    (tmp_path / "keys").write_text(out)
    key = err.split()[-1]
    assert KeyRing(tmp_path / "keys").check(f"Bearer {key}").name == "alice"


def test_a_key_from_stdin_is_hashed_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is typed on a command line stays in its history."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("a secret\n"))
    assert main(["hash-key", "bob", "--key", "-"]) == 0
    out, err = capsys.readouterr()
    assert (out.strip(), err) == (hash_key("bob", "a secret"), "")


# --- up --------------------------------------------------------------------------------------


def test_a_mesh_is_planned_from_flags_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags reach the services that know them; what has no flag comes from its variable; places
    are ours."""
    monkeypatch.setattr("services.cli.up.num_cores", lambda: 9)
    monkeypatch.setenv("PDMESH_MAX_WAITING", "5")
    monkeypatch.setenv("PDMESH_PORT", "1")  # ours, and no worker's
    monkeypatch.setenv("PDMESH_STAGING_MIB", "32")
    config = up_config(prefill=1, decode=2, port=0, engine="fake", num_blocks=8, cors_origins="*")
    services = plan_mesh(config, os.environ).services
    assert [s.name for s in services] == ["gateway", "prefill-0", "decode-0", "decode-1"]
    assert [s.module for s in services][1:3] == ["services.prefill", "services.decode"]
    gateway = read_config(GatewayConfig, services[0].env)
    assert (gateway.origins, gateway.max_waiting, gateway.http_port) == ({"*"}, 5, 0)
    for service in services[1:]:
        worker = read_config(DecodeConfig, service.env)
        assert (worker.port, worker.num_blocks, worker.staging_mib) == (0, 8, 32)
        assert (worker.engine, worker.threads) == ("fake", 3)


def test_what_up_sets_for_its_services_is_said_in_their_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With their defaults and choices; what is no choice of theirs is none of up's."""
    text = help_of(capsys, "up")
    assert "Tokens a KV block; may differ between prefill and decode." in text
    assert "[choices: lru, lfu, length-aware] [env var: PDMESH_CACHE_POLICY] [default: lru]" in text
    assert main(["up", "--cache-policy", "fifo"]) == 2
    assert "--cache-policy" in capsys.readouterr().err


def test_a_mesh_that_wants_client_certificates_is_asked_elsewhere_whether_it_is_ready(
    tmp_path: Path,
) -> None:
    """``up`` has no client's certificate; the listener for scrapes wants none."""
    authority = Authority(tmp_path)
    files = authority.sign("server", client_ca=authority.path)
    config = up_config(
        port=0,
        engine="fake",
        tls_cert=files.cert,
        tls_key=files.key,
        tls_client_ca=files.client_ca,
        api_key="k",
    )
    plan = plan_mesh(config, {})
    assert plan.gateway.has_keys
    assert plan.gateway.metrics_address == "127.0.0.1:0"
    assert plan.services[0].env["PDMESH_TLS_CLIENT_CA"] == str(authority.path)


def test_all_services_of_a_plan_get_the_tls_between_them(tmp_path: Path) -> None:
    """From the file or the variables that ``up`` was given; it has no flags for it."""
    authority = Authority(tmp_path)
    files = authority.sign("service")
    given = {
        "PDMESH_MESH_TLS_CERT": str(files.cert),
        "PDMESH_MESH_TLS_KEY": str(files.key),
        "PDMESH_MESH_TLS_CA": str(authority.path),
    }
    services = plan_mesh(up_config(port=0, engine="fake"), given).services
    assert len(services) == 3
    assert all(given.items() <= service.env.items() for service in services)


@pytest.mark.parametrize(
    ("config", "ports"),
    [
        (up_config(port=9000, engine="fake"), (9000, 9001)),
        (up_config(port=9000, grpc_port=7000, engine="fake"), (9000, 7000)),
        (up_config(port=0, engine="fake"), (0, 0)),
    ],
)
def test_the_grpc_port_follows_the_http_port(
    config: UpConfig, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--port 9000 means 9000 and 9001, and each is checked under its own flag."""
    checked: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "services.cli.flags.require_free_port",
        lambda _, port, flag, **flags: checked.append((port, flag)),
    )
    env = plan_mesh(config, {}).services[0].env
    others = [(0, "--mesh-port"), (0, "--process-port"), (0, "--metrics-address")]
    assert checked == [(ports[0], "--port"), (ports[1], "--grpc-port"), *others]
    assert (env["PDMESH_HTTP_PORT"], env["PDMESH_GRPC_PORT"]) == tuple(map(str, ports))


def test_the_variable_of_colocated_is_how_many_to_up_and_whether_to_decode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any number is one for up, which sets decode's own; its help names no default of decode's."""
    monkeypatch.setenv("PDMESH_COLOCATED", "2")
    plan = plan_mesh(up_config(colocated=2, port=0, engine="fake"), os.environ)
    assert [it.env["PDMESH_COLOCATED"] for it in plan.services[1:]] == ["true"] * 2
    plan = plan_mesh(up_config(prefill=1, port=0, engine="fake"), os.environ)
    assert [it.env.get("PDMESH_COLOCATED") for it in plan.services[1:]] == [None, "false"]
    assert main(["up", "--help"]) == 0
    assert "PDMESH_COLOCATED] [default: False]" not in " ".join(capsys.readouterr().out.split())


def test_workers_share_cores_and_gpus() -> None:
    """Cores equally, GPUs in turn, all of which stay visible; who shares one is counted."""
    assert shares(["auto"] * 3, num_cores=8, gpus=[]) == [Share(2, "", 3)] * 3
    assert shares(["cpu"] * 4, num_cores=2, gpus=["a"])[0] == Share(1, "", 4)
    two = shares(["auto", "cuda"], num_cores=8, gpus=["a", "b"])
    assert two == [Share(4, "a,b", 1), Share(4, "b,a", 1)]
    three = shares(["cuda"] * 3, num_cores=9, gpus=["a", "b"])
    assert three == [Share(3, "a,b", 2), Share(3, "b,a", 1), Share(3, "a,b", 2)]
    fixed = shares(["cuda:1", "cuda:0", "cuda:1"], num_cores=3, gpus=["a", "b"])
    assert fixed == [Share(1, "", 2), Share(1, "", 1), Share(1, "", 2)]


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver knows two."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-aa'\necho '1, GPU-bb'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_those_that_we_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi tells all; CUDA_VISIBLE_DEVICES chooses and orders, in words that are CUDA's: its
    numbers are not nvidia-smi's, a UUID may be cut, and what is none ends the list."""
    assert find_gpus({}) == ["GPU-aa", "GPU-bb"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1, 0"}) == ["1", "0"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "GPU-b"}) == ["GPU-b"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == ["1"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_gpus({}) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("config", "environment", "visible", "memory_shares"),
    [
        (up_config(), {}, ["GPU-aa,GPU-bb", "GPU-bb,GPU-aa"], [0.9, 0.9]),  # movable ones
        (
            up_config(decode=2, device="cuda"),
            {},
            ["GPU-aa,GPU-bb", "GPU-bb,GPU-aa", "GPU-aa,GPU-bb"],
            [0.45, 0.9, 0.45],
        ),
        (up_config(), {"CUDA_VISIBLE_DEVICES": "1"}, ["1"], [0.9]),
        (
            up_config(prefill=1),
            {"CUDA_VISIBLE_DEVICES": "1"},
            ["1", "1"],
            [0.45, 0.45],
        ),
        (up_config(decode=1, device="cuda:1", gpu_memory_share=0.8), {}, [None] * 2, [0.4, 0.4]),
        (up_config(device="cuda:1"), {}, [None], [0.9]),
    ],
)
def test_each_worker_of_a_mesh_gets_a_gpu(
    config: UpConfig,
    environment: dict[str, str],
    visible: list[str | None],
    memory_shares: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own one comes first in what it sees, and so is its cuda:0; its memory is divided among
    those that share it."""
    monkeypatch.setattr("services.cli.up.require_worker_modules", lambda _: None)
    config = dataclasses.replace(config, port=0)
    _, *workers = plan_mesh(config, environment).services
    assert [one.env.get("CUDA_VISIBLE_DEVICES") for one in workers] == visible
    shares = [read_config(DecodeConfig, one.env).gpu_memory_share for one in workers]
    assert shares == memory_shares


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (up_config(device="cpu"), "all 6 cores"),
        (up_config(device="cuda:0"), "the GPU"),
        (up_config(device="cuda"), "2 GPUs"),
        (up_config(engine="fake"), ""),
        (up_config(decode=1, device="cpu"), ""),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_a_mesh_finds_its_shape_and_says_why(
    asked: UpConfig, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together on one device, workers that move on several; what was asked for needs no reason."""
    monkeypatch.setattr("services.cli.up.require_worker_modules", lambda _: None)
    monkeypatch.setattr("services.cli.up.num_cores", lambda: 6)
    monkeypatch.setattr("services.cli.up.granted_cores", lambda: 6.0)
    plan = plan_mesh(dataclasses.replace(asked, port=0), {})
    assert (why in plan.why_shape) if why else not plan.why_shape
    workers = [read_config(DecodeConfig, one.env) for one in plan.services[1:]]
    if why in ("all 6 cores", "the GPU"):
        assert [(one.colocated, one.threads) for one in workers] == [(True, 6)]
    else:
        assert [(one.colocated, one.threads) for one in workers] == [(False, 3)] * 2
    assert all(one.movable == ("GPUs" in why) for one in workers)


@pytest.mark.parametrize(
    ("cores", "why"),
    [
        (2.5, "with all 2.5 cores:"),
        (1.5, "with the one core:"),
        (0.5, "with 0.5 of a core, which is all it may take:"),
    ],
)
def test_a_part_of_a_core_is_named(cores: float, why: str) -> None:
    """What a control group grants, of which a machine with many cores knows nothing."""
    assert why in shape_for(computes=True, cores=cores, num_gpus=0).why


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (up_config(device="cpu", threads=7), "7 compute threads on 6 cores"),
        (up_config(device="cpu", workers=8), "8 compute threads on 6 cores"),
        (up_config(device="cpu", workers=6), ""),
        (up_config(engine="fake", threads=7), ""),
    ],
)
def test_more_threads_than_cores_are_told(
    asked: UpConfig, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the person is, for the workers' logs may be in a file."""
    monkeypatch.setattr("services.cli.up.require_worker_modules", lambda _: None)
    monkeypatch.setattr("services.cli.up.num_cores", lambda: 6)
    monkeypatch.setattr("services.cli.up.granted_cores", lambda: 6.0)
    crowding = plan_mesh(dataclasses.replace(asked, port=0), {}).crowding
    assert (said in crowding) if said else not crowding


def test_without_a_terminal_every_change_is_one_line() -> None:
    """For logs and pipes: no colours, no cursor."""
    out = io.StringIO()
    view = LineView(Console(file=out, width=40))
    services = plan_services(GatewayConfig(), [PrefillConfig()], [])
    mesh = LocalMesh(services, 2, True, 0, view.show, lambda mesh, wish: None)
    gateway, prefill = services
    enter(mesh, gateway, Phase.STARTING, pid=7)
    enter(mesh, gateway, Phase.STARTING, part="loading the tokenizer")
    enter(mesh, gateway, Phase.READY, facts={"http_port": 80, "grpc_port": 81})
    enter(mesh, prefill, Phase.CRASHED, error="out of memory, and a long line it is")
    enter(mesh, prefill, Phase.READY, pid=9, num_restarts=1, facts={"grpc_port": 5})
    view.show(mesh)
    assert out.getvalue().splitlines() == [
        "gateway    starting  pid 7",
        "gateway    starting  pid 7, loading the tokenizer",
        "gateway    ready     pid 7, HTTP 80, gRPC 81",
        "prefill-0  crashed   out of memory, and a long line it is",
        "prefill-0  ready     pid 9, gRPC 5, 1 restart",
    ]


def test_a_terminals_table_has_whom_the_planner_has_just_added() -> None:
    """Rich's thread may draw between a worker's start and the first word of it."""
    view = LiveView(Console(file=io.StringIO(), width=80), is_transient=False)
    gateway, prefill = plan_services(GatewayConfig(), [PrefillConfig()], [])
    mesh = LocalMesh([gateway], 2, True, 0, view.show, lambda mesh, wish: None)
    view.show(mesh)
    mesh.services.append(prefill)
    assert view._table().row_count == 2


def enter(
    mesh: LocalMesh, service: Service, phase: Phase, *, pid: int | None = None, **facts: Any
) -> None:
    """Put a process into a phase and show it."""
    service.phase = phase
    if pid is not None:
        service.process = SimpleNamespace(pid=pid, returncode=None)  # type: ignore[assignment]
    for name, value in facts.items():
        setattr(service, name, value)
    mesh._on_change(mesh)


@pytest.mark.parametrize(
    ("name", "words"), [("", "is a folder"), ("no/profile.json", "there is no such folder")]
)
def test_a_profile_that_cannot_be_written_is_not_measured(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a minute of steps would be lost."""
    output = tmp_path / name
    assert main(["profile", "--device", "cpu", "-o", str(output)]) == 2
    assert f"--output {output}: {words}" in capsys.readouterr().err
