"""``pdmesh hash-key``: a line of the gateway's key file. ``pdmesh secret``: what a mesh shares."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from services.cli.flags import CannotRun, require
from services.cli.sources import PLAIN, QUIET
from services.gateway.front import auth
from services.gateway.front.quota import KeyLimits
from shared.errors import InvalidRequest
from shared.mesh_secret import new_secret


def hash_key(
    name: Annotated[str, PLAIN],
    /,
    *,
    key: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    salt: str = "",
    requests_per_minute: Annotated[int, PLAIN] = 0,
    concurrent_requests: Annotated[int, PLAIN] = 0,
    may: Annotated[Literal["", "roles"], PLAIN] = "",
) -> None:
    """Make an API key; print the line for the gateway's --api-keys file.

    The line goes to stdout; the new key goes to stderr and is stored nowhere.

    Parameters
    ----------
    name
        Whose key it is: a name for logs and metrics.
    key
        Hash this key instead of making one; '-' reads it from stdin, which keeps it out of the
        shell's history.
    salt
        Tenant: keys with one salt share the prefix cache. Default: the name.
    requests_per_minute
        Of this key; 0 = what the gateway's --key-requests-per-minute says.
    concurrent_requests
        Of this key at once; 0 = what the gateway's --key-concurrent-requests says.
    may
        'roles': this key may also change what workers are (`pdmesh role`).
    """
    limits = KeyLimits(
        requests_per_minute=requests_per_minute, concurrent_requests=concurrent_requests
    )
    own = sys.stdin.readline().strip() if key == "-" else key or auth.new_key()
    line = auth.hash_key(name, own, salt, limits, may)
    if not key:
        print(f"the key, shown this once: {own}", file=sys.stderr)
    print(line)


def secret(
    *,
    out: Annotated[Path | None, PLAIN] = None,
    keep: Annotated[bool, QUIET] = False,
) -> None:
    """Make the secret of a mesh: the gateway and all workers get the same one.

    They take it from --mesh-secret-file, or from the variable PDMESH_MESH_SECRET.

    Parameters
    ----------
    out
        Write it to this new file, which only you may read, and not to stdout.
    keep
        A file that is there already is left as it is.
    """
    require(out is not None or not keep, "--keep is of a file: give --out, too")
    text = f"{new_secret(secrets.token_bytes)}\n"
    if out is None:
        sys.stdout.write(text)
    elif not (keep and out.exists()):
        # Whole or not at all: a service may be waiting to read it.
        try:
            with tempfile.NamedTemporaryFile("w", dir=out.parent, prefix=".secret-") as file:
                file.write(text)
                file.flush()
                os.link(file.name, out)
        except FileExistsError:
            raise InvalidRequest(f"{out} is there already: --keep leaves it as it is") from None
        except OSError as error:
            raise CannotRun(f"cannot write {out}: {str(error.strerror).lower()}") from None
