"""Messages and progress on standard error while a command runs."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asrmask.errors import printable

LINES_S = 5  # seconds between progress lines without a terminal

# called as f(done, total, message="", is_complete=False), see ProgressLines
ProgressCallback = Callable[..., None]


class ProgressLines:
    """Progress as lines with the time left: one per complete part, others every LINES_S.

    The first call sets the starting point: work done before it does not count for the speed.
    """

    def __init__(self) -> None:
        self.start: tuple[float, float] | None = None  # time and `done` at the first call
        self.last_line = 0.0  # its time

    def __call__(
        self, done: float, total: int, message: str = "", is_complete: bool = False
    ) -> None:
        """Report `done` of `total`. The message and is_complete are about the latest part."""
        now = time.monotonic()
        if self.start is None:
            self.start, self.last_line = (now, done), now
        if not message or not (is_complete or now - self.last_line >= LINES_S):
            return
        start, n_before = self.start
        left_s = (now - start) * (total - done) / max(done - n_before, 1)
        left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
        say(f"{message}; {done} of {total} in all, {left} left")
        self.last_line = now


@contextmanager
def progress(title: str, has_lines: bool = False) -> Iterator[ProgressCallback]:
    """Show progress: a bar with the time left on a terminal, otherwise `title` as a line.

    has_lines: without a terminal, also print progress lines
    """
    if not sys.stderr.isatty():
        say(title)
        yield ProgressLines() if has_lines else lambda *args, **options: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    # standard output is printed above the bar if it is a terminal, and left alone otherwise
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False, soft_wrap=True),
        redirect_stdout=sys.stdout.isatty(),
        transient=True,
    )
    with bar:
        task = bar.add_task(printable(title), total=None)
        yield lambda done, total, *_, **options: bar.update(
            task, completed=min(done, total), total=total
        )


def say(text: str) -> None:
    """Print a message to standard error. Standard output is for results."""
    print(f"asrmask: {printable(text)}", file=sys.stderr, flush=True)
