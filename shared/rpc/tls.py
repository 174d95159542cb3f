"""TLS of listeners and clients: from PEM files to contexts, with a sentence for what is wrong.

    tls = ServerTls(TlsFiles(cert=..., key=..., client_ca=...))
    await loop.create_server(protocol, host, port, ssl=tls.context("h2"))

Renewed files count from the next connection on: each handshake looks whether they have changed and
takes the newest that are right. Files that are wrong change nothing and are one line of log. So it
is for who dials between services (``MeshTls``, used by ``mesh_tls.py``).
TLS 1.2 and newer; 1.3, without resumption, where clients show certificates, so that each connection
is judged by the authorities of that moment.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from shared.config import ServiceConfig
from shared.errors import InvalidRequest
from shared.watched_files import WatchedFiles

HANDSHAKE_WITHIN_S = 10.0
"""A client that takes longer is dropped."""

GRPC = "h2"
"""ALPN's name of what gRPC speaks."""

HTTP = "http/1.1"

_EXPIRED, _NOT_YET_VALID = 10, 9
"""X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID (openssl/x509_vfy.h)."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a listener. cert: its certificate, then those that lead to its authority.
    client_ca: authorities whose clients are let in; None = clients show no certificate. flags: what
    gives the three."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    flags: tuple[str, str, str] = ("tls-cert", "tls-key", "tls-client-ca")

    @classmethod
    def given(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
        """Return the files that settings name; None = no TLS."""
        if cert is None or key is None:
            return None
        return cls(cert=cert, key=key, client_ca=client_ca)


class ServerTls:
    """The TLS of one or several listeners with the same files."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = WatchedFiles(files.cert, files.key, files.client_ca)
        self._makers: dict[str, Callable[[], ssl.SSLContext]] = {}
        self._newest: dict[str, ssl.SSLContext] = {}

    def context(self, alpn: str) -> ssl.SSLContext:
        """Return what a listener for this protocol (GRPC or HTTP) needs, for its whole life.

        Raises InvalidRequest, naming flag and file: see ``server_context``.
        """
        front = self._keep(alpn, partial(server_context, self._files, alpn))

        def choose(connection: ssl.SSLObject, _name: str | None, _front: ssl.SSLContext) -> None:
            connection.context = self._of_now(alpn)

        front.sni_callback = choose  # called for clients that name no server, too
        return front

    def _keep(self, name: str, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        self._makers[name] = make
        context = self._newest[name] = make()
        return context

    def _of_now(self, name: str) -> ssl.SSLContext:
        if self._watched.have_changed():
            self._reload()
        return self._newest[name]

    def _reload(self) -> None:
        try:
            self._newest = {name: make() for name, make in self._makers.items()}
        except InvalidRequest as error:
            _log.error("the old certificate stays in use", error=error.message, param=error.param)
        else:
            _log.info("took a new certificate")


class MeshTls(ServerTls):
    """The TLS of one service towards the others: one certificate, shown at either end, and the
    authorities of the mesh, who judge the other end's.

    Names of hosts are not compared: workers are dialled by whatever address they come from. That
    the other end is of this mesh is what its authorities vouch for, and the mesh's secret proves
    (``proof.py``); so they must sign for nobody else.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises InvalidRequest, naming flag and file: see ``server_context``; also for a
        certificate that the authorities did not sign."""
        super().__init__(files)
        self._keep("dialler", self._dialler)

    @classmethod
    def of(cls, config: ServiceConfig) -> MeshTls | None:
        """Return a service's; None = its mesh has none."""
        cert, key, ca = config.mesh_tls_cert, config.mesh_tls_key, config.mesh_tls_ca
        if cert is None or key is None or ca is None:
            return None
        flags = ("mesh-tls-cert", "mesh-tls-key", "mesh-tls-ca")
        return cls(TlsFiles(cert=cert, key=key, client_ca=ca, flags=flags))

    def to_dial(self) -> ssl.SSLContext:
        """Return what the next connection to another service needs."""
        return self._of_now("dialler")

    def _dialler(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([GRPC])
        files, (cert_flag, key_flag, ca_flag) = self._files, self._files.flags
        assert files.client_ca is not None
        _load_pair(context, files.cert, files.key, cert_flag, key_flag)
        _load_authorities(context, files.client_ca, ca_flag)
        _require_valid_now(server_context(files), files.cert, cert_flag, context, ca_flag)
        return context


def server_context(files: TlsFiles, alpn: str = "") -> ssl.SSLContext:
    """Return a server's context as the files are now.

    Raises InvalidRequest, naming the flag and the file: one cannot be read or is not PEM, the key
    is encrypted or another certificate's, or the certificate is not valid at this time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    cert_flag, key_flag, ca_flag = files.flags
    _load_pair(context, files.cert, files.key, cert_flag, key_flag)
    if files.client_ca is not None:
        _load_authorities(context, files.client_ca, ca_flag)
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    if alpn:
        context.set_alpn_protocols([alpn])
    _require_valid_now(context, files.cert, cert_flag, _trusting(files.cert))
    return context


def client_context(
    ca: Path | None = None, cert: Path | None = None, key: Path | None = None, *, alpn: str = ""
) -> ssl.SSLContext:
    """Return a client's context. ca: authorities to trust instead of the system's; cert, key: what
    to show to a server that wants a client's certificate.

    Raises InvalidRequest, naming the flag: see ``server_context``.
    """
    context = (
        ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        _load_authorities(context, ca, "tls-ca")
    if (cert is None) != (key is None):
        raise InvalidRequest(
            "--tls-client-cert and --tls-client-key go together", param="tls-client-cert"
        )
    if cert is not None and key is not None:
        _load_pair(context, cert, key, "tls-client-cert", "tls-client-key")
    if alpn:
        context.set_alpn_protocols([alpn])
    return context


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path, flag: str, key_flag: str) -> None:
    # OpenSSL's own errors do not say which of the two files is at fault.
    if "-----BEGIN CERTIFICATE-----" not in _text(cert, flag):
        raise _wrong(flag, cert, "holds no certificate: give PEM, beginning with the own one")
    if "PRIVATE KEY-----" not in _text(key, key_flag):
        raise _wrong(key_flag, key, "holds no private key: give PEM")
    is_encrypted = False

    def password() -> str:
        nonlocal is_encrypted
        is_encrypted = True  # without this function OpenSSL would ask on the terminal
        return ""

    try:
        context.load_cert_chain(cert, key, password)
    except (ssl.SSLError, OSError) as error:
        if is_encrypted:
            rule = "is encrypted: give a key without a password, readable for this user alone"
            raise _wrong(key_flag, key, rule) from None
        if getattr(error, "reason", "") in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            rule = f"is not the key of {cert}: give the one that its certificate was made for"
            raise _wrong(key_flag, key, rule) from None
        reason = f"or {key} is damaged ({error})"
        raise _wrong(flag, cert, reason) from None


def _load_authorities(context: ssl.SSLContext, path: Path, flag: str) -> None:
    try:
        context.load_verify_locations(cadata=_text(path, flag))
    except (ssl.SSLError, ValueError, TypeError):  # the last two: bytes that no PEM has
        raise _wrong(flag, path, "holds no certificate of an authority: give PEM") from None
    for found in context.get_ca_certs():
        until = str(found["notAfter"])
        if ssl.cert_time_to_seconds(until) < time.time():
            raise _wrong(flag, path, f"holds an authority that expired on {until}: renew it")


def _trusting(cert: Path) -> ssl.SSLContext:
    """Return a client that trusts this certificate as long as it is valid."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    return client


def _require_valid_now(
    context: ssl.SSLContext, cert: Path, flag: str, client: ssl.SSLContext, ca_flag: str = ""
) -> None:
    """Judge the certificate as this client would: by a handshake in memory, because the standard
    library reads no dates otherwise. ca_flag: the client shows it as well, and is judged by these
    authorities as it judges."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), context.wrap_bio(there, back, server_side=True))
    # Client, server, client: now the client has judged. With one turn more the server judges the
    # client's certificate.
    for end in (*ends, *ends) if ca_flag else (*ends, ends[0]):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code == _EXPIRED:
                raise _wrong(flag, cert, "has expired: renew it") from None
            if error.verify_code == _NOT_YET_VALID:
                rule = "is not valid yet: renew it, or set this machine's clock"
                raise _wrong(flag, cert, rule) from None
            hint = f": --{ca_flag} must name its authority" if ca_flag else ""
            raise _wrong(flag, cert, f"is refused ({error.verify_message}){hint}") from None


def _text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidRequest(f"--{flag}: cannot read {path} ({reason})", param=flag) from None


def _wrong(flag: str, path: Path, rule: str) -> InvalidRequest:
    return InvalidRequest(f"--{flag}: {path} {rule}", param=flag)
