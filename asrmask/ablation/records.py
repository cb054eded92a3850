"""Records of a run: one line of JSON for each cell and clip, appended and never changed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asrmask.errors import AsrmaskError


class RecordsError(AsrmaskError):
    """Records that cannot be read or continued."""


class Records:
    """The records file of a run, open for appending.

    A last line that was cut off when a run was killed is removed; the run computes it again.

    done: the (cell, clip) pairs in the file
    """

    def __init__(self, path: Path):
        self.done: set[tuple[str, str]] = set()
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self.done.update((record["cell"], record["clip"]) for record in read(path))
        self._file = path.open("ab")

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add records; they are on disk when this returns."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        self._file.write(lines.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.update((record["cell"], record["clip"]) for record in records)

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every complete record of a file, even while a run is writing to it."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    record = json.loads(line)
                    is_record = {"cell", "clip"} <= record.keys()
                except (ValueError, AttributeError, RecursionError):
                    is_record = False
                if not is_record:
                    place = f"{path}: line {number}"
                    raise RecordsError(f"{place}: expected a record, got {line[:60]!r}")
                yield record
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}, expected the records of a run") from None
