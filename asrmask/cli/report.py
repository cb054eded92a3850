"""asrmask report: draw the report of a run again, or of several side by side."""

import argparse
from pathlib import Path

USAGE = "DIR… [--out DIR]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="DIR", help="folders of `asrmask ablate`")
    parser.add_argument("--out", metavar="DIR", help="default: the run itself, or . for several")


def run(args: argparse.Namespace) -> int:
    from asrmask.experiments import report

    folders = [Path(folder) for folder in args.runs]
    out = Path(args.out) if args.out else folders[0] if len(folders) == 1 else Path(".")
    for path in report.write(folders, out):
        print(path)
    return 0
