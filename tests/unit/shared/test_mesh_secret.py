"""The mesh's secret: where it is from, when it must be there, and what is derived from it."""

from __future__ import annotations

import hmac
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from services.cli import main
from services.local import plan_services
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from shared.errors import InvalidRequest
from shared.mesh_secret import SECRET_VARIABLE, MeshSecret, mesh_secret, new_secret

TEXT = "0123456789abcdef" * 4


def test_what_is_derived_is_hkdf() -> None:
    """RFC 5869, sections 2.2 and 2.3: extract with the context as salt, expand to one block."""
    extracted = hmac.digest(b"salt", bytes.fromhex(TEXT), "sha256")
    expanded = hmac.digest(extracted, b"pdmesh/x" + bytes([1]), "sha256")
    assert MeshSecret(TEXT).derived("x", b"salt") == expanded


def test_purposes_and_contexts_give_keys_of_their_own() -> None:
    """None of them is the secret, and none tells another."""
    secret = MeshSecret(TEXT)
    keys = [secret.derived(purpose, context) for purpose in "ab" for context in (b"", b"c")]
    assert len({*keys, bytes.fromhex(TEXT)}) == 5
    assert MeshSecret(new_secret(random.Random(1).randbytes)).derived("a") != keys[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GatewayConfig(), ""),
        (GatewayConfig(host="0.0.0.0"), ""),  # the clients' door is another one
        (GatewayConfig(mesh_host="::1"), ""),
        (GatewayConfig(mesh_host="0.0.0.0"), "--mesh-host 0.0.0.0"),
        (GatewayConfig(mesh_host="::"), "--mesh-host ::"),
        (GatewayConfig(mesh_host="gw.example"), "--mesh-host gw.example"),
        (GatewayConfig(api_keys=Path("keys")), "API keys"),
        (PrefillConfig(gateway="localhost:8200,127.0.0.2"), ""),
        (PrefillConfig(host="10.0.0.7"), "--host 10.0.0.7"),
        (DecodeConfig(gateway="localhost,gateway:8200"), "the gateway gateway is another machine"),
    ],
)
def test_a_secret_is_needed_where_others_can_come(
    config: GatewayConfig | PrefillConfig | DecodeConfig, words: str, tmp_path: Path
) -> None:
    """On this machine alone and without API keys it may be missing; elsewhere the refusal says why
    and how to make one."""
    if not words:
        assert mesh_secret(config, {}) is None
    else:
        with pytest.raises(InvalidRequest) as refusal:
            mesh_secret(config, {SECRET_VARIABLE: " "})
        assert words in refusal.value.message
        assert "`pdmesh secret`" in refusal.value.message
    assert mesh_secret(config, {SECRET_VARIABLE: TEXT}) is not None


def with_file(path: Path) -> GatewayConfig:
    return GatewayConfig(mesh_secret_file=path)


def test_file_and_variable_say_the_same(tmp_path: Path) -> None:
    """Spaces round it do not count, nor a byte order mark; both at once are one too many."""
    path = tmp_path / "secret"
    path.write_text(f"{TEXT}\n", encoding="utf-8-sig")
    of_file = mesh_secret(with_file(path), {})
    of_variable = mesh_secret(GatewayConfig(), {SECRET_VARIABLE: f" {TEXT}\n"})
    assert of_file is not None
    assert of_variable is not None
    assert of_file.derived("x") == of_variable.derived("x")
    with pytest.raises(InvalidRequest, match="both set"):
        mesh_secret(with_file(path), {SECRET_VARIABLE: TEXT})


@pytest.mark.parametrize(
    "text", ["", "swordfish", TEXT[:-1], f"{TEXT}0", f"{TEXT[:-1]}g", "\xff" * 64]
)
def test_what_is_no_secret_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    """A word that somebody thought of can be guessed; what it was does not get into a log."""
    path = tmp_path / "secret"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InvalidRequest) as refusal:
        mesh_secret(with_file(path), {})
    assert str(path) in refusal.value.message
    assert "`pdmesh secret`" in refusal.value.message
    assert not text or text not in refusal.value.message
    with pytest.raises(InvalidRequest, match="no such file"):
        mesh_secret(with_file(tmp_path / "none"), {})


def test_the_command_makes_a_file_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A secret that is there is never replaced."""
    path = tmp_path / "secret"
    assert main(["secret", "--out", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert mesh_secret(with_file(path), {}) is not None
    assert main(["secret", "--out", str(path)]) == 2
    assert "--keep" in capsys.readouterr().err
    assert main(["secret", "--out", str(path), "--keep"]) == 0
    assert path.read_text() == text
    assert [*tmp_path.iterdir()] == [path]
    assert main(["secret"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed != text.strip()
    assert MeshSecret(printed)


def test_a_local_mesh_gets_a_secret_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment of every process of it, and of no other's; what the user has set stays."""

    def secrets_of(gateway: GatewayConfig) -> set[str | None]:
        services = plan_services(gateway, [PrefillConfig()], [DecodeConfig()] * 2)
        return {service.env.get(SECRET_VARIABLE) for service in services}

    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    (one,), (other,) = secrets_of(GatewayConfig()), secrets_of(GatewayConfig(api_keys=tmp_path))
    assert one != other
    assert MeshSecret(one or "")
    assert secrets_of(with_file(tmp_path)) == {None}
    monkeypatch.setenv(SECRET_VARIABLE, TEXT)
    assert secrets_of(GatewayConfig()) == {None}  # inherited


def test_a_secret_shows_in_no_repr() -> None:
    """Not even in a traceback's locals."""
    shown: list[Any] = [MeshSecret(TEXT), [MeshSecret(TEXT)]]
    assert TEXT not in f"{shown!r}{shown[0]}"
