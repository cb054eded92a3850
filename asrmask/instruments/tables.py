"""Numbers as files: the same rows as Parquet and as CSV."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asrmask.files import replacing

Row = Mapping[str, Any]

# columns of what is known of each head: a quantity's mean over clips and its interval
HEADS: dict[str, type] = {
    "attention": str,
    "layer": int,
    "head": int,
    "quantity": str,
    "clips": int,
    "mean": float,
    "low": float,
    "high": float,
}


@dataclass
class Table:
    """Rows under named and typed columns; None where there is no data.

    columns: name → str, int or float
    """

    columns: dict[str, type]
    rows: list[Row] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        """A row; numbers that are none (NaN) become None."""
        assert set(values) == set(self.columns), sorted(set(values) ^ set(self.columns))
        self.rows.append({name: _cell(values[name]) for name in self.columns})

    def csv(self) -> str:
        """With a header; a cell without data is empty."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow(["" if row[name] is None else row[name] for name in self.columns])
        return out.getvalue()

    def parquet(self) -> bytes:
        """The same; a cell without data is null."""
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
    """NAME.parquet and NAME.csv of each table, each whole or not at all."""
    written: list[Path] = []
    for name, table in tables.items():
        for ending, content in (("parquet", table.parquet()), ("csv", table.csv())):
            path = folder / f"{name}.{ending}"
            with replacing(path, binary=isinstance(content, bytes)) as file:
                file.write(content)
            written.append(path)
    return written


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table for people."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
