"""asrmask report: draw the report of a run again, or of several side by side."""

import argparse
from pathlib import Path

from asrmask.errors import OptionError, printable

USAGE = "DIR… [--out DIR]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of results of asrmask ablate, or of asrmask bench, or one of train"
    parser.add_argument("runs", nargs="+", metavar="DIR", help=text)
    text = "folder for the report (default: that of the results; for several: .)"
    parser.add_argument("--out", metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in args.runs]
    out = Path(args.out) if args.out else folders[0] if len(folders) == 1 else Path(".")
    if any((folder / "history.json").is_file() for folder in folders):
        return _training(folders, args.out)
    is_bench = [path.suffix == ".json" or (path / "bench.json").is_file() for path in folders]
    if any(is_bench) and not all(is_bench):
        raise OptionError("runs must be all of ablate or all of bench, got both")
    if all(is_bench):
        from asrmask.benchmark.report import write

        if out.suffix == ".json":
            out = out.parent
    else:
        from asrmask.ablation.report import write
    for path in write(folders, out):
        print(printable(str(path)))
    return 0


def _training(folders: list[Path], out: str | None) -> int:
    """Draw the page of a training run again."""
    from asrmask.training.report import write

    if len(folders) > 1 or out is not None:
        raise OptionError("a training run must be one folder without --out, got more")
    for path in write(folders[0]):
        print(printable(str(path)))
    return 0
