"""Tables of results, written as Parquet, CSV and Markdown."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asrmask.reporting.pages import ReportFolder


@dataclass
class Table:
    """Rows with named and typed columns. Missing values are None.

    columns: name → str, int or float
    """

    columns: dict[str, type]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        """Append a row. NaN becomes None."""
        assert set(values) == set(self.columns), sorted(set(values) ^ set(self.columns))
        row = {name: values[name] for name in self.columns}
        nan = {name: None for name, x in row.items() if isinstance(x, float) and math.isnan(x)}
        self.rows.append(row | nan)

    def csv(self) -> str:
        """The table as CSV with a header. Missing values are empty."""
        out = io.StringIO()
        writer = csv.DictWriter(out, list(self.columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()

    def parquet(self) -> bytes:
        """The table as Parquet. Missing values are null."""
        import pyarrow
        import pyarrow.parquet

        types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
        schema = pyarrow.schema([(name, types[kind]) for name, kind in self.columns.items()])
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.rows, schema), out)
        return out.getvalue()


def save(tables: Mapping[str, Table], folder: Path) -> list[Path]:
    """Write each table to NAME.parquet and NAME.csv, atomically. Returns the paths."""
    files = ReportFolder(folder)
    for name, table in tables.items():
        files.save(f"{name}.parquet", table.parquet())
        files.save(f"{name}.csv", table.csv())
    return files.written


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]], rule: str = "---") -> str:
    """Format rows as a Markdown table.

    rule: below all headers but the first; "---:" aligns to the right
    """
    texts = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    return "\n".join([texts[0], "|---" + f"|{rule}" * (len(header) - 1) + "|", *texts[1:]])
