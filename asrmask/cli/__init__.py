"""The command `asrmask`. Each subcommand is one module, imported on use."""

import argparse
import io
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from asrmask import __version__
from asrmask.errors import AsrmaskError, MissingPackageError, OptionError, os_problem, printable

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


# read as the value of a boolean flag; all but True and False are then rejected
YES_OR_NO = {"true", "false", "yes", "no", "on", "off", "1", "0"}


def boolean(text: str) -> bool:
    """Argument type of boolean flags: `--flag True`, `--flag False`, or `--flag` alone."""
    if text.lower() not in {"true", "false"}:
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors.

    Flags may be spelled with _ or -, boolean flags need no value, and files may be anywhere between
    the flags.

    presets: flag → defaults that it sets for other flags
    """

    presets: dict[str, dict[str, Any]]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        given = list(args or [])
        n_flags = given.index("--") if "--" in given else len(given)
        arguments = self._joined([self._checked(argument) for argument in given[:n_flags]])
        for flag, preset in getattr(self, "presets", {}).items():
            if f"{flag}=true" in map(str.lower, arguments):
                self.set_defaults(**preset)
        found, rest = super().parse_known_args(arguments + given[n_flags:], namespace)
        for action in self._actions:  # argparse accepts only one group of files
            if not action.option_strings and action.nargs in {"+", "*"}:
                files = [t for t in rest if t[:1] != "-" or t == "-" or t in given[n_flags:]]
                rest = [text for text in rest if text not in files]
                files = [text for text in files if text != "--"]
                setattr(found, action.dest, [*getattr(found, action.dest), *files])
        return found, rest

    def _checked(self, argument: str) -> str:
        """Return the argument, with _ in flags; exit with an error if it is an unknown flag."""
        flag = underscored(argument)
        name = flag.partition("=")[0]
        if not name.startswith("-") or name == "-" or name in self._option_string_actions:
            return flag
        if os.path.isfile(argument):
            self.error(f"{argument} is read as a flag, for the file write ./{argument}")
        if name.startswith("--") and " " not in name:
            known = [text for text in self._option_string_actions if text.startswith("--")]
            self.error(f"unknown flag {argument.partition('=')[0]}{meant(name, known)}")
        return argument

    def _joined(self, arguments: list[str]) -> list[str]:
        """Rewrite boolean flags as --flag=VALUE; VALUE is True if no value follows."""

        def is_open(argument: str) -> bool:
            action = self._option_string_actions.get(argument)
            return action is not None and action.type is boolean

        joined: list[str] = []
        for argument in arguments:
            if joined and is_open(joined[-1]) and argument.lower() in YES_OR_NO:
                joined[-1] += f"={argument}"
            else:
                joined.append(argument)
        return [f"{argument}=True" if is_open(argument) else argument for argument in joined]

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: error: {printable(message)} (see {self.prog} --help)\n")


def meant(text: str, known: Iterable[str]) -> str:
    """Return a hint at the known name closest to an unknown one, to end an error message.

    >>> meant("--langauge", ["--language", "--task"])
    ', did you mean --language?'
    """
    names = {name.lstrip("-"): name for name in known}  # dashes would make all flags similar
    near = get_close_matches(text.lstrip("-"), names, n=1)
    return f", did you mean {names[near[0]]}?" if near else ""


def underscored(argument: str) -> str:
    """Spell a flag with _ between its words, as upstream; return anything else unchanged.

    >>> underscored("--beam-size=5")
    '--beam_size=5'
    """
    if not argument.startswith("--"):
        return argument
    flag, sep, value = argument[2:].partition("=")
    return "--" + flag.replace("-", "_") + sep + value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code: 0 success, 1 failure, 2 wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escape characters it cannot show
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
    top.add_argument("command", nargs="?", metavar="COMMAND", help="see below")
    name = arguments[0] if arguments else None
    if name is None:
        top.print_help()
        return 2
    if name not in COMMANDS:
        is_flag = name.startswith("-") and name != "-"
        if _is_file(name) or (is_flag and any(map(_is_file, arguments))):
            call = shlex.join(["asrmask", "transcribe", *arguments])
            top.error(f"a command is missing, did you mean: {call}")
        if not is_flag:
            near = meant(name, COMMANDS) or f", expected one of {', '.join(COMMANDS)}"
            top.error(f"unknown command {name}{near}")
        top.parse_args(arguments)
        top.error(f"a command is missing, expected one of {', '.join(COMMANDS)}")
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
    except MissingPackageError as error:
        print(f"asrmask {name} {error.needs}", file=sys.stderr)
        return 2
    except AsrmaskError as error:
        print(f"asrmask {name}: error: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    except BrokenPipeError:  # nobody reads our output: print nothing more, nor at exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in (1, 2):
            os.dup2(nowhere, file)
        return 1
    except OSError as error:
        told = f"{os_problem(error)}, expected a file or folder that can be used"
        print(f"asrmask {name}: error: {printable(told)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"asrmask {name}: interrupted", file=sys.stderr)
        return 130


def _is_file(argument: str) -> bool:
    """Return whether the argument looks like a file to transcribe."""
    if argument == "-" or os.path.exists(argument):
        return True
    return not argument.startswith("-") and os.path.splitext(argument)[1] != ""
