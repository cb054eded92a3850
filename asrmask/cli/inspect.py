"""asrmask inspect: show attention head by head, and how padding affects it."""

import argparse
import shlex
import sys
from pathlib import Path

from asrmask.checkpoints.registry import DEFAULT
from asrmask.errors import AsrmaskError, OptionError, counted
from asrmask.model.policy import ALLOWED, Policy

USAGE = "FILE… [--padding POLICY] [--against POLICY] [--out DIR]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="audio or video, a folder of it, or - for stdin"
    )
    parser.add_argument("--padding", default="full", metavar="POLICY", help=ALLOWED)
    parser.add_argument(
        "--against", metavar="POLICY", help="another, compared with it head by head"
    )
    parser.add_argument("--out", default="inspection", metavar="DIR", help="default: inspection")
    parser.add_argument("--model", default=DEFAULT, help="official name, or path of weights")
    parser.add_argument("--model_dir", metavar="DIR", help="where official models are kept")
    parser.add_argument("--language", help="code or English name (default: detected)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's choice")


def run(args: argparse.Namespace) -> int:
    policy = Policy.parse(args.padding)
    against = None if args.against is None else Policy.parse(args.against)
    if args.threads < 0:
        raise OptionError(f"--threads must be 0 or more, got {args.threads}")
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out must be a folder, got {out} ({error.strerror})") from None

    import torch

    from asrmask.checkpoints import load_model
    from asrmask.inspection import page
    from asrmask.inspection.inspection import Inspection
    from asrmask.tokenizer.languages import language_code
    from asrmask.transcription.jobs import check_folder, files_of, progress, say

    if args.threads:
        torch.set_num_threads(args.threads)
    language = None if args.language is None else language_code(args.language)
    files = list(dict.fromkeys(file for source in args.files for file in files_of(source)))
    model = load_model(args.model, device="cpu", download_root=args.model_dir)
    inspection = Inspection(model, policy, against)
    failed = []
    with progress(f"{counted(len(files), 'file')} under {args.padding}") as advance:
        for i, file in enumerate(files):
            try:
                check_folder(file)
                inspection.listen(file, language)
            except AsrmaskError as error:
                failed.append(file)
                say(f"error: {error}")
            advance(i + 1, len(files))
    if inspection.n_windows == 0:
        say(f"nothing to inspect: {len(failed)} of {counted(len(files), 'file')} failed")
        return 1
    command = shlex.join(["asrmask", *sys.argv[1:]])
    for sentence in page.verdict(inspection):
        print(sentence)
    for told in page.missing(inspection):
        say(told)
    written = page.write(inspection, out, args.model, command)
    say(f"page: {written[-1]}")
    if failed:
        say(f"{len(failed)} of {counted(len(files), 'file')} failed: {' '.join(failed)}")
    return 1 if failed else 0
