"""Variables and the TOML file of all services: units, precedence, errors that say what to mend, and
the example that ``pdmesh config`` prints."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from services.cli import main
from services.cli.app import app
from services.cli.config import example_file, toml_value
from services.cli.up import plan_mesh, up_config
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig, ServiceConfig
from shared.errors import InvalidRequest
from shared.quantity import read_quantity, unit_of, write_quantity
from shared.settings import (
    MESH,
    ROLES,
    environment_of,
    read_config,
    read_config_file,
    section_fields,
)
from shared.tenants import Tenant, read_tenants


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests decide alone what PDMESH_* says."""
    for name in os.environ:
        if name.startswith("PDMESH_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where each test writes its file."""
    return tmp_path / "mesh.toml"


def parsed(*arguments: str) -> Any:
    """The configuration that a command would run with."""
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return bound.arguments["config"]


# --- quantities ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("30 s", "s", 30),
        ("250 ms", "s", 0.25),
        ("250ms", "s", 0.25),
        ("1.5 min", "s", 90),
        ("2 h", "s", 7200),
        ("100 us", "s", 0.0001),
        ("4 GiB", "GiB", 4),
        ("512 MiB", "GiB", 0.5),
        ("512 KiB", "KiB", 512),
        ("2 MiB", "KiB", 2048),
        ("1 GB", "B", 10**9),
        ("1 TB", "B", 10**12),
        ("1e3 B", "B", 1000),
    ],
)
def test_a_quantity_is_read_in_the_unit_of_its_setting(text: str, unit: str, value: float) -> None:
    """Exactly: no rounding on the way."""
    assert float(read_quantity(text, unit)) == value


@pytest.mark.parametrize(
    "text",
    ["30", "30 sec", "s", "-1 s", "1 GiB", "1,5 s", "", "1 S", "1e999 s", "9" * 5000 + " s"],
)
def test_a_text_that_is_no_duration_is_refused_with_the_units(text: str) -> None:
    """The reader learns what is possible."""
    with pytest.raises(ValueError, match="us, ms, s, min, h"):
        read_quantity(text, "s")


@pytest.mark.parametrize("value", [0, 30.0, 0.25, 3.5, 1e-6, 123456789.0])
def test_a_quantity_that_was_written_is_read_back(value: float) -> None:
    """Whatever its size."""
    assert float(read_quantity(write_quantity(value, "s"), "s")) == value


def test_the_unit_is_the_end_of_the_name() -> None:
    """And names without one are plain numbers."""
    assert [unit_of(n) for n in ("drain_s", "kv_gib", "group_kib", "staging_mib")] == [
        "s", "GiB", "KiB", "MiB",
    ]  # fmt: skip
    assert [unit_of(n) for n in ("num_blocks", "max_running", "s")] == ["", "", "s"]


# --- variables ------------------------------------------------------------


def test_variables_set_fields_of_every_type_and_the_rest_keeps_its_default() -> None:
    """Text, numbers, booleans and paths; other variables are other programs' business."""
    config = read_config(
        DecodeConfig,
        {
            "PDMESH_GATEWAY": "mesh:1, other:2",
            "PDMESH_MAX_RUNNING": "8",
            "PDMESH_KV_GIB": "0.5",
            "PDMESH_CACHE_PREFIXES": "false",
            "PDMESH_DTYPE": "",
            "PDMESH_HTTP_PORT": "1",
            "HOME": "/",
        },
    )
    assert [str(address) for address in config.gateways] == ["mesh:1", "other:2"]
    assert (config.max_running, config.kv_gib, config.cache_prefixes) == (8, 0.5, False)
    assert config.dtype == DecodeConfig().dtype


