"""``pdmesh chat``: a conversation with a running gateway, on a terminal or line by line from a
pipe.

One turn at a time: a line is read, then a loop of its own streams the answer, so that Ctrl-C means
the answer while it comes and the line while it is typed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter
from rich.console import Console
from rich.text import Text

from services.cli.client import LOCAL_GATEWAY, RunningGateway
from services.cli.generate import USUAL, Answer, Sampling, stream_answer
from services.cli.interrupts import EXIT_INTERRUPTED, Interrupts
from services.cli.models import NONE_YET
from services.cli.receipt import receipt_table
from services.cli.spoken import ONLY_THOUGHT, SpokenAnswer
from services.cli.words import plain_console
from shared.config import DEMO_MODEL
from shared.errors import MeshError
from shared.runtime.service import EXIT_FAILED, EXIT_OK

COMMANDS: Final = {
    "/help": "this list",
    "/receipt": "where the time of the last answer went",
    "/reset": "forget what was said; the system prompt stays",
    "/system": "/system TEXT sets the system prompt, /system alone takes it away",
    "/quit": "leave; so do Ctrl-D, and Ctrl-C where nothing is typed",
}
KEYS: Final = """\
Enter sends. Alt-Enter, or a backslash at the end of a line, begins a new line. Ctrl-C stops an
answer, or clears what is typed. A space before a slash sends the text as it is.
"""

DEMO_NOTE: Final = (
    "The bundled demo model finds codes that you state, adds numbers up to 99, makes small talk. "
    "All else is nonsense, and so are soon the later turns of a conversation: /reset begins anew."
)

_CHAT = Parameter(group=Group("Conversation", sort_key=0))


class Conversation:
    """What was said so far, and how to go on."""

    def __init__(self, gateway: RunningGateway, settings: dict[str, Any], system: str) -> None:
        self._gateway = gateway
        self._settings = settings
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.last = Answer()

    async def ask(self, text: str, spoken: SpokenAnswer) -> None:
        """Stream the answer to ``spoken``. A turn that fails is forgotten; one that is stopped
        keeps what had come.

        Raises MeshError: see ``stream_answer``.
        """
        asked = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {**self._settings, "messages": [*system, *self.turns, asked]}
        answer, is_stopped = Answer(), False
        try:
            await stream_answer(self._gateway, body, answer, spoken.say, spoken.think)
        except asyncio.CancelledError:
            is_stopped = True
            raise
        finally:
            if answer.finish_reason or (is_stopped and answer.text):
                self.turns += [asked, {"role": "assistant", "content": answer.text}]
                self.last = answer

    def reset(self) -> None:
        self.turns.clear()
        self.last = Answer()


def chat(
    *,
    system: Annotated[str, _CHAT] = "",
    model: Annotated[str | None, _CHAT, Parameter(show_env_var=False)] = None,
    history: Annotated[bool, _CHAT] = True,
    sampling: Sampling = USUAL,
    gateway: RunningGateway = LOCAL_GATEWAY,
) -> int:
    """Talk with the model of a running gateway; answers stream, and it remembers what was said.

    Commands are /receipt, /reset, /system TEXT, /help and /quit. From a pipe every line is a turn,
    and the exit code is 1 if one of them failed.

    Parameters
    ----------
    system
        System prompt.
    model
        Name of the model; default: the one that the gateway serves.
    history
        Keep what is typed for the next time, in the user's state folder, for the user alone.
    """
    served = asyncio.run(gateway.ask("/v1/models"))["data"]
    talk = Conversation(gateway, {"model": model, **asdict(sampling)}, system)
    out = plain_console()
    if not sys.stdin.isatty():
        return _Dialogue(talk, out).run(_piped_lines())
    from services.cli.chat_input import typed_lines

    name = f"{served[0]['id']} at {gateway.url}" if served else NONE_YET
    out.print(f"{name}  (/help, /quit)", style="dim")
    if served and served[0]["id"] == DEMO_MODEL:
        out.print(DEMO_NOTE, style="dim")
    try:
        _Dialogue(talk, out).run(typed_lines(COMMANDS, is_history_kept=history))
    except KeyboardInterrupt:  # between an answer and the next line: where nothing is typed
        print(flush=True)
    return EXIT_OK


def _piped_lines() -> Iterator[str]:
    text = ""
    for line in sys.stdin:
        text += line.rstrip("\n")
        if text.endswith("\\"):
            text = text[:-1] + "\n"
            continue
        yield text
        text = ""
    if text:
        yield text


class _Dialogue:
    """Reads, obeys or asks, and shows; one turn after the other."""

    def __init__(self, talk: Conversation, out: Console) -> None:
        self._talk = talk
        self._out = out
        self._err = plain_console(stderr=True)
        self._code = EXIT_OK

    def run(self, lines: Iterator[str]) -> int:
        """Return the exit code: that of a signal, or whether all turns went well."""
        for line in lines:
            if not line.strip():
                continue
            if line.startswith("/"):
                if self._is_last(line):
                    break
                continue
            code = self._turn(line)
            # Ctrl-C on a terminal means the answer alone; any other signal means the command.
            if code and (code != EXIT_INTERRUPTED or not sys.stdin.isatty()):
                return code
        return self._code

    def _turn(self, text: str) -> int:
        code, failure = EXIT_OK, None
        with SpokenAnswer() as spoken:
            try:
                code = Interrupts().run(lambda: self._talk.ask(text, spoken))
            except MeshError as error:
                failure = error
        if failure is not None:
            self._code = EXIT_FAILED
            hint = " (/reset begins anew)" if failure.code == "context_length_exceeded" else ""
            self._complain(failure.message + hint)
        elif code:
            self._err.print("stopped", style="dim")
        elif self._talk.last.is_only_thought:
            self._err.print(ONLY_THOUGHT, style="dim", soft_wrap=True)
        return code

    def _is_last(self, line: str) -> bool:
        """Obey a command; whether it was the last one."""
        name, _, rest = line.strip().partition(" ")
        talk = self._talk
        match name:
            case "/quit" | "/exit":
                return True
            case "/help":
                for command, meaning in COMMANDS.items():
                    self._out.print(f"{command:<10}{meaning}")
                self._out.print(KEYS, style="dim", end="")
            case "/reset":
                talk.reset()
                self._err.print("forgotten", style="dim")
            case "/system":
                talk.system = rest.strip()
                said = "the system prompt is set" if talk.system else "no system prompt"
                self._err.print(said, style="dim")
            case "/receipt" if talk.last.receipt:
                self._out.print(receipt_table(talk.last.receipt, talk.last.usage))
            case "/receipt":
                self._complain("there is no answer yet that has a receipt")
            case _:
                self._complain(f"there is no command {name}: /help lists them")
        return False

    def _complain(self, message: str) -> None:
        text = Text(f"error: {' '.join(message.split())}", style="red")
        self._err.print(text, soft_wrap=True)
