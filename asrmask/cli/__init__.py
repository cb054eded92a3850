"""The command `asrmask`: one file a subcommand, imported when it is called."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from asrmask import __version__
from asrmask.errors import AsrmaskError, OptionError, printable

COMMANDS = {
    "transcribe": "speech to text: any audio or video file, of any length",
    "compare": "openai-whisper and others beside asrmask: stages, tokens, times, text, speed",
    "inspect": "what the padding does inside the model: attention, heads, the end of the text",
    "ablate": "a padding-mask ablation: tables, plots and a page, from speech with transcripts",
    "bench": "speed, memory and word error rate beside other systems, on the same files",
    "report": "draw the report of an ablation or a benchmark again, or of several side by side",
    "masks": "what is visible to what in a file, under a padding policy",
    "models": "the models there are, and which of them are on this machine",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose flags take _ or - between words.

    presets: flag → what other flags are set to, unless they are given too
    """

    presets: dict[str, dict[str, Any]]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        arguments = list(args or [])
        n_flags = arguments.index("--") if "--" in arguments else len(arguments)
        arguments[:n_flags] = map(underscored, arguments[:n_flags])
        for flag, preset in getattr(self, "presets", {}).items():
            if flag in arguments[:n_flags]:
                self.set_defaults(**preset)
        return super().parse_known_args(arguments, namespace)

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def underscored(argument: str) -> str:
    """A flag with _ between its words, as upstream spells it; anything else unchanged.

    >>> underscored("--beam-size=5")
    '--beam_size=5'
    """
    if not argument.startswith("--"):
        return argument
    flag, sep, value = argument[2:].partition("=")
    return "--" + flag.replace("-", "_") + sep + value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code: 0 done, 1 something failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where it cannot show a character
    top = Parser(
        prog="asrmask",
        allow_abbrev=False,
        description="Whisper speech-to-text with every attention mask in the open.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:12}{text}" for name, text in COMMANDS.items())
        + "\n\nasrmask COMMAND --help says more.",
        usage="asrmask COMMAND …",
    )
    top.add_argument("--version", action="version", version=f"asrmask {__version__}")
    top.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="see below")
    name = arguments[0] if arguments else None
    if name not in COMMANDS:
        top.parse_args(arguments)
        top.print_help()
        return 2
    command = import_module(f"asrmask.cli.{name}")
    parser = Parser(
        prog=f"asrmask {name}",
        usage=f"asrmask {name} {command.USAGE}",
        description=COMMANDS[name],
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(arguments[1:]))
    except AsrmaskError as error:
        print(f"asrmask {name}: error: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    except BrokenPipeError:  # the reader of our output has gone: say no more, nor at exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in (1, 2):
            os.dup2(nowhere, file)
        return 1
    except KeyboardInterrupt:
        print(f"asrmask {name}: interrupted", file=sys.stderr)
        return 130
