"""Tables of results, written as Parquet and CSV."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asrmask.files import atomic_write

Row = Mapping[str, Any]


@dataclass
class Table:
    """Rows with named and typed columns. Missing values are None.

    columns: name → str, int or float
    """

    columns: dict[str, type]
    rows: list[Row] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        """Append a row. NaN becomes None."""
        assert set(values) == set(self.columns), sorted(set(values) ^ set(self.columns))
        self.rows.append({name: _cell(values[name]) for name in self.columns})

    def csv(self) -> str:
        """The table as CSV with a header. Missing values are empty."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow(["" if row[name] is None else row[name] for name in self.columns])
        return out.getvalue()

    def parquet(self) -> bytes:
        """The table as Parquet. Missing values are null."""
        import pyarrow
        import pyarrow.parquet

        types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
        arrays = {
            name: pyarrow.array([row[name] for row in self.rows], type=types[kind])
            for name, kind in self.columns.items()
        }
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(arrays), out)
        return out.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    return value


def save(tables: Mapping[str, Table], folder: Path) -> list[Path]:
    """Write each table to NAME.parquet and NAME.csv, atomically. Returns the paths."""
    written: list[Path] = []
    for name, table in tables.items():
        for ending, content in (("parquet", table.parquet()), ("csv", table.csv())):
            path = folder / f"{name}.{ending}"
            with atomic_write(path, binary=isinstance(content, bytes)) as file:
                file.write(content)
            written.append(path)
    return written


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
