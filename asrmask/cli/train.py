"""asrmask train: adapt a model to speech and to padding masks; write an adapter and its curves."""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from asrmask.cli import boolean, flags
from asrmask.errors import OptionError

USAGE = "DATA [--spec FILE] [--out DIR] [--targets DIR]"
# fmt: off
FLAGS: list[flags.Flag] = [
    ("spec", "FILE", None, "what is trained and how, as TOML (default: an adapter for trim, which "
     "leaves full as it was)"),
    ("model", "MODEL", None, f"instead of the spec's model: {flags.WEIGHTS}"),
    flags.MODEL_DIR,
    flags.DEVICE,
    flags.THREADS,
    ("out", "DIR", "training", "folder for the adapter, checkpoints and the page; a run that was "
     "interrupted goes on from there"),
    ("targets", "DIR", None, "folder for the padded model's output, which runs on the same data "
     "may share (default: in --out)"),
    ("skip_bad", boolean, False, "continue without clips that cannot be used"),
]
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = (
        "a manifest (.tsv, .jsonl) or a folder with one, LibriSpeech, or a Hugging Face data set "
        "saved to disk; transcripts are needed only if the spec's losses use them"
    )
    parser.add_argument("data", metavar="DATA", help=text)
    flags.add_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    import filelock

    from asrmask.console import progress, say
    from asrmask.extras import require

    require("asrmask train", "jiwer", "matplotlib", "jinja2")
    from asrmask.checkpoints import load_model
    from asrmask.training import report
    from asrmask.training import spec as specs
    from asrmask.training.examples import usable
    from asrmask.training.trainer import Trainer

    flags.set_threads(args.threads)
    spec = specs.read(Path(args.spec)) if args.spec else specs.TrainSpec()
    spec = replace(spec, model=args.model or spec.model)
    clips, durations_s, bad = usable(Path(args.data), spec)
    for clip_id, problem in bad.items():
        say(f"{'left out' if args.skip_bad else 'error'}: {clip_id}: {problem}")
    if bad and not args.skip_bad:
        raise OptionError(
            f"{args.data}: {len(bad)} of {len(bad) + len(clips)} clips cannot be used; --skip_bad "
            f"continues without them"
        )
    out = flags.output_folder(args.out)
    targets = flags.output_folder(args.targets) if args.targets else None
    try:
        with filelock.FileLock(out / ".lock", timeout=0):
            model = load_model(spec.model, device=args.device, download_root=args.model_dir)
            command = shlex.join(["asrmask", *sys.argv[1:]])
            trainer = Trainer(spec, model, clips, durations_s, out, targets, command)
            title = f"{spec.train} of {spec.model}, {len(clips)} clips, {spec.steps} steps"
            with progress(title, has_lines=True) as advance:
                trainer.run(advance)
            report.write(out)
    except filelock.Timeout:
        raise OptionError(f"{out}: another run is at work in this folder") from None
    best = trainer.progress.best_step
    print(f"{out / trainer.weights.file_name}: step {best}, {trainer.validation.summary()}")
    say(f"page: {out / 'train.html'}")
    return 0
