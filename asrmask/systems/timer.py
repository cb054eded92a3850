"""Time the parts of a system by wrapping its functions."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

PARTS = ("audio", "spectrogram", "encoder", "decoder")


class Timer:
    """Seconds spent in each part; time in a nested part counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._within: list[str] = []
        self._since = 0.0

    def reset(self) -> None:
        for name in self.seconds:
            self.seconds[name] = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._settle()
        self._within.append(name)
        try:
            yield
        finally:
            self._settle()
            self._within.pop()

    def _settle(self) -> None:
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts for a part."""

        @wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        return wrapper

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Replace a method (or a module's function) with a timed one."""
        setattr(owner, method, self.timed(name, getattr(owner, method)))
