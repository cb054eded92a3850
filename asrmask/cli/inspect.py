"""asrmask inspect: show attention head by head, and how padding affects it."""

import argparse
import shlex
import sys

from asrmask.cli import flags
from asrmask.errors import AsrmaskError, counted
from asrmask.model.policy import Policy

USAGE = "FILE… [--padding POLICY] [--against POLICY] [--out DIR]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help=flags.FILES)
    against = ("against", "POLICY", None, "another policy, which is compared with it head by head")
    out = ("out", "DIR", "inspection", "folder for the page and its data")
    flags.add_flags(
        parser, [flags.PADDING, against, *flags.MODEL, flags.LANGUAGE, flags.THREADS, out]
    )


def run(args: argparse.Namespace) -> int:
    policy = Policy.parse(args.padding)
    against = None if args.against is None else Policy.parse(args.against)
    flags.set_threads(args.threads)
    out = flags.output_folder(args.out)

    from asrmask.checkpoints import load_model
    from asrmask.console import progress, say
    from asrmask.inspection import page
    from asrmask.inspection.inspection import Inspection
    from asrmask.tokenizer.languages import language_code
    from asrmask.transcription.jobs import check_folder, files_of

    language = None if args.language is None else language_code(args.language)
    files = list(dict.fromkeys(file for source in args.files for file in files_of(source)))
    model = load_model(args.model, device="cpu", download_root=args.model_dir, adapter=args.adapter)
    inspection = Inspection(model, policy, against)
    failed = []
    with progress(f"{counted(len(files), 'file')} under {args.padding}") as advance:
        for i, file in enumerate(files):
            try:
                check_folder(file)
                inspection.add(file, language)
            except AsrmaskError as error:
                failed.append(file)
                say(f"error: {error}")
            advance(i + 1, len(files))
    if inspection.n_windows == 0:
        say(f"nothing to inspect: {len(failed)} of {counted(len(files), 'file')} failed")
        return 1
    print("\n".join(page.verdict(inspection)))
    for message in page.missing(inspection):
        say(message)
    written = page.write(inspection, out, args.model, shlex.join(["asrmask", *sys.argv[1:]]))
    say(f"page: {written[-1]}")
    if failed:
        say(f"{len(failed)} of {counted(len(files), 'file')} failed: {' '.join(failed)}")
    return 1 if failed else 0
