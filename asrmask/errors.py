"""The exceptions of this package, and helpers for their messages.

Each message is one line that names the problem, what was found and what was expected.
"""

import os
import re
import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr


def printable(text: str) -> str:
    """Escape line breaks and other unprintable characters.

    Undecoded bytes of file names (surrogates) are decoded as UTF-8 if possible, else escaped.

    >>> print(printable("caf\\udcc3\\udca9 caf\\udce9"))
    café caf\\xe9
    """

    def decode(match: re.Match[str]) -> str:
        return match[0].encode(errors="surrogateescape").decode(errors="backslashreplace")

    text = re.sub("[\udc80-\udcff]+", decode, text)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def brief(value: object) -> str:
    """Return a repr of limited length, on one line."""
    try:
        return one_line(_BRIEF.repr(value))
    except (ValueError, RecursionError):  # ValueError: an integer with thousands of digits
        return type(value).__name__


_BRIEF = Repr()
_BRIEF.maxdict = _BRIEF.maxlist = _BRIEF.maxtuple = 12
_BRIEF.maxstring = _BRIEF.maxother = 80


def counted(n: int, noun: str) -> str:
    """Format a count with its noun in the singular or plural.

    >>> counted(1, "file"), counted(3, "file")
    ('1 file', '3 files')
    """
    return f"{n} {noun}{'s' * (n != 1)}"


def one_line(error: object) -> str:
    """Return the text of an error without line breaks, or its type if there is no text."""
    return " ".join(str(error).split()) or type(error).__name__


def os_problem(error: OSError) -> str:
    """Describe an OSError: the file or folder, and the reason.

    >>> os_problem(FileNotFoundError(2, "No such file or directory", "a.wav"))
    'a.wav: No such file or directory'
    """
    reason = error.strerror or one_line(error)
    path = error.filename2 or error.filename
    return reason if path is None else f"{os.fsdecode(path)}: {reason}"


def did_you_mean(word: str, known: Iterable[str], separator: str = ": ") -> str:
    """Suggest the most similar known word, after the separator; empty if none is similar.

    >>> did_you_mean("--langauge", ["--language", "--task"])
    ': did you mean --language?'
    """
    names = {name.lstrip("-"): name for name in known}  # dashes would make all flags similar
    near = get_close_matches(word.lstrip("-"), names, n=1)
    return f"{separator}did you mean {names[near[0]]}?" if near else ""


class AsrmaskError(Exception):
    """Base class of all errors of this package."""


class AudioError(AsrmaskError):
    """The recording cannot be read, or is empty."""


class CheckpointError(AsrmaskError):
    """Weights are missing, damaged or have the wrong shape."""


class MissingPackageError(AsrmaskError, ImportError):
    """An optional package is not installed. Also an ImportError."""

    def __init__(self, user: str, package: str, install: str):
        self.needs = f"needs {package}: pip install {shlex.quote(install)}"
        super().__init__(f"{user} {self.needs}")


class OptionError(AsrmaskError, ValueError):
    """A value is not allowed. Also a ValueError."""


class UnknownOptionError(OptionError, TypeError):
    """There is no option of that name. Also a TypeError."""


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownOptionError for the first given name that is not known."""
    known = sorted(known)
    for name in given:
        if name not in known:
            raise UnknownOptionError(f"unknown option {name}{did_you_mean(name, known)}")


class AudioWarning(UserWarning):
    """The recording is damaged or truncated, and was only partly read."""
