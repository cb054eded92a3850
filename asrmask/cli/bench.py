"""asrmask bench: compare speed, memory and WER with other systems on your own files."""

import argparse
import os
import shlex
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrmask.checkpoints.registry import DEFAULT
from asrmask.cli import boolean
from asrmask.cli.flags import ADAPTER, MODEL_DIR, WEIGHTS, Flag, add_flags, output_folder
from asrmask.errors import OptionError

if TYPE_CHECKING:
    from asrmask.systems import Named

USAGE = "[DATA…] [--model MODEL…] [--systems SYSTEM…] [--settings greedy beam5] [--out DIR]"
SYSTEMS = (
    *("asrmask", "asrmask:virtual", "openai-whisper"),
    *("faster-whisper:float32", "faster-whisper:int8", "faster-whisper:int8,batch=8"),
    *("whisper.cpp:f16", "whisper.cpp:q8_0", "whisper.cpp:q5_0"),
)
DATA = "data sets: folders with a manifest, or manifests (default: the sample speech)"
# fmt: off
LISTS = {
    "model": ("MODEL", None, f"one or more of: {WEIGHTS} (default: {DEFAULT})"),
    "systems": ("SYSTEM", None, "systems, each with its settings after a colon (default, as far as "
                f"installed: {' '.join(SYSTEMS)})"),
    "settings": ("SETTING", ["greedy"], "greedy, beam5, beam2, … (default: greedy)"),
    "scaling": ("AXIS", [], "also measure how time grows with the length of a clip (clip), the "
                "length of a file (file), or the batch size (batch)"),
    "shape": ("NAME", [], "measure encoder and decoder by themselves, beside CTranslate2's, with "
              "random weights in the size of an official model"),
}
FLAGS: list[Flag] = [
    ADAPTER,
    ("longest", float, 10.0, "longest file of --scaling file, in minutes, up to 180"),
    ("rounds", int, 3, "rounds; in each, all systems take turns"),
    ("most", int, None, "maximum clips of each data set (default: all)"),
    ("mixed", int, None, "add a data set named mixed, with this many clips of each other one"),
    ("one_clip", float, None, "length in seconds of clips that are also timed one by one: the five "
     "that are closest to it (default: the first five)"),
    ("parts", boolean, False, "measure parts of the models as with --shape, and no clips"),
    MODEL_DIR,
    ("threads", int, 0, "number of CPU threads; 0: all cores"),
    ("out", "DIR", "bench", "folder for the results"),
    ("against", "FILE", None, "an older bench.json: also print ratios to it"),
    ("live", boolean, False, "measure live transcription instead: delay, errors, cost"),
    ("step", float, 0.3, "with --live: seconds of audio between two updates"),
    ("peers", "PYTHON", None, "with --live: also measure whisper-streaming and moonshine-voice, by "
     "a Python that has them"),
]
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="*", metavar="DATA", help=DATA)
    for name, (metavar, default, text) in LISTS.items():
        parser.add_argument(f"--{name}", nargs="+", metavar=metavar, default=default, help=text)
    add_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    if args.adapter is None:
        return _run(args)
    from asrmask.checkpoints import write_merged

    with tempfile.TemporaryDirectory() as folder:  # other systems read weights, not adapters
        args.model = [
            write_merged(name, args.adapter, Path(folder), args.model_dir)
            for name in args.model or [DEFAULT]
        ]
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from asrmask.benchmark import report
    from asrmask.benchmark import run as bench
    from asrmask.benchmark.summary import AXES, compare_benchmarks, markdown
    from asrmask.checkpoints import available_models
    from asrmask.console import say
    from asrmask.model.virtual_padding import speech

    if args.threads < 0 or args.rounds < 1:
        name = "threads" if args.threads < 0 else "rounds"
        raise OptionError(f"--{name} must be positive, got {getattr(args, name)}")
    if wrong := [axis for axis in args.scaling if axis not in AXES]:
        raise OptionError(f"--scaling must be of {', '.join(AXES)}, got {wrong[0]!r}")
    if wrong := [name for name in args.shape if name not in available_models()]:
        raise OptionError(f"--shape must be of {', '.join(available_models())}, got {wrong[0]!r}")
    if (args.parts or args.shape) and (args.data or args.scaling or args.systems):
        raise OptionError("--parts and --shape measure no clips, got data, --scaling or --systems")
    if args.live:
        return run_live(args)
    old = bench.read(Path(args.against)) if args.against else None
    clips: dict[str, Any] = {"clip_sets": [], "systems": [], "decodings": []}
    if not args.parts and not args.shape:
        sources = [Path(source) for source in args.data or [speech()[0].parent]]
        clips = {
            "systems": chosen_systems(args.systems),
            "clip_sets": bench.read_clip_sets(sources, args.most, args.mixed),
            "decodings": [bench.parse_decoding(text) for text in args.settings],
        }
    spec = bench.BenchmarkSpec(
        **clips,
        models=args.model or ([] if args.shape else [DEFAULT]),
        shapes=args.shape,
        parts=bool(args.parts or args.shape),
        one_clip_s=args.one_clip,
        rounds=args.rounds,
        model_dir=args.model_dir,
        threads=args.threads or os.cpu_count() or 1,
        scaling=args.scaling,
        longest_min=args.longest,
        command=shlex.join(["asrmask", *sys.argv[1:]]),
    )
    names = [*spec.names, *map(bench.shape_name, args.shape)]
    if len(set(names)) < len(names):
        raise OptionError(f"models must have different names, got {', '.join(names)}")
    out = output_folder(args.out)
    result = bench.run(spec, out)
    report.write([out], out)
    print(markdown(result))
    if old is not None:
        print("\n".join(compare_benchmarks(result, old)))
    say(f"report: {out / 'bench.html'}")
    return 1 if any("error" in entry for entry in result["runs"] + result["parts"]) else 0


def run_live(args: argparse.Namespace) -> int:
    """Run and report the benchmark of live transcription."""
    from asrmask.benchmark import live, live_report, live_summary
    from asrmask.benchmark import run as bench
    from asrmask.console import say
    from asrmask.model.virtual_padding import speech

    sources = [Path(source) for source in args.data or [speech()[0].parent]]
    spec = live.LiveSpec(
        models=args.model or [DEFAULT],
        clip_sets=bench.read_clip_sets(sources, args.most, None),
        threads=args.threads or os.cpu_count() or 1,
        command=shlex.join(["asrmask", *sys.argv[1:]]),
        step=args.step,
        peers=args.peers,
        model_dir=args.model_dir,
    )
    out = output_folder(args.out)
    result = live.run(spec, out)
    live_report.write(out)
    print(live_summary.markdown(result))
    say(f"report: {out / 'live.html'}")
    return 1 if any("error" in entry for entry in result["runs"]) else 0


def chosen_systems(texts: list[str] | None) -> "list[Named]":
    """Parse --systems; the default is all that are installed."""
    from asrmask.systems import KINDS, Named

    systems = [Named.parse(text) for text in texts or SYSTEMS]
    if texts is None:
        systems = [system for system in systems if find_spec(KINDS[system.name].package)]
    for system in systems:
        system.check()
    return systems
