"""``pdmesh completion``: what makes a shell complete our commands and flags."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from shared.runtime.service import EXIT_OK


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(show_env_var=False)],
    /,
    *,
    install: Annotated[
        bool, Parameter(negative="", show_env_var=False, show_default=False)
    ] = False,
) -> int:
    """Print the script that completes commands and flags in a shell, or install it.

    Parameters
    ----------
    shell
        bash, zsh or fish.
    install
        Write it where the shell looks, and for bash and zsh a line into the shell's start file.
    """
    from services.cli.app import app  # which holds this command

    if not install:
        print(app.generate_completion(shell=shell))
        return EXIT_OK
    path = app.install_completion(shell=shell)
    print(f"written to {path}: a new {shell} completes pdmesh")
    return EXIT_OK
