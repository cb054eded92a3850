"""asrmask compare: run other systems and asrmask on the same weights, and show differences."""

import argparse
import json
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrmask.cli import transcribe
from asrmask.errors import AsrmaskError, MissingPackageError, OptionError, os_problem, printable

if TYPE_CHECKING:
    from asrmask.comparison.peers import Peer
    from asrmask.model.whisper import Whisper

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
    parser.add_argument("--reference", metavar="FILE", help="what is said in the one file, as text")
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
    except MissingPackageError:
        raise
    except AsrmaskError as error:
        say(f"error: {error}")
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"error: {os_problem(error)}, expected a file or folder that can be used")
        return 2
    except Exception:  # Python would exit with 1, which means not equal
        traceback.print_exc()
        return 2


def _run(args: argparse.Namespace) -> int:
    from asrmask.comparison import page, report
    from asrmask.comparison.run import Comparison, clips_of
    from asrmask.console import say

    names = _names(args.against)
    clips = clips_of(args.audio, _text(args.reference))
    if not clips:
        raise OptionError(f"expected clips to compare, got none in {' '.join(args.audio)}")
    settings, options = transcribe.options_from_args(args)
    for path in (args.out and Path(args.out, "compare.html"), args.json):
        if path and path != "-":
            _check_target(Path(path))
    model, options = transcribe.load(args, options)
    found = report.Report(_about(args, settings), names)
    table = sys.stderr if args.json == "-" else sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        opponents = _opponents(names, model, args, Path(folder))
        comparison = Comparison(model, opponents, settings, options)
        print(report.head(names), file=table)
        for clip in clips:
            try:
                compared = comparison.compare(clip)
            except AsrmaskError as error:
                found.failed[str(clip.path)] = str(error)
                say(f"error: {error}")
                continue
            found.found.append(compared)
            for line in report.lines(compared):
                print(printable(line), file=table, flush=True)
    for line in report.ending(found):
        print(printable(line), file=table)
    data = found.as_dict()
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    if args.json == "-":
        print(text)
    elif args.json:
        _write(Path(args.json), text + "\n")
    if args.out:
        _write(Path(args.out) / "compare.html", page.render(data))
        say(f"page: {Path(args.out) / 'compare.html'}")
    return found.exit_code


def _names(given: list[str] | None) -> list[str]:
    """Return the requested systems in order, without duplicates."""
    from asrmask.comparison.peers import OPENAI
    from asrmask.systems import KINDS, Named

    names: list[str] = []
    for part in ",".join(given or [OPENAI]).split(","):
        if part.partition(":")[0] in KINDS or not names:
            names.append(part)
        else:  # a setting of the previous system
            names[-1] += f",{part}"
    names = list(dict.fromkeys(names))
    for name in names:
        if name.partition(":")[0] == "asrmask":
            raise OptionError("--against must name another system, got asrmask")
        Named.parse(name).check()
    return names


def _opponents(
    names: list[str], model: "Whisper", args: argparse.Namespace, folder: Path
) -> "list[Peer]":
    """Load the systems with the same weights and thread count; folder: for their weights."""
    import torch

    from asrmask import systems
    from asrmask.comparison.peers import OPENAI, TextPeer, UpstreamPeer, failing
    from asrmask.systems import upstream

    found: list[Peer] = []
    for name in names:
        if name == OPENAI:
            found.append(UpstreamPeer(upstream.twin(model)))
            continue
        named = systems.Named.parse(name)
        threads = torch.get_num_threads()
        with failing(name):
            weights = systems.prepare(named, args.model, folder, args.model_dir)
            system = systems.load(named, weights, threads=threads, model_dir=args.model_dir)
        found.append(TextPeer(name, system))
    return found


def _text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--reference must be a text file, got {path} ({error})") from None


def _check_target(path: Path) -> None:
    """Raise OptionError unless a file can be written there. Called before the work starts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"expected a folder to write, got {path.parent} ({error.strerror})"
        ) from None
    if path.is_dir():
        raise OptionError(f"expected a file to write, got the folder {path}")


def _write(path: Path, text: str) -> None:
    from asrmask.files import atomic_write

    try:
        with atomic_write(path) as file:
            file.write(text)
    except OSError as error:
        raise OptionError(f"expected to write {path}, got: {error.strerror}") from None


def _about(args: argparse.Namespace, settings: Any) -> dict[str, Any]:
    import torch

    return {
        "command": shlex.join(["asrmask", *sys.argv[1:]]),
        "model": args.model,
        "padding": str(settings.policy),
        "decoding": "greedy" if args.beam_size is None else f"beam {args.beam_size}",
        "task": args.task,
        "threads": torch.get_num_threads(),
    }
