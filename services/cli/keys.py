"""``pdmesh hash-key``: a line of the gateway's key file."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from services.gateway.front.auth import hash_key, new_key
from services.gateway.front.quota import KeyLimits


def hash_api_key(
    name: Annotated[str, Parameter(show_env_var=False)],
    /,
    *,
    key: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    salt: str = "",
    requests_per_minute: Annotated[int, Parameter(show_env_var=False)] = 0,
    concurrent_requests: Annotated[int, Parameter(show_env_var=False)] = 0,
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
    """
    limits = KeyLimits(
        requests_per_minute=requests_per_minute, concurrent_requests=concurrent_requests
    )
    secret = sys.stdin.readline().strip() if key == "-" else key or new_key()
    line = hash_key(name, secret, salt, limits)
    if not key:
        print(f"the key, shown this once: {secret}", file=sys.stderr)
    print(line)
