"""asrmask transcribe: audio files to text and subtitles."""

import argparse
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrmask.checkpoints.registry import DEFAULT
from asrmask.errors import AsrmaskError, AudioError, AudioWarning, OptionError

if TYPE_CHECKING:
    from asrmask.decode import DecodingOptions
    from asrmask.model import Whisper
    from asrmask.transcribe import Settings
    from asrmask.writers import Layout

FORMATS = ("txt", "vtt", "srt", "tsv", "json")


def boolean(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"


def optional_int(text: str) -> int | None:
    return None if text == "None" else int(text)


def optional_float(text: str) -> float | None:
    return None if text == "None" else float(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def flag(name: str, help: str, **options: Any) -> None:
        if options.get("default") is not None and "store" not in options.get("action", ""):
            help += f" (default: {options['default']})".replace("%", "%%")
        group.add_argument(f"--{name}", help=help, **options)

    group: Any = parser
    parser.add_argument("audio", nargs="+", metavar="FILE", help="audio or video; - for stdin")
    flag("model", "official name, or path of weights", default=DEFAULT)
    flag("model_dir", "where official models are kept (~/.cache/whisper)", metavar="DIR")
    flag("device", "cpu, cuda, … (default: a GPU if there is one)")
    flag("threads", "CPU threads; 0: as many as PyTorch chooses", type=optional_int, default=0)
    flag("fp16", "half precision on a GPU", type=boolean, default=True)

    group = parser.add_argument_group("output")
    group.add_argument("--output_dir", "-o", default=".", metavar="DIR", help="folder of the files")
    group.add_argument(
        "--output_format",
        "-f",
        default="all",
        choices=[*FORMATS, "all", "none"],
        help="files to write (default: all); none: text on standard output only",
    )
    flag(
        "verbose",
        "True: print segments with their times; False: print no text (default: text alone)",
        type=boolean,
    )
    flag("highlight_words", "underline words as they are said", type=boolean, default=False)
    flag("max_line_width", "characters in a subtitle's line", type=optional_int)
    flag("max_line_count", "lines in a subtitle", type=optional_int)
    flag("max_words_per_line", "words in a subtitle's line", type=optional_int)

    group = parser.add_argument_group("what is heard")
    flag(
        "task", "X to X, or X to English", default="transcribe", choices=["transcribe", "translate"]
    )
    flag("language", "code or English name (default: detected)")
    flag("initial_prompt", "text before the first window: names, spelling, style")
    flag("carry_initial_prompt", "it is put before every window", type=boolean, default=False)
    flag(
        "condition_on_previous_text",
        "each window is told the text before it",
        type=boolean,
        default=True,
    )
    flag("clip_timestamps", "start,end,start,end,… of the parts, in seconds", default="0")
    flag("word_timestamps", "find the time of each word", type=boolean, default=False)
    flag("prepend_punctuations", "joined to the word after them", default="\"'“¿([{-")
    flag("append_punctuations", "joined to the word before", default="\"'.。,，!！?？:：”)]}、")

    group = parser.add_argument_group("search")
    flag("temperature", "0: the likeliest text; above: drawn", type=float, default=0.0)
    flag("best_of", "texts drawn at temperatures above 0", type=optional_int, default=5)
    flag("beam_size", "beams at temperature 0; None: greedy", type=optional_int, default=5)
    flag("patience", "of the beam, arXiv:2204.05424", type=float)
    flag("length_penalty", "α of arXiv:1609.08144; default: divide by the length", type=float)
    flag("suppress_tokens", "ids, comma-separated; -1: non-speech symbols", default="-1")
    flag(
        "temperature_increment_on_fallback",
        "step to the next temperature when a window fails a threshold below; None: no next one",
        type=optional_float,
        default=0.2,
    )
    flag("compression_ratio_threshold", "above: failed", type=optional_float, default=2.4)
    flag("logprob_threshold", "below, on average: failed", type=optional_float, default=-1.0)
    flag(
        "no_speech_threshold",
        "above, and failed by log-probability: silence",
        type=optional_float,
        default=0.6,
    )
    flag(
        "hallucination_silence_threshold",
        "with word times: skip silences longer than that around suspicious text, in seconds",
        type=optional_float,
    )


def run(args: argparse.Namespace) -> int:
    from asrmask.writers import Layout

    layout = Layout(**{f.name: getattr(args, f.name) for f in fields(Layout)})
    if not args.word_timestamps:
        for name in [f.name for f in fields(Layout) if getattr(layout, f.name)]:
            raise OptionError(f"--{name} needs --word_timestamps True, got it without")
    jobs = plan(args)
    if args.output_format != "none":
        try:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"--output_dir must be a folder, got {args.output_dir} ({error.strerror})"
            ) from None
    settings, options = requested(args)
    model = load(args)
    if not model.is_multilingual and options.language not in {None, "en"}:
        _say(f"{args.model} knows English only: --language {args.language} is ignored")
    return work(jobs, model, settings, options, layout, args.verbose)


@dataclass(frozen=True)
class Job:
    """One file to transcribe, and the files to write."""

    source: str
    outputs: dict[str, Path]  # format → file


def plan(args: argparse.Namespace) -> list[Job]:
    """The jobs of a call; files whose outputs would have the same name keep their endings."""
    forms = FORMATS if args.output_format == "all" else (args.output_format,)
    if args.output_format == "none":
        forms = ()
    stems = Counter(_stem(source) for source in set(args.audio))
    jobs: list[Job] = []
    taken: dict[Path, str] = {}
    for source in dict.fromkeys(args.audio):
        stem = _stem(source)
        name = stem if stems[stem] == 1 else Path(source).name
        outputs = {form: Path(args.output_dir) / f"{name}.{form}" for form in forms}
        for path in outputs.values():
            if path in taken:
                raise OptionError(
                    f"{taken[path]} and {source} would both write {path}: "
                    "give them in separate calls with an --output_dir each"
                )
            taken[path] = source
        jobs.append(Job(source, outputs))
    return jobs


def _stem(source: str) -> str:
    return "stdin" if source == "-" else Path(source).stem


def requested(args: argparse.Namespace) -> "tuple[Settings, DecodingOptions]":
    """What the flags ask of the window loop and of the search."""
    import numpy as np

    from asrmask.decode import DecodingOptions
    from asrmask.tokenizer import language_code
    from asrmask.transcribe import Settings, at_temperature

    named = vars(args)
    loop = {f.name: named[f.name] for f in fields(Settings) if f.name in named}
    step = args.temperature_increment_on_fallback
    if step is not None:
        if step <= 0:
            raise OptionError(f"temperature_increment_on_fallback must be above 0, got {step}")
        loop["temperature"] = tuple(np.arange(args.temperature, 1.0 + 1e-6, step).tolist())
    search = {f.name: named[f.name] for f in fields(DecodingOptions) if f.name in named}
    if args.language is not None:
        search["language"] = language_code(args.language)
    settings, options = Settings(**loop), DecodingOptions(**search)
    for temperature in settings.temperatures:
        at_temperature(options, temperature).check()
    settings.clips(0)
    return settings, options


def load(args: argparse.Namespace) -> "Whisper":
    import torch

    from asrmask.checkpoints import load_model

    if args.threads:
        torch.set_num_threads(args.threads)
    return load_model(args.model, device=args.device, download_root=args.model_dir)


def work(
    jobs: list[Job],
    model: "Whisper",
    settings: "Settings",
    options: "DecodingOptions",
    layout: "Layout",
    verbose: bool | None,
) -> int:
    """Do every job; 1 if any failed, after all the others are done."""
    failed = 0
    for i, job in enumerate(jobs):
        name = "standard input" if job.source == "-" else job.source
        _say(f"[{i + 1}/{len(jobs)}] {name}")
        try:
            problems = transcribe_one(job, model, settings, options, layout, verbose)
        except AsrmaskError as error:
            problems = [str(error)]
        except KeyboardInterrupt:
            left = [other.source for other in jobs[i:]]
            _say(f"interrupted: {i} of {len(jobs)} files done, left: {' '.join(left)}")
            return 130
        for problem in problems:
            _say(f"error: {problem}")
        failed += bool(problems)
    if failed and len(jobs) > 1:
        _say(f"{failed} of {len(jobs)} files failed")
    return 1 if failed else 0


def transcribe_one(
    job: Job,
    model: "Whisper",
    settings: "Settings",
    options: "DecodingOptions",
    layout: "Layout",
    verbose: bool | None,
) -> list[str]:
    """Transcribe one file and write its outputs; what was wrong with it, if anything."""
    from asrmask.audio import HOP_LENGTH, Recording
    from asrmask.transcribe import Stream
    from asrmask.writers import line, save

    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AudioWarning)
        recording = Recording.open(job.source)
    name = "standard input" if job.source == "-" else job.source
    if recording.n_samples < HOP_LENGTH:
        raise AudioError(
            f"{name}: too short, got {recording.n_samples} samples, expected {HOP_LENGTH} or more"
        )
    if recording.is_silent():
        raise AudioError(f"{name}: pure silence, got {recording.n_samples} zeros, expected speech")
    running = Stream(model, recording, settings, options)
    if options.language is None and model.is_multilingual:
        _say(f"language: {running.language}")
    for segment in running:
        if verbose is not False and segment.text:
            print(line(segment) if verbose else segment.text.strip(), flush=True)
    result = running.result()
    for form, path in job.outputs.items():
        save(result, path, form, layout)
    took = time.perf_counter() - begun
    _say(f"{recording.duration_s:.1f} s of audio in {took:.1f} s")
    return [str(warning.message) for warning in caught]


def _say(text: str) -> None:
    print(f"asrmask: {text}", file=sys.stderr, flush=True)