def test_an_optional_path_is_read() -> None:
    """The gateway's key file."""
    config = read_config(GatewayConfig, {"PDMESH_API_KEYS": "/etc/keys"})
    assert config.api_keys == Path("/etc/keys")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PDMESH_MAX_JOBS", "many", "PDMESH_MAX_JOBS must be a whole number"),
        ("PDMESH_KV_GIB", "x", "PDMESH_KV_GIB must be a number"),
        ("PDMESH_CACHE_PREFIXES", "perhaps", "PDMESH_CACHE_PREFIXES must be true or false"),
        ("PDMESH_BLOCK_SIZE", "5000", "--block-size"),
    ],
)
def test_a_wrong_value_is_named(variable: str, value: str, words: str) -> None:
    """The operator reads which variable or flag to mend."""
    with pytest.raises(InvalidRequest, match=words):
        read_config(PrefillConfig, {variable: value})


# --- precedence ------------------------------------------------------------------------------


def test_flag_variable_file_default_in_this_order(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role's own section wins over [mesh]; the other roles' sections are not looked at."""
    file.write_text(
        """
        [mesh]
        drain_s = "500 ms"
        kv_gib = "512 MiB"
        block_size = 32
        token_budget = 100
        cache_prefixes = false
        [decode]
        token_budget = 7
        max_running = 3
        staging_mib = "1 GiB"
        [prefill]
        token_budget = 9
        max_running = 4
        """
    )
    monkeypatch.setenv("PDMESH_BLOCK_SIZE", "64")
    monkeypatch.setenv("PDMESH_MAX_RUNNING", "5")
    config = parsed("decode", "--config", str(file), "--max-running", "6")
    assert isinstance(config, DecodeConfig)
    assert (config.max_running, config.block_size, config.token_budget) == (6, 64, 7)
    assert (config.drain_s, config.kv_gib, config.cache_prefixes) == (0.5, 0.5, False)
    assert (config.staging_mib, config.max_requests) == (1024, DecodeConfig().max_requests)
    monkeypatch.setenv("PDMESH_CONFIG", str(file))
    assert parsed("decode", "--max-running", "6") == config
    variables = {**os.environ, "PDMESH_MAX_RUNNING": "6"}
    assert dataclasses.asdict(read_config(DecodeConfig, variables)) == (dataclasses.asdict(config))


def test_a_child_reads_no_file(file: Path) -> None:
    """What its parent has read is in its variables, also where the default stands in the file."""
    file.write_text('[gateway]\nmodel_name = "other"\napi_keys = "/keys"\n')
    variables = {"PDMESH_CONFIG": str(file), **environment_of(GatewayConfig())}
    assert read_config(GatewayConfig, variables) == GatewayConfig()


def test_a_file_may_begin_with_the_mark_of_windows_editors(file: Path) -> None:
    """As a trace may."""
    file.write_bytes(b"\xef\xbb\xbf[mesh]\ndrain_s = 7\n")
    assert read_config(GatewayConfig, {"PDMESH_CONFIG": str(file)}).drain_s == 7


def test_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    """Who reads it second would find the defaults, and `--config <(…)` would change nothing."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="it is a pipe, which is empty when it is read again"):
        read_config(GatewayConfig, {"PDMESH_CONFIG": str(pipe)})


@pytest.mark.parametrize("name", ["api_keys", "tls_cert", "mesh_tls_ca", "mesh_secret_file"])
def test_a_pipe_is_none_of_the_files_that_are_read_again(name: str, tmp_path: Path) -> None:
    """Who reads it second would find nothing, or wait for ever."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="a pipe is empty when it is read again") as caught:
        read_config(GatewayConfig, {f"PDMESH_{name.upper()}": str(pipe)})
    assert caught.value.param == name


def test_tenants_may_stand_in_the_file_and_reach_a_child_by_its_path(file: Path) -> None:
    """The gateway reads them where they stand; workers pass them over; a file of its own wins."""
    file.write_text("[gateway]\noverload = 'early'\n[tenants.a]\nweight = 2\nttft_ms = 500\n")
    variables = {"PDMESH_CONFIG": str(file)}
    config = read_config(GatewayConfig, variables)
    assert (config.overload, config.tenants) == ("early", file)
    assert read_config(GatewayConfig, environment_of(config)).tenants == file
    assert read_tenants(file) == {"a": Tenant(weight=2.0, ttft_ms=500.0)}
    assert read_config(PrefillConfig, variables) == PrefillConfig()
    own = read_config(GatewayConfig, {**variables, "PDMESH_TENANTS": "own.toml"})
    assert own.tenants == Path("own.toml")
    file.write_text("[gateway]\ntenants = 'named.toml'\n[tenants.a]\nweight = 2\n")
    assert read_config(GatewayConfig, variables).tenants == Path("named.toml")
    file.write_text("[tenants.a]\nweight = -1\n")
    with pytest.raises(InvalidRequest, match=r"mesh.toml: \[tenants.a\] weight expected"):
        read_config(DecodeConfig, variables)
    file.write_text("tenants = 3\n")
    with pytest.raises(InvalidRequest, match="must be a section"):
        read_config(GatewayConfig, variables)


def test_a_local_mesh_takes_each_section_for_its_role(file: Path) -> None:
    """A flag of ``up`` is for all roles and wins; ports follow the file, then the flag."""
    file.write_text(
        """
        [mesh]
        engine = "fake"
        num_blocks = 8
        token_budget = 64
        [gateway]
        http_port = 9100
        max_waiting = 5
        [prefill]
        token_budget = 32
        """
    )
    environment = {"PDMESH_CONFIG": str(file)}
    plan = plan_mesh(up_config(num_blocks=16), environment)
    assert (plan.gateway.http_port, plan.gateway.grpc_port, plan.gateway.max_waiting) == (
        9100, 9101, 5,
    )  # fmt: skip
    _, prefill, decode = (service.env for service in plan.services)
    assert (prefill["PDMESH_TOKEN_BUDGET"], decode["PDMESH_TOKEN_BUDGET"]) == ("32", "64")
    assert prefill["PDMESH_NUM_BLOCKS"] == decode["PDMESH_NUM_BLOCKS"] == "16"
    assert prefill["PDMESH_ENGINE"] == "fake"
    assert plan_mesh(up_config(port=9200), environment).gateway.grpc_port == 9201
    file.write_text(file.read_text().replace("http_port", "grpc_port = 9300\nhttp_port"))
    assert plan_mesh(up_config(port=9200), environment).gateway.grpc_port == 9300


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gateway]\nmax_runing = 3", "[gateway] max_runing: there is no such setting; did you "
         "mean max_running?"),
        ("[mesh]\ndrain = 3", "[mesh] drain: there is no such setting; did you mean drain_s?"),
        ("[mesh]\nblock-size = 3", "did you mean block_size?"),
        ("[mesh]\nqqqq = 3", "`pdmesh config --example` lists all"),
        ("[mesh]\nhttp_port = 3", "[mesh] http_port: belongs in [gateway]"),
        ("[mesh]\nmax_running = 3", "belongs in [gateway] or [prefill] or [decode]"),
        ("[gateway]\ntoken_budget = 3", "[gateway] token_budget: belongs in [mesh]"),
        ("[gatway]\nhttp_port = 3", "[gatway] is no section; did you mean [gateway]?"),
        ("[qqqq]\n", "there are [mesh] or [gateway] or [prefill] or [decode]"),
        ("block_size = 3", "block_size stands outside a section: it belongs in [mesh]"),
        ("gateway = 3", "[gateway] must be a section"),
        ('[mesh]\ndrain_s = "3 sec"', "[mesh] drain_s must be a number with a unit (us, ms, s, "
         "min, h), not '3 sec'"),
        ('[mesh]\nkv_gib = "3 s"', "[mesh] kv_gib must be a number with a unit (B, kB,"),
        ('[prefill]\ngroup_kib = "1000 B"', "[prefill] group_kib must be a whole number of KiB"),
        ('[mesh]\nblock_size = "16"', "[mesh] block_size must be a number, not '16'"),
        ("[mesh]\nblock_size = 1.5", "[mesh] block_size must be a whole number"),
        ("[mesh]\nblock_size = true", "[mesh] block_size must be a number"),
        ("[mesh]\nblock_size = inf", "[mesh] block_size cannot convert float infinity"),
        ('[mesh]\ndrain_s = "1e400 h"', "[mesh] drain_s must be a number with a unit"),
        ("[gateway]\nrequest_timeout_s = inf", "[gateway] request_timeout_s must be 0..1000000000"),
        ("[mesh]\ncache_prefixes = 1", "[mesh] cache_prefixes must be true or false, not 1"),
        ("[mesh]\nmodel = 3", "[mesh] model must be text in quotes, not 3"),
        ("[mesh]\nblock_size = 5000", "[mesh] block_size must be 0..4096"),
        ('[decode]\ndtype = "int3"', "[decode] dtype must be auto, float32"),
        ('[gateway]\nrequest_timeout_s = "-1 s"', "[gateway] request_timeout_s must be a number"),
        ("[mesh]\nblock_size = ", "is not valid TOML"),
        ("[mesh]\nblock_size = 1\nblock_size = 2", "is not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_file_section_and_key(text: str, words: str, file: Path) -> None:
    """And with what was meant, or may stand there."""
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_config_file(file)
    assert words in caught.value.message
    assert str(file) in caught.value.message


@pytest.mark.parametrize("text", ["[gateway]\nmax_runing = 3", "[mesh]\nblock_size = "])
def test_a_mistake_is_one_line_at_every_door(
    text: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever service reads the file, one that parses or does not."""
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_config_file(file)
    for command in (["gateway"], ["decode"], ["up"], ["config"]):
        assert main([*command, "--config", str(file)]) == 2
        err = capsys.readouterr().err
        assert err == f"pdmesh: {' '.join(caught.value.message.split())}\n"
    with pytest.raises(InvalidRequest, match=re.escape(str(file))):
        read_config(PrefillConfig, {"PDMESH_CONFIG": str(file)})


@pytest.mark.parametrize("content", [b"\xff\xfe", b"#" * (1 << 21)])
def test_what_is_no_text_or_too_long_is_refused(content: bytes, file: Path) -> None:
    """A wrong path need not be a configuration at all."""
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"not valid TOML|larger than"):
        read_config_file(file)


