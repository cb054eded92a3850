"""asrmask bench: compare speed, memory and WER with other systems on your own files."""

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from asrmask.cli.flags import MODEL, Flag, add_flags, output_folder
from asrmask.errors import OptionError

USAGE = "[DATA…] [--systems SYSTEM…] [--settings greedy beam5] [--out DIR]"
SYSTEMS = (
    *("asrmask", "asrmask:virtual", "openai-whisper"),
    *("faster-whisper:float32", "faster-whisper:int8", "faster-whisper:int8,batch=8"),
    *("whisper.cpp:f16", "whisper.cpp:q8_0", "whisper.cpp:q5_0"),
)
DATA = "data sets: folders with a manifest, or manifests (default: the sample speech)"
# fmt: off
LISTS = {
    "systems": ("SYSTEM", None, "systems, each with its settings after a colon (default, as far as "
                f"installed: {' '.join(SYSTEMS)})"),
    "settings": ("SETTING", ["greedy"], "greedy, beam5, beam2, … (default: greedy)"),
    "scaling": ("AXIS", [], "also measure how time grows with the length of a clip (clip), the "
                "length of a file (file), or the batch size (batch)"),
}
FLAGS: list[Flag] = [
    ("longest", float, 10.0, "longest file of --scaling file, in minutes, up to 180"),
    ("rounds", int, 3, "rounds; in each, all systems take turns"),
    ("most", int, None, "maximum clips of each data set (default: all)"),
    ("mixed", int, None, "add a data set named mixed, with this many clips of each other one"),
    *MODEL,
    ("threads", int, 0, "number of CPU threads; 0: all cores"),
    ("out", "DIR", "bench", "folder for the results"),
    ("against", "FILE", None, "an older bench.json: also print ratios to it"),
]
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="*", metavar="DATA", help=DATA)
    for name, (metavar, default, text) in LISTS.items():
        parser.add_argument(f"--{name}", nargs="+", metavar=metavar, default=default, help=text)
    add_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    from asrmask.benchmark import report
    from asrmask.benchmark import run as bench
    from asrmask.benchmark.summary import AXES, compare_benchmarks, markdown
    from asrmask.console import say
    from asrmask.model.virtual_padding import speech
    from asrmask.systems import KINDS, Named

    if args.threads < 0 or args.rounds < 1:
        name = "threads" if args.threads < 0 else "rounds"
        raise OptionError(f"--{name} must be positive, got {getattr(args, name)}")
    if wrong := [axis for axis in args.scaling if axis not in AXES]:
        raise OptionError(f"--scaling must be of {', '.join(AXES)}, got {wrong[0]!r}")
    systems = [Named.parse(text) for text in args.systems or SYSTEMS]
    if args.systems is None:
        systems = [system for system in systems if find_spec(KINDS[system.name].package)]
    for system in systems:
        system.check()
    old = bench.read(Path(args.against)) if args.against else None
    sources = [Path(source) for source in args.data or [speech()[0].parent]]
    spec = bench.BenchmarkSpec(
        clip_sets=bench.read_clip_sets(sources, args.most, args.mixed),
        systems=systems,
        decodings=[bench.parse_decoding(text) for text in args.settings],
        rounds=args.rounds,
        model=args.model,
        model_dir=args.model_dir,
        threads=args.threads or os.cpu_count() or 1,
        scaling=args.scaling,
        longest_min=args.longest,
        command=shlex.join(["asrmask", *sys.argv[1:]]),
    )
    out = output_folder(args.out)
    result = bench.run(spec, out)
    report.write([out], out)
    print(markdown(result))
    if old is not None:
        print("\n".join(compare_benchmarks(result, old)))
    say(f"report: {out / 'bench.html'}")
    return 1 if any("error" in entry for entry in result["runs"]) else 0
