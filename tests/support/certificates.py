"""Certificates for tests, made anew: an authority, and PEM files that it has signed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from shared.rpc.tls import TlsFiles

NOW = datetime.now(UTC)
LAST_YEAR = (NOW - timedelta(days=400), NOW - timedelta(days=1))
NEXT_YEAR = (NOW + timedelta(days=1), NOW + timedelta(days=400))


class Authority:
    """A certificate authority with its files in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.path = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.path)

    def sign(
        self,
        name: str,
        host: str = "127.0.0.1",
        *,
        valid: tuple[datetime, datetime] | None = None,
        client_ca: Path | None = None,
    ) -> TlsFiles:
        """Write NAME.crt and NAME.key for a host, and return them. valid: from, until."""
        since, until = valid or (None, None)
        made = self._authority.issue_cert(host, not_before=since, not_after=until)
        files = TlsFiles(
            cert=self._folder / f"{name}.crt",
            key=self._folder / f"{name}.key",
            client_ca=client_ca,
        )
        files.cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(files.key)
        return files