# --- pdmesh config ---------------------------------------------------------------------------


def test_the_example_has_every_setting_and_parses_back_to_the_defaults(file: Path) -> None:
    """It is made from the records, and each setting stands in one section of each role."""
    example = example_file()
    assert tomllib.loads(example) == {s: {} for s in (MESH, *ROLES)}  # all commented out
    settings = re.sub(r"^#(\w+ = )", r"\1", example, flags=re.MULTILINE)
    file.write_text(settings)
    document = tomllib.loads(settings)
    for role, kind in ROLES.items():
        assert read_config(kind, {"PDMESH_CONFIG": str(file)}) == kind()
        for name in (field.name for field in dataclasses.fields(kind)):
            assert (name in document[MESH]) != (name in document[role]), name
    helped = re.findall(r"# \S.*\n#(\w+) = ", example)
    assert sorted(helped) == sorted(n for s in (MESH, *ROLES) for n in section_fields(s))


def test_what_is_printed_tells_each_origin_and_can_be_read_back(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """env, file with its section, default."""
    file.write_text('[mesh]\ndrain_s = "2 s"\n[decode]\nstaging_mib = 64\n')
    monkeypatch.setenv("PDMESH_MAX_RUNNING", "9")
    assert main(["config", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    of_decode = out[out.index("[decode]") :].splitlines()
    lines = {line.split(" = ")[0]: " ".join(line.split()) for line in of_decode}
    assert lines["max_running"] == "max_running = 9 # env: PDMESH_MAX_RUNNING"
    assert lines["drain_s"] == f'drain_s = "2 s" # file: {file} [mesh]'
    assert lines["staging_mib"] == f'staging_mib = "64 MiB" # file: {file} [decode]'
    assert lines["block_size"] == "block_size = 0 # default"
    config = parsed("decode", "--config", str(file))
    monkeypatch.delenv("PDMESH_MAX_RUNNING")
    file.write_text(out)
    read_back = read_config(DecodeConfig, {"PDMESH_CONFIG": str(file)})
    assert dataclasses.asdict(read_back) == dataclasses.asdict(config)


def test_without_a_role_all_three_are_printed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also as JSON, with values in the units of the names."""
    file.write_text('[mesh]\ndrain_s = "2 s"\n[gateway]\napi_keys = "/etc/keys"\n')
    monkeypatch.setenv("PDMESH_CONFIG", str(file))
    assert main(["config"]) == 0
    assert list(tomllib.loads(capsys.readouterr().out)) == list(ROLES)
    assert main(["config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    drain = {"value": 2.0, "origin": "file", "where": f"{file} [mesh]"}
    assert all(found[role]["drain_s"] == drain for role in ROLES)
    assert found["gateway"]["api_keys"]["value"] == "/etc/keys"
    assert found["gateway"]["policy"] == {
        "value": "conductor", "origin": "default", "where": "",
    }  # fmt: skip


def test_a_wrong_value_is_told_instead_of_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at a start."""
    monkeypatch.setenv("PDMESH_BLOCK_SIZE", "5000")
    assert main(["config"]) == 2
    assert "--block-size must be 0..4096" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ROLES.values())
def test_every_kind_of_value_is_written_as_it_is_read(
    kind: type[ServiceConfig], file: Path
) -> None:
    """Text with quotes and backslashes, paths, numbers with and without unit, booleans."""
    odd: dict[type, Any] = {
        str: 'a "b" \\ ü', int: 7, float: 0.125, bool: False, Path: Path("/a b/c")
    }  # fmt: skip
    lines = [
        f"{field.name} = {toml_value(field.name, odd[type_])}"
        for field in dataclasses.fields(kind)
        for type_ in [section_fields_of(kind)[field.name]]
    ]
    document = tomllib.loads("\n".join(lines))
    for name, type_ in section_fields_of(kind).items():
        value = document[name]
        if unit_of(name):
            value = type_(read_quantity(value, unit_of(name)))
        assert type_(value) == odd[type_]


def section_fields_of(kind: type[ServiceConfig]) -> dict[str, type]:
    """All settings of a role with their types."""
    role = next(role for role, known in ROLES.items() if known is kind)
    own = section_fields(role)
    names = {field.name for field in dataclasses.fields(kind)}
    return own | {name: type_ for name, type_ in section_fields(MESH).items() if name in names}


def test_a_secret_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``pdmesh config`` says that there is a key and where it is from, as text and as JSON."""
    monkeypatch.setenv("PDMESH_API_KEY", "pdm-secret")
    for options in ([], ["--json"]):
        assert main(["config", *options]) == 0
        out = capsys.readouterr().out
        assert "pdm-secret" not in out
        assert "(hidden)" in out
        assert "PDMESH_API_KEY" in out


def test_a_cache_is_as_large_as_people_write_it() -> None:
    """Caches take units; without one it counts bytes, and without prefixes it is refused."""
    read = read_config(PrefillConfig, {"PDMESH_DRAM_CACHE": "1.5GB"})
    assert read.dram_cache == 1_500_000_000
    for wrong in ("1.5GX", "-1", "2 s"):
        with pytest.raises(InvalidRequest, match=r"(?i)dram"):
            read_config(PrefillConfig, {"PDMESH_DRAM_CACHE": wrong})
    with pytest.raises(InvalidRequest, match="cache-prefixes"):
        read_config(PrefillConfig, {"PDMESH_DRAM_CACHE": "1GB", "PDMESH_CACHE_PREFIXES": "false"})
    disk = {"PDMESH_SSD_CACHE": "/kv", "PDMESH_SSD_CACHE_SIZE": "40 GB"}
    read = read_config(PrefillConfig, disk)
    assert (read.ssd_cache, read.ssd_cache_size) == (Path("/kv"), 40 * 10**9)
    with pytest.raises(InvalidRequest, match="cache-prefixes"):
        read_config(PrefillConfig, disk | {"PDMESH_CACHE_PREFIXES": "false"})
