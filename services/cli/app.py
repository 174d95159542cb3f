"""All commands in one place, and how each failure becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import IO, Annotated, Final, Literal

from cyclopts import App, CycloptsError, Group, UnknownOptionError, UnusedCliTokensError

from services.cli import help_texts
from services.cli.sources import PLAIN, QUIET, SOURCES
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from shared.errors import InvalidRequest, MeshError
from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from shared.settings import PREFIX
from shared.version import VERSION

LOCAL = Group("On this machine", sort_key=1)
SERVICES = Group("One service (a host each)", sort_key=2)
CLIENT = Group("Clients", sort_key=3)
PLANS = Group("Plans", sort_key=4)
OTHER = Group("Other", sort_key=5)

app = App(
    name="pdmesh",
    help=help_texts.HELP,
    help_format="markdown",
    help_epilogue=help_texts.EPILOGUE,
    version=VERSION,
    version_flags=["--version"],
    group_commands=OTHER,
    config=SOURCES,
    result_action="return_value",
)
app["--help"].group = OTHER
app["--version"].group = OTHER


def version() -> None:
    """Print the version."""
    print(VERSION)


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], PLAIN],
    /,
    *,
    install: Annotated[bool, QUIET] = False,
) -> None:
    """Print the script that completes commands and flags in a shell, or install it.

    Parameters
    ----------
    shell
        bash, zsh or fish.
    install
        Write it where the shell looks, and for bash and zsh a line into the shell's start file.
    """
    if install:
        path = app.install_completion(shell=shell)
        print(f"written to {path}: a new {shell} completes pdmesh")
    else:
        print(app.generate_completion(shell=shell))


COMMANDS: Final = (
    (LOCAL, "demo:demo up:up doctor.report:doctor profile:profile tour:tour"),
    (SERVICES, "one_service:gateway one_service:prefill one_service:decode"),
    (
        CLIENT,
        "chat:chat generate:generate models:models top:top role:role explain:explain "
        "bench.command:bench",
    ),
    (OTHER, "app:completion config:config keys:hash_key keys:secret app:version"),
)
"""Where each stands. It is imported when it is asked for, so that a gateway holds nothing that
draws on terminals, and no command waits for what another needs."""

NAMES: Final[list[str]] = []

for group, commands in COMMANDS:
    for place, path in enumerate(commands.split()):
        name = path.partition(":")[2].replace("_", "-")
        help_epilogue = help_texts.examples(name)
        path = f"services.cli.{path}"
        app.command(path, name=name, group=group, help_epilogue=help_epilogue, sort_key=place)
        NAMES.append(name)
app.command("services.cli.plan.app:plan_app", name="plan", group=PLANS, help=help_texts.PLAN_IS)


def load_commands() -> list[App]:
    """Import all but plan, and return them: the overview has the first sentence of each."""
    return [app[name] for name in NAMES]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; failures are told on stderr."""
    for name in [n for n in os.environ if n.startswith(PREFIX) and not os.environ[n].strip()]:
        del os.environ[name]  # empty = not set, as for the services themselves
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # a terminal of no width is one that does not say its own
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("--help", "-h"):
        load_commands()
    try:
        "".join(given).encode()  # bytes that are no UTF-8 came as surrogates
        code = app(given, exit_on_error=False, print_error=False)
        sys.stdout.flush()  # else a reader that has left is noticed when nobody can say so
    except CycloptsError as error:
        command = " ".join(["pdmesh", *(error.command_chain or ())])
        return _fail(f"{_wrong(error)} See `{command} --help`.", EXIT_BAD_CONFIG)
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        return _fail(f"arguments and input must be UTF-8 ({error})", EXIT_BAD_CONFIG)
    except InvalidRequest as error:
        return _fail(error.message, EXIT_BAD_CONFIG)
    except MeshError as error:
        return _fail(error.message, EXIT_FAILED)
    except BrokenPipeError:
        _leave_output(sys.stdout)
        return EXIT_FAILED
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(f"{where}{(error.strerror or str(error)).lower()}", EXIT_FAILED)
    return code if isinstance(code, int) else EXIT_OK


def _leave_output(stream: IO[str]) -> None:
    """Write to nowhere from now on, so that what is still in the buffer fails nothing at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _wrong(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError):
        return f"Unexpected argument: {' '.join(error.unused_tokens or ())}."
    if isinstance(error, UnknownOptionError) and error.command_chain == ("generate",):
        return f"{error} A prompt that begins with a dash goes after all options and --."
    if isinstance(error, UnknownOptionError) and error.command_chain == ("up",):
        flag = str(error.token.keyword)
        name = flag.lstrip("-").replace("-", "_")
        if any(
            it.name == name
            for kind in (GatewayConfig, PrefillConfig, DecodeConfig)
            for it in fields(kind)
        ):
            return f"{flag} is a service's: give it by {PREFIX}{name.upper()}, or in --config."
    return str(error)


def _fail(message: str, code: int) -> int:
    print(f"pdmesh: {' '.join(message.split())}", file=sys.stderr)
    return code
