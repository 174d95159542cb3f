"""All commands in one place, and how each failure becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group, UnusedCliTokensError
from cyclopts.config import Env

from services.cli.demo import demo
from services.cli.generate import generate
from services.cli.keys import hash_api_key
from services.cli.one_service import decode, gateway, prefill
from services.cli.status import leave_output
from services.cli.up import up
from shared.environment import PREFIX
from shared.errors import InvalidRequest, MeshError
from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from shared.version import VERSION

HELP = """\
LLM serving with prefill and decode on separate machines.

Prefill workers compute a prompt's KV cache and push it, layer by layer, to decode workers, which
generate; the gateway speaks OpenAI's API and gRPC to clients.
"""

EPILOGUE = """\
Examples:

```
pdmesh demo                               one prompt, three processes, offline
pdmesh up --model ~/models/Qwen3-0.6B     a mesh on this machine
pdmesh generate "Hello!"                  ask it

pdmesh gateway --host 0.0.0.0             on three hosts: one command each
pdmesh prefill --host 0.0.0.0 --gateway 10.0.0.5:8001
pdmesh decode  --host 0.0.0.0 --gateway 10.0.0.5:8001
```

Every flag is an environment variable, too: --max-running is PDMESH_MAX_RUNNING. Flags win.

Exit codes: 0 done, 1 failed, 2 wrong flag or configuration, 3 a drain came to its limit, 130
Ctrl-C.
"""

UP_EXAMPLES = """\
Examples:

```
pdmesh up                                 the bundled model, one worker each
pdmesh up --prefill 2 --decode 2 --port 9000
pdmesh up --model Qwen/Qwen3-0.6B         from the hub: pip install 'pdmesh[hub]'
PDMESH_MAX_WAITING=1000 pdmesh up         settings of a service without a flag here
```
"""

GENERATE_EXAMPLES = """\
Examples:

```
pdmesh generate "What is 17 + 25?"
pdmesh generate --raw --max-tokens 30 --temperature 0 "Once upon a time"
pdmesh generate --no-receipt < question.txt > answer.txt
```
"""

KEY_EXAMPLES = """\
Examples:

```
pdmesh hash-key alice >> keys.txt && pdmesh up --api-keys keys.txt
```
"""

LOCAL = Group("On this machine", sort_key=1)
SERVICES = Group("One service (a host each)", sort_key=2)
CLIENT = Group("Clients", sort_key=3)
OTHER = Group("Other", sort_key=4)

app = App(
    name="pdmesh",
    help=HELP,
    help_format="markdown",
    help_epilogue=EPILOGUE,
    version=VERSION,
    version_flags=["--version"],
    group_commands=OTHER,
    config=Env(PREFIX, command=False),
    result_action="return_value",
)
app["--help"].group = OTHER
app["--version"].group = OTHER


def version() -> None:
    """Print the version."""
    print(VERSION)


app.command(demo, group=LOCAL, help_epilogue="", sort_key=1)
app.command(up, group=LOCAL, help_epilogue=UP_EXAMPLES, sort_key=2)
app.command(gateway, group=SERVICES, help_epilogue="", sort_key=1)
app.command(prefill, group=SERVICES, help_epilogue="", sort_key=2)
app.command(decode, group=SERVICES, help_epilogue="", sort_key=3)
app.command(generate, group=CLIENT, help_epilogue=GENERATE_EXAMPLES)
app.command(hash_api_key, name="hash-key", group=OTHER, help_epilogue=KEY_EXAMPLES)
app.command(version, group=OTHER, help_epilogue="")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; failures are told on stderr."""
    for name in [n for n in os.environ if n.startswith(PREFIX) and not os.environ[n].strip()]:
        del os.environ[name]  # empty = not set, as for the services themselves
    try:
        code = app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        command = " ".join(["pdmesh", *(error.command_chain or ())])
        return _fail(f"{_wrong(error)} See `{command} --help`.", EXIT_BAD_CONFIG)
    except InvalidRequest as error:
        return _fail(error.message, EXIT_BAD_CONFIG)
    except MeshError as error:
        return _fail(error.message, EXIT_FAILED)
    except BrokenPipeError:
        leave_output(sys.stdout)
        return EXIT_FAILED
    except OSError as error:
        return _fail(str(error), EXIT_FAILED)
    return code if isinstance(code, int) else EXIT_OK


def _wrong(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError):
        return f"Unexpected argument: {' '.join(error.unused_tokens or ())}."
    return str(error)


def _fail(message: str, code: int) -> int:
    print(f"pdmesh: {_one_line(message)}", file=sys.stderr)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())
