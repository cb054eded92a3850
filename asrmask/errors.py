"""The exceptions of this package, all in one tree.

    AsrmaskError
    ├── AudioError        a recording that cannot be read, or holds nothing to read
    ├── CheckpointError   weights that are missing, damaged or of another shape
    └── OptionError       a value that is not allowed (also a ValueError)
        └── UnknownOptionError   a name that is no option's (also a TypeError)

Each message says what, what was got and what was expected, in one line.
"""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr


def printable(text: str) -> str:
    """The text in one line: characters that would break it are spelled out.

    Bytes of file names that Python could not decode are read as UTF-8, or spelled out.

    >>> print(printable("caf\\udcc3\\udca9 caf\\udce9"))
    café caf\\xe9
    """
    text = re.sub("[\udc80-\udcff]+", _undecoded, text)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _undecoded(found: re.Match[str]) -> str:
    return found[0].encode(errors="surrogateescape").decode(errors="backslashreplace")


def brief(value: object) -> str:
    """What repr says, short however large the value is."""
    try:
        return one_line(_BRIEF.repr(value))
    except (ValueError, RecursionError):  # a number of thousands of digits
        return type(value).__name__


_BRIEF = Repr()
_BRIEF.maxdict = _BRIEF.maxlist = _BRIEF.maxtuple = 12
_BRIEF.maxstring = _BRIEF.maxother = 80


def counted(n: int, noun: str) -> str:
    """A number of things, in the singular or the plural.

    >>> counted(1, "file"), counted(3, "file")
    ('1 file', '3 files')
    """
    return f"{n} {noun}{'s' * (n != 1)}"


def one_line(error: object) -> str:
    """The text of an error, without the line breaks that other libraries put into theirs."""
    return " ".join(str(error).split()) or type(error).__name__


def os_problem(error: OSError) -> str:
    """What the system refused, and which file or folder.

    >>> os_problem(FileNotFoundError(2, "No such file or directory", "a.wav"))
    'a.wav: No such file or directory'
    """
    reason = error.strerror or one_line(error)
    path = error.filename2 or error.filename
    return reason if path is None else f"{os.fsdecode(path)}: {reason}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that names the nearest known word; empty if none is near.

    >>> did_you_mean("beamsize", ["beam_size", "best_of"])
    ': did you mean beam_size?'
    """
    near = get_close_matches(word, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


class AsrmaskError(Exception):
    """Base of every error that asrmask raises on purpose."""


class AudioError(AsrmaskError):
    """A recording that cannot be read, or that holds nothing to read."""


class CheckpointError(AsrmaskError):
    """Weights that are missing, damaged or of another shape."""


class OptionError(AsrmaskError, ValueError):
    """A value that is not allowed."""


class UnknownOptionError(OptionError, TypeError):
    """A name that is no option's."""


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownOptionError at the first option whose name is not known."""
    known = sorted(known)
    for name in given:
        if name not in known:
            raise UnknownOptionError(f"unknown option {name}{did_you_mean(name, known)}")


class AudioWarning(UserWarning):
    """A recording that was read only in part."""
