"""Messages and progress on standard error while a command runs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from asrmask.errors import printable

LINES_S = 5  # seconds between progress lines without a terminal


class Advance:
    """Progress callback. This base class shows nothing; subclasses show lines or a bar.

    told:     description of the latest part
    is_whole: that part is complete
    """

    def __call__(self, done: float, total: int, told: str = "", is_whole: bool = False) -> None:
        """Report that `done` of `total` is finished."""


class Lines(Advance):
    """Progress as plain lines with the time left: one per complete part, others every LINES_S.

    The first call sets the starting point: work done before it does not count for the speed.
    """

    def __init__(self) -> None:
        self.begun: tuple[float, float] | None = None  # time and `done` at the first call
        self.said = 0.0  # time of the last line

    def __call__(self, done: float, total: int, told: str = "", is_whole: bool = False) -> None:
        now = time.monotonic()
        if self.begun is None:
            self.begun, self.said = (now, done), now
        if not told or not (is_whole or now - self.said >= LINES_S):
            return
        since, before = self.begun
        left_s = (now - since) * (total - done) / max(done - before, 1)
        left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
        say(f"{told}; {done} of {total} in all, {left} left")
        self.said = now


@contextmanager
def progress(title: str, has_lines: bool = False) -> Iterator[Advance]:
    """Show progress: a bar with the time left on a terminal, otherwise `title` as a line.

    has_lines: without a terminal, also print progress lines
    """
    if not sys.stderr.isatty():
        say(title)
        yield Lines() if has_lines else Advance()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    # standard output is printed above the bar if it is a terminal, and left alone otherwise
    bar = Progress(
        *columns,
        console=Console(stderr=True, highlight=False, soft_wrap=True),
        redirect_stdout=sys.stdout.isatty(),
        transient=True,
    )
    with bar:
        task = bar.add_task(printable(title), total=None)

        class Bar(Advance):
            def __call__(
                self, done: float, total: int, told: str = "", is_whole: bool = False
            ) -> None:
                bar.update(task, completed=min(done, total), total=total)

        yield Bar()


def say(text: str) -> None:
    """Print a message to standard error. Standard output is for results."""
    print(f"asrmask: {printable(text)}", file=sys.stderr, flush=True)
