"""The exceptions of this package, all in one tree.

    AsrmaskError
    ├── AudioError        a recording that cannot be read, or holds nothing to read
    ├── CheckpointError   weights that are missing, damaged or of another shape
    └── OptionError       a value that is not allowed (also a ValueError)

Each message says what, what was got and what was expected, in one line.
"""


def printable(text: str) -> str:
    """The text in one line: characters that would break it are spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(error: object) -> str:
    """The text of an error, without the line breaks that other libraries put into theirs."""
    return " ".join(str(error).split()) or type(error).__name__


class AsrmaskError(Exception):
    """Base of every error that asrmask raises on purpose."""


class AudioError(AsrmaskError):
    """A recording that cannot be read, or that holds nothing to read."""


class CheckpointError(AsrmaskError):
    """Weights that are missing, damaged or of another shape."""


class OptionError(AsrmaskError, ValueError):
    """A value that is not allowed."""


class AudioWarning(UserWarning):
    """A recording that was read only in part."""
