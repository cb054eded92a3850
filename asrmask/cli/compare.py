"""asrmask compare: run other systems and asrmask on the same weights, and show differences."""

import argparse
import json
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from asrmask.cli import transcribe
from asrmask.errors import AsrmaskError, MissingPackageError, OptionError, os_problem, printable

USAGE = "FILE… [--against SYSTEM,…] [--padding POLICY] [--json FILE] [--out DIR] [OPTION…]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "audio",
        nargs="+",
        metavar="FILE",
        help="audio or video, a folder of it, or a data set with transcripts (a manifest .tsv or "
        ".jsonl or a folder with one, LibriSpeech, a data set of Hugging Face's on disk)",
    )
    transcribe.add_model(parser)
    parser.add_argument(
        "--against",
        action="append",
        metavar="SYSTEM,…",
        help="openai-whisper (default), faster-whisper, whisper.cpp, transformers",
    )
    parser.add_argument("--reference", metavar="FILE", help="the transcript, if there is one file")
    parser.add_argument("--json", metavar="FILE", help="everything, as JSON; - for stdout")
    parser.add_argument("--out", metavar="DIR", help="folder for compare.html")
    transcribe.add_input_flags(parser, word_timestamps=True)
    transcribe.add_padding(parser)
    transcribe.add_search(parser)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 equal within tolerance, 1 not equal, 2 an error."""
    from asrmask.console import say

    try:
        return _run(args)
    except (MissingPackageError, BrokenPipeError):
        raise
    except AsrmaskError as error:
        say(f"error: {error}")
    except OSError as error:
        say(f"error: {os_problem(error)}, expected a file or folder that can be used")
    except Exception:  # Python would exit with 1, which means not equal
        traceback.print_exc()
    return 2


def _run(args: argparse.Namespace) -> int:
    import torch

    from asrmask.checkpoints import write_merged
    from asrmask.comparison import report
    from asrmask.comparison.run import OPENAI, Comparison, find_clips, load_peers, parse_systems
    from asrmask.console import say
    from asrmask.files import atomic_write

    names = parse_systems(args.against or [OPENAI])
    clips = find_clips(args.audio, _read_text(args.reference) if args.reference else None)
    if not clips:
        raise OptionError(f"expected clips to compare, got none in {' '.join(args.audio)}")
    settings, options = transcribe.options_from_args(args)
    page = Path(args.out) / "compare.html" if args.out else None
    json_file = Path(args.json) if args.json and args.json != "-" else None
    for path in filter(None, (page, json_file)):  # before the work starts
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise OptionError(f"expected a file to write, got the folder {path}")
    model, options = transcribe.load(args, options)
    about = {
        "command": shlex.join(["asrmask", *sys.argv[1:]]),
        "model": args.model if args.adapter is None else f"{args.model} with {args.adapter}",
        "padding": str(settings.policy),
        "decoding": "greedy" if args.beam_size is None else f"beam {args.beam_size}",
        "task": args.task,
        "threads": torch.get_num_threads(),
    }
    files: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    table = sys.stderr if args.json == "-" else sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        source = args.model
        if args.adapter is not None:  # the others read weights, not adapters
            source = write_merged(args.model, args.adapter, Path(folder), args.model_dir)
        peers = list(load_peers(names, model, source, args.model_dir, Path(folder)))
        comparison = Comparison(model, peers, settings, options)
        print(report.format_row(names, *report.HEADINGS), file=table)
        for clip in clips:
            try:
                files.append(comparison.compare(clip))
            except AsrmaskError as error:
                failed[str(clip.path)] = str(error)
                say(f"error: {error}")
                continue
            for line in report.format_file(files[-1]):
                print(printable(line), file=table, flush=True)
    data = report.summarise(about, names, files, failed)
    for line in report.format_totals(data):
        print(printable(line), file=table)
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    if args.json == "-":
        print(text)
    if json_file:
        with atomic_write(json_file) as file:
            file.write(text + "\n")
    if page:
        with atomic_write(page) as file:
            file.write(report.render_page(data))
        say(f"page: {page}")
    return data["exit_code"]


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--reference must be a text file, got {path} ({error})") from None
