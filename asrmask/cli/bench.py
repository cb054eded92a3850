"""asrmask bench: compare speed, memory and WER with other systems on your own files."""

import argparse
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from asrmask.checkpoints.registry import DEFAULT
from asrmask.errors import OptionError

USAGE = "[DATA…] [--systems SYSTEM…] [--settings greedy beam5] [--out DIR]"
SYSTEMS = (
    "asrmask",
    "asrmask:virtual",
    "openai-whisper",
    "faster-whisper:float32",
    "faster-whisper:int8",
    "faster-whisper:int8,batch=8",
    "whisper.cpp:f16",
    "whisper.cpp:q8_0",
    "whisper.cpp:q5_0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        nargs="*",
        metavar="DATA",
        help="folders with a manifest, or manifests; each is one work (default: the sample speech)",
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        metavar="SYSTEM",
        help=f"each a name with its settings (default, as far as installed: {' '.join(SYSTEMS)})",
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        metavar="SETTING",
        default=["greedy"],
        help="greedy, beam5, beam2, … (default: greedy)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of all systems in turn (default: 3)")
    parser.add_argument("--most", type=int, help="clips of each data set (default: all)")
    parser.add_argument(
        "--mixed",
        type=int,
        metavar="N",
        help="one more work: N clips of each data set, in turn",
    )
    parser.add_argument(
        "--scaling",
        nargs="*",
        metavar="AXIS",
        default=[],
        help="also how cost grows with: clip (its length), file (its length), batch (its size)",
    )
    parser.add_argument(
        "--longest",
        type=float,
        default=10,
        metavar="MINUTES",
        help="of the files of --scaling file (default: 10; at most 180)",
    )
    parser.add_argument("--model", default=DEFAULT, help=f"default: {DEFAULT}")
    parser.add_argument("--model_dir", metavar="DIR", help="where official models are kept")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all cores")
    parser.add_argument("--out", default="bench", metavar="DIR", help="default: bench")
    parser.add_argument(
        "--against", metavar="FILE", help="an older bench.json: ratios to it are printed"
    )


def run(args: argparse.Namespace) -> int:
    import os

    from asrmask.benchmark import report
    from asrmask.benchmark import run as bench
    from asrmask.benchmark.summary import against, markdown
    from asrmask.console import say
    from asrmask.evaluation import corpus
    from asrmask.model.virtual_padding import speech
    from asrmask.systems import KINDS, Named

    if args.threads < 0 or args.rounds < 1:
        name = "threads" if args.threads < 0 else "rounds"
        raise OptionError(f"--{name} must be positive, got {getattr(args, name)}")
    if wrong := [axis for axis in args.scaling if axis not in bench.SCALINGS]:
        raise OptionError(f"--scaling must be of {', '.join(bench.SCALINGS)}, got {wrong[0]!r}")
    named = [Named.parse(text) for text in args.systems or SYSTEMS]
    if args.systems is None:
        named = [one for one in named if find_spec(KINDS[one.name].package) is not None]
    for one in named:
        one.check()
    old = bench.read(Path(args.against)) if args.against else None
    works = []
    for source in map(Path, args.data or [speech()[0].parent]):
        clips = bench.sampled(corpus.read(source), args.most)
        if missing := [clip for clip in clips if not os.path.isfile(clip.path)]:
            raise OptionError(f"{source}: no such file: {missing[0].path}")
        works.append(bench.BenchmarkRun(source.name if source.is_dir() else source.stem, clips))
    if args.mixed is not None:
        works.append(bench.mixed(works, args.mixed))
    if len({work.name for work in works}) < len(works):
        raise OptionError("data sets must have different names, got the same twice")
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out must be a folder, got {out} ({error.strerror})") from None
    request = bench.Request(
        works,
        named,
        [decoding(text) for text in args.settings],
        args.rounds,
        args.model,
        args.model_dir,
        args.threads or os.cpu_count() or 1,
        args.scaling,
        args.longest,
        shlex.join(["asrmask", *sys.argv[1:]]),
    )
    result = bench.run(request, out, say)
    report.write([out], out)
    print(markdown(result))
    if old is not None:
        print("\n".join(against(result, old)))
    say(f"report: {out / 'bench.html'}")
    return 1 if any("error" in entry for entry in result["runs"]) else 0


def decoding(text: str):  # type: ignore[no-untyped-def]
    """Parse `greedy` or `beamN` into DecodingSettings."""
    from asrmask.systems import DecodingSettings

    size = text.removeprefix("beam")
    if text == "greedy":
        return DecodingSettings()
    if not text.startswith("beam") or not size.isdecimal() or int(size) < 1:
        raise OptionError(f"--settings must be of greedy, beam5, …, got {text!r}")
    return DecodingSettings(beam_size=int(size))
