"""asrmask ablate: measure the effect of hiding padding; write tables, plots and a page."""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrmask.cli import boolean
from asrmask.errors import OptionError

if TYPE_CHECKING:
    from asrmask.ablation.spec import Spec

USAGE = "[DATA] [--spec FILE | --preset NAME] [--out DIR]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        help="a manifest (.tsv, .jsonl) or a folder with one, LibriSpeech, or a "
        "Hugging Face data set saved to disk (default: the sample speech)",
    )
    parser.add_argument("--spec", metavar="FILE", help="the experiment, as TOML")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="quick, standard or full (default: standard; for the sample speech quick)",
    )
    parser.add_argument("--model", help="instead of the spec's models")
    parser.add_argument("--adapter", metavar="FILE", help="an adapter of asrmask train")
    parser.add_argument("--model_dir", metavar="DIR", help="where official models are kept")
    parser.add_argument("--out", default="ablation", metavar="DIR", help="default: ablation")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's choice")
    parser.add_argument(
        "--skip_bad",
        type=boolean,
        default=False,
        metavar="[True|False]",
        help="continue without clips that cannot be used (default: False)",
    )


def run(args: argparse.Namespace) -> int:
    import filelock
    import torch

    from asrmask.ablation import report
    from asrmask.console import say
    from asrmask.model.virtual_padding import speech

    if args.threads < 0:
        raise OptionError(f"--threads must be 0 or more, got {args.threads}")
    if args.threads:
        torch.set_num_threads(args.threads)
    spec = _read_spec(args)
    source = Path(args.data) if args.data else speech()[0].parent
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out must be a folder, got {out} ({error.strerror})") from None
    try:
        with filelock.FileLock(out / ".lock", timeout=0):
            _run(spec, source, out, args)
            report.write([out], out)
    except filelock.Timeout:
        raise OptionError(f"{out}: another run is at work in this folder") from None
    for sentence in report.verdict(report.load(out)):
        print(sentence)
    say(f"report: {out / 'report.html'}")
    return 0


def _read_spec(args: argparse.Namespace) -> "Spec":
    from asrmask.ablation import spec

    if args.spec and args.preset:
        raise OptionError("--spec and --preset exclude each other, got both")
    if args.preset is not None and args.preset not in spec.PRESETS:
        raise OptionError(f"--preset must be one of {', '.join(spec.PRESETS)}, got {args.preset}")
    preset = args.preset or ("standard" if args.data else "quick")
    chosen = spec.read(Path(args.spec)) if args.spec else spec.PRESETS[preset]
    chosen = replace(chosen, models=(args.model,)) if args.model else chosen
    return replace(chosen, adapter=args.adapter) if args.adapter else chosen


def _run(spec: "Spec", source: Path, out: Path, args: argparse.Namespace) -> None:
    """Check the clips, then compute the records."""
    from asrmask.ablation.clips import from_corpus
    from asrmask.ablation.run import run as run_ablation
    from asrmask.ablation.statistics import format_clip_count
    from asrmask.console import progress, say
    from asrmask.evaluation import corpus

    available = corpus.read(source)
    clips = available[: spec.most_clips]
    about: dict[str, Any] = {
        "n_available": len(available),
        "command": shlex.join(["asrmask", *sys.argv[1:]]),
    }
    say(f"{source}: {format_clip_count(len(clips), about)}, looking for bad ones")
    seconds, bad = corpus.check(clips)
    for clip_id, problem in bad.items():
        say(f"{'left out' if args.skip_bad else 'error'}: {clip_id}: {problem}")
    if bad and not args.skip_bad:
        raise OptionError(
            f"{source}: {len(bad)} of {len(clips)} clips cannot be used; "
            f"--skip_bad continues without them"
        )
    if not seconds:
        raise OptionError(f"{source}: no clip to work on, got {len(clips)}")
    about["left_out"] = bad
    usable = [from_corpus(clip, seconds[clip.id]) for clip in clips if clip.id in seconds]
    with progress(f"{spec.name}: {len(spec.cells())} cells", has_lines=True) as advance:
        run_ablation(spec, usable, out, about, advance, args.model_dir)
