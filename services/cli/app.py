"""All commands in one place, and how each failure becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Final, Literal

from cyclopts import App, CycloptsError, Group, UnknownOptionError, UnusedCliTokensError

from services.cli import help_texts
from services.cli.bench.command import bench
from services.cli.chat import chat
from services.cli.config import config
from services.cli.demo import demo
from services.cli.doctor.report import doctor
from services.cli.explain import explain
from services.cli.generate import generate
from services.cli.keys import hash_key, secret
from services.cli.models import models
from services.cli.one_service import decode, gateway, prefill
from services.cli.profile import profile
from services.cli.role import role
from services.cli.sources import PLAIN, QUIET, SOURCES
from services.cli.status import leave_output
from services.cli.top import top
from services.cli.tour import tour
from services.cli.up import up
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
    (LOCAL, (demo, up, doctor, profile, tour)),
    (SERVICES, (gateway, prefill, decode)),
    (CLIENT, (chat, generate, models, top, role, explain, bench)),
    (OTHER, (completion, config, hash_key, secret, version)),
)
for group, commands in COMMANDS:
    for place, command in enumerate(commands):
        name = command.__name__.replace("_", "-")
        help_epilogue = help_texts.examples(name)
        app.command(command, name=name, group=group, help_epilogue=help_epilogue, sort_key=place)
app.command("services.cli.plan.app:plan_app", name="plan", group=PLANS, help=help_texts.PLAN_IS)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; failures are told on stderr."""
    for name in [n for n in os.environ if n.startswith(PREFIX) and not os.environ[n].strip()]:
        del os.environ[name]  # empty = not set, as for the services themselves
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # a terminal of no width is one that does not say its own
    given = sys.argv[1:] if arguments is None else arguments
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
        leave_output(sys.stdout)
        return EXIT_FAILED
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(f"{where}{(error.strerror or str(error)).lower()}", EXIT_FAILED)
    return code if isinstance(code, int) else EXIT_OK


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
