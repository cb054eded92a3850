"""asrmask ablate: measure the effect of hiding padding; write tables, plots and a page."""

import argparse
import shlex
import sys
from pathlib import Path

from asrmask.cli import boolean
from asrmask.errors import OptionError

USAGE = "[DATA] [--spec FILE | --preset NAME] [--out DIR]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        help="a manifest (.tsv, .jsonl) or a folder with one, LibriSpeech, or a data set of "
        "Hugging Face's saved to disk (default: the sample speech)",
    )
    parser.add_argument("--spec", metavar="FILE", help="the experiment, as TOML")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="quick, standard or full (default: standard; for the sample speech quick)",
    )
    parser.add_argument("--model", help="instead of the spec's models")
    parser.add_argument("--model_dir", metavar="DIR", help="where official models are kept")
    parser.add_argument("--out", default="ablation", metavar="DIR", help="default: ablation")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's choice")
    parser.add_argument(
        "--skip_bad",
        type=boolean,
        default=False,
        metavar="[True|False]",
        help="go on without clips that cannot be used (default: False)",
    )


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    import filelock
    import torch

    from asrmask.ablation import report, spec
    from asrmask.ablation.clips import sound_of
    from asrmask.ablation.run import run as work
    from asrmask.ablation.statistics import told_of
    from asrmask.evaluation import corpus
    from asrmask.model.virtual_padding import speech
    from asrmask.transcription.jobs import progress, say

    if args.spec and args.preset:
        raise OptionError("--spec and --preset exclude each other, got both")
    if args.preset is not None and args.preset not in spec.PRESETS:
        raise OptionError(f"--preset must be one of {', '.join(spec.PRESETS)}, got {args.preset}")
    if args.threads < 0:
        raise OptionError(f"--threads must be 0 or more, got {args.threads}")
    if args.threads:
        torch.set_num_threads(args.threads)
    preset = args.preset or ("standard" if args.data else "quick")
    wanted = spec.read(Path(args.spec)) if args.spec else spec.PRESETS[preset]
    if args.model:
        wanted = replace(wanted, models=(args.model,))
    source = Path(args.data) if args.data else speech()[0].parent
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out must be a folder, got {out} ({error.strerror})") from None
    lock = filelock.FileLock(out / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise OptionError(f"{out}: another run is at work in this folder") from None
    with lock:
        available = corpus.read(source)
        clips = available[: wanted.most_clips]
        say(f"{source}: {told_of(len(clips), len(available))} clips, looking for bad ones")
        seconds, bad = corpus.check(clips)
        for clip, why in bad.items():
            say(f"{'left out' if args.skip_bad else 'error'}: {clip}: {why}")
        if bad and not args.skip_bad:
            raise OptionError(
                f"{source}: {len(bad)} of {len(clips)} clips cannot be used; "
                f"--skip_bad goes on without them"
            )
        if not seconds:
            raise OptionError(f"{source}: no clip to work on, got {len(clips)}")
        sounds = [sound_of(clip, seconds[clip.id]) for clip in clips if clip.id in seconds]
        command = shlex.join(["asrmask", *sys.argv[1:]])
        with progress(f"{wanted.name}: {len(wanted.cells())} cells", has_lines=True) as advance:
            work(
                wanted,
                sounds,
                out,
                bad,
                len(available),
                advance,
                command,
                args.model_dir,
            )
        report.write([out], out)
    for sentence in report.verdict(report.load(out)):
        print(sentence)
    say(f"report: {out / 'report.html'}")
    return 0
