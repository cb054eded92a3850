"""The command `asrmask`. Each subcommand is one module, imported on use."""

import argparse
import io
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from asrmask import __version__, errors
from asrmask.errors import did_you_mean, printable

COMMANDS = {
    "transcribe": "transcribe or translate audio and video files of any length",
    "live": "transcribe a microphone or a pipe while people speak",
    "compare": "compare asrmask with openai-whisper and others: every stage, tokens, text, speed",
    "inspect": "show what the padding does inside the model, head by head",
    "ablate": "run a padding-mask ablation on speech with transcripts: tables, plots, a page",
    "train": "adapt a model to your speech and to padding masks: an adapter, curves, a page",
    "bench": "measure speed, memory and word error rate of several systems on the same files",
    "report": "write the report of an ablation or benchmark again, or of several side by side",
    "masks": "draw the attention masks of a file under a padding policy",
    "models": "list the official models, and which of them are on this machine",
}

# after a boolean flag these are its value; all but True and False are then rejected
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
            unknown = argument.partition("=")[0]
            self.error(f"unknown flag {unknown}{did_you_mean(name, known, ', ')}")
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

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(message)} (see {self.prog} --help)\n")


def underscored(argument: str) -> str:
    """Spell a flag with _ between its words, as upstream; return anything else unchanged.

    >>> underscored("--beam-size=5")
    '--beam_size=5'
    """
    flag, sep, value = argument.partition("=")
    return f"--{flag[2:].replace('-', '_')}{sep}{value}" if flag[:2] == "--" else argument


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code: 0 success, 1 failure, 2 wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escape characters it cannot show
    if not arguments:
        _top_parser().print_help()
        return 2
    name = arguments[0]
    if name not in COMMANDS:
        _exit_without_command(arguments)
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
    except errors.MissingPackageError as error:
        print(f"asrmask {name} {error.needs}", file=sys.stderr)
        return 2
    except errors.AsrmaskError as error:
        print(f"asrmask {name}: error: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, errors.OptionError) else 1
    except BrokenPipeError:  # nobody reads our output: print nothing more, nor at exit
        for file in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)
        return 1
    except OSError as error:
        problem = f"{errors.os_problem(error)}, expected a file or folder that can be used"
        print(f"asrmask {name}: error: {printable(problem)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"asrmask {name}: interrupted", file=sys.stderr)
        return 130


def _top_parser() -> Parser:
    commands = "\n".join(f"  {name:12}{text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="asrmask",
        usage="asrmask COMMAND …",
        description="Whisper speech-to-text with every attention mask explicit.",
        epilog=f"commands:\n{commands}\n\nasrmask COMMAND --help lists the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asrmask {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="see below")
    return parser


def _exit_without_command(arguments: list[str]) -> NoReturn:
    """Handle --help and --version; exit with an error if the first argument is no command."""
    parser = _top_parser()
    name = arguments[0]
    is_flag = name.startswith("-") and name != "-"
    if _is_file(name) or (is_flag and any(map(_is_file, arguments))):
        call = shlex.join(["asrmask", "transcribe", *arguments])
        parser.error(f"a command is missing, did you mean: {call}")
    expected = f", expected one of {', '.join(COMMANDS)}"
    if not is_flag:
        parser.error(f"unknown command {name}{did_you_mean(name, COMMANDS, ', ') or expected}")
    parser.parse_args(arguments)
    parser.error(f"a command is missing{expected}")


def _is_file(argument: str) -> bool:
    """Return whether the argument looks like a file to transcribe."""
    has_suffix = not argument.startswith("-") and os.path.splitext(argument)[1] != ""
    return argument == "-" or has_suffix or os.path.exists(argument)
