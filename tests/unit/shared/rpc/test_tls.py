"""Certificates: what is wrong with a file is a sentence, and a renewed one needs no restart."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.errors import InvalidRequest
from shared.rpc.tls import HTTP, ServerTls, TlsFiles, client_context, server_context
from tests.support.certificates import LAST_YEAR, NEXT_YEAR, Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def broken(kind: str, files: TlsFiles, authority: Authority) -> TlsFiles:
    """Return files with one thing wrong."""
    match kind:
        case "no certificate":
            files.cert.unlink()
        case "no key":
            files.key.unlink()
        case "certificate is a key":
            files.cert.write_bytes(files.key.read_bytes())
        case "key is a certificate":
            files.key.write_bytes(files.cert.read_bytes())
        case "key of another":
            files.key.write_bytes(authority.sign("other").key.read_bytes())
        case "damaged":
            files.cert.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        case "encrypted":
            command = ["openssl", "pkey", "-in", files.key, "-aes256", "-passout", "pass:x"]
            done = subprocess.run(command, capture_output=True, check=True)
            files.key.write_bytes(done.stdout)
        case "expired":
            return authority.sign("server", valid=LAST_YEAR)
        case "not yet valid":
            return authority.sign("server", valid=NEXT_YEAR)
        case "no client CA":
            return replace(files, client_ca=Path("/no/such/ca.pem"))
        case "client CA is no PEM":
            authority.path.write_bytes(bytes(range(256)))
        case _:
            files.key.with_suffix(".txt").write_text("hello")
            return replace(files, client_ca=files.key.with_suffix(".txt"))
    return files


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no certificate", "--tls-cert: cannot read .*server.crt .no such file"),
        ("no key", "--tls-key: cannot read .*server.key .no such file"),
        ("certificate is a key", "--tls-cert: .*server.crt holds no certificate: give PEM"),
        ("key is a certificate", "--tls-key: .*server.key holds no private key: give PEM"),
        ("key of another", "--tls-key: .*server.key is not the key of .*server.crt: give"),
        ("damaged", "--tls-cert: .*server.crt or .*server.key is damaged"),
        ("encrypted", "--tls-key: .*server.key is encrypted: give a key without a password"),
        ("expired", "--tls-cert: .*server.crt has expired: renew it"),
        ("not yet valid", "--tls-cert: .*server.crt is not valid yet: .* clock"),
        ("no client CA", "--tls-client-ca: cannot read /no/such/ca.pem"),
        ("client CA is no PEM", "--tls-client-ca: .*ca.pem holds no certificate"),
        ("client CA is text", "--tls-client-ca: .*server.txt holds no certificate"),
    ],
)
def test_what_is_wrong_with_a_file_is_a_sentence(
    authority: Authority, kind: str, words: str
) -> None:
    """The flag, the file, what is wrong and what to do; at a start it is refused, and while a
    listener runs the old certificate stays, with one line of log."""
    files = authority.sign("server", client_ca=authority.path)
    server_context(files)
    wrong = broken(kind, files, authority)
    with pytest.raises(InvalidRequest, match=words):
        server_context(wrong)


def shown_by(front: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """Shake hands in memory and return the server's certificate; raises SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there, server_hostname="127.0.0.1")
    answering = front.wrap_bio(there, back, server_side=True)
    for end in (asking, answering, asking, answering):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    shown = asking.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def test_a_renewed_certificate_is_shown_by_the_next_handshake(authority: Authority) -> None:
    """The context of a listener stays, what it shows follows the files; a broken renewal changes
    nothing and is one line, however many clients come meanwhile."""
    files = authority.sign("server")
    front = ServerTls(files).context(HTTP)
    client = client_context(authority.path)
    first = shown_by(front, client)
    authority.sign("server")
    second = shown_by(front, client)
    assert second != first
    with capture_logs() as lines:
        authority.sign("server", valid=LAST_YEAR)
        assert [shown_by(front, client) for _ in range(3)] == [second] * 3
    (line,) = lines
    assert line["log_level"] == "error"
    assert line["error"].endswith("server.crt has expired: renew it")
    authority.sign("server")
    assert shown_by(front, client) not in (first, second)


def test_a_removed_client_authority_lets_nobody_in_any_more(
    authority: Authority, tmp_path: Path
) -> None:
    """A client's certificate is judged by the file of the moment, and never by a resumed
    session."""
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.path.read_bytes())
    front = ServerTls(authority.sign("server", client_ca=trusted)).context(HTTP)
    mine = authority.sign("client")
    client = client_context(authority.path, mine.cert, mine.key)
    shown_by(front, client)
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        shown_by(front, client_context(authority.path))
    trusted.write_bytes(Authority(tmp_path, "others").path.read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError):
        shown_by(front, client)


def test_a_client_trusts_nobody_but_its_authority(authority: Authority, tmp_path: Path) -> None:
    """A server of another authority, or under another name, is refused by the client."""
    front = server_context(authority.sign("server"))
    with pytest.raises(ssl.SSLCertVerificationError):
        shown_by(front, client_context(Authority(tmp_path, "others").path))
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        shown_by(
            server_context(authority.sign("far", "far.example")), client_context(authority.path)
        )


def test_a_clients_certificate_needs_its_key() -> None:
    """One without the other is a mistake that is told."""
    with pytest.raises(InvalidRequest, match="go together"):
        client_context(cert=Path("a.crt"))
