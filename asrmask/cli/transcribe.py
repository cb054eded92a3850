"""asrmask transcribe: transcribe audio files to text and subtitles."""

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from asrmask.checkpoints.registry import DEFAULT
from asrmask.cli import Parser, boolean
from asrmask.errors import OptionError, counted
from asrmask.model.policy import ALLOWED
from asrmask.transcription.presets import FAST
from asrmask.transcription.punctuation import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS
from asrmask.transcription.writers import WRITERS, SubtitleLayout

if TYPE_CHECKING:
    from asrmask.decoding.options import DecodingOptions
    from asrmask.model.whisper import Whisper
    from asrmask.transcription.settings import Settings

USAGE = "FILE… [OPTION…]"


def formats(text: str) -> list[str]:
    """Parse the output formats: all, none, or comma-separated names."""
    listed = list(dict.fromkeys(name.strip() for name in text.split(",")))
    forms = {"all": list(WRITERS), "none": []}.get(text, listed)
    if wrong := [name for name in forms if name not in WRITERS]:
        known = ", ".join(WRITERS)
        raise argparse.ArgumentTypeError(
            f"expected all, none, or some of {known} with commas between, got {wrong[0]!r}"
        )
    return forms


def optional_int(text: str) -> int | None:
    try:
        return None if text == "None" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number or None, got {text!r}") from None


def optional_float(text: str) -> float | None:
    try:
        return None if text == "None" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or None, got {text!r}") from None


def flag(group: Any, name: str, help: str, *others: str, **options: Any) -> None:
    if options.get("default") is not None:
        help += f" (default: {options['default']})".replace("%", "%%")
    if options.get("type") is boolean:
        options["metavar"] = "[True|False]"
    group.add_argument(f"--{name}", *(f"--{other}" for other in others), help=help, **options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "audio", nargs="+", metavar="FILE", help="audio or video, a folder of it, or - for stdin"
    )
    add_model(parser)
    flag(parser, "fp16", "half precision on a GPU", type=boolean, default=True)
    add_speed(parser)

    group = parser.add_argument_group("output")
    group.add_argument("--output_dir", "-o", default=".", metavar="DIR", help="folder of the files")
    group.add_argument(
        "--output_format",
        "-f",
        default="all",
        type=formats,
        metavar="FORMAT,…",
        help=f"files to write: one or more of {', '.join(WRITERS)} with commas between, or all "
        "(default); none: text on standard output only",
    )
    flag(
        group,
        "verbose",
        "True: print segments with their times; False: print no text (default: text alone)",
        type=boolean,
    )
    told = "leave out files whose outputs are all there"
    flag(group, "skip_existing", told, type=boolean, default=False)
    flag(group, "highlight_words", "underline words as they are said", type=boolean, default=False)
    flag(group, "max_line_width", "characters in a subtitle's line", type=optional_int)
    flag(group, "max_line_count", "lines in a subtitle", type=optional_int)
    flag(group, "max_words_per_line", "words in a subtitle's line", type=optional_int)

    group = add_input_flags(parser, word_timestamps=False)
    flag(group, "hotwords", "names and terms that every window is told")
    flag(group, "prefix", "how the first text begins")
    told = "detect the language in every window"
    flag(group, "multilingual", told, type=boolean, default=False)
    told = "seconds of audio in a window, 1 to 30 (default: 30)"
    flag(group, "chunk_length", told, type=float)
    group = add_padding(parser)
    told = "in the JSON of every segment: the share of the decoder's attention on padding"
    flag(group, "diagnose", told, type=boolean, default=False)

    group = parser.add_argument_group("voice activity (Silero)")
    flag(group, "vad_filter", "only where there is speech", type=boolean, default=False)
    flag(group, "vad_threshold", "probability above which speech begins", type=float)
    flag(group, "vad_neg_threshold", "probability below which it ends", type=float)
    flag(group, "vad_min_speech_duration_ms", "shorter speech is dropped", type=int)
    flag(group, "vad_max_speech_duration_s", "longer speech is split", type=float)
    flag(group, "vad_min_silence_duration_ms", "shorter silence does not end speech", type=int)
    flag(group, "vad_speech_pad_ms", "kept before and after speech", type=int)
    group = add_search(parser)
    told = "above 1: what a text has already is less likely in it"
    flag(group, "repetition_penalty", told, type=float, default=1.0)
    told = "so many tokens in a row never come twice in a text; 0: they may"
    flag(group, "no_repeat_ngram_size", told, type=int, default=0)
    told = "most tokens of a window (default: half the context)"
    flag(group, "max_new_tokens", told, dest="sample_len", type=optional_int)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags for weights and device."""
    flag(parser, "model", "official name, or path of weights", default=DEFAULT)
    flag(parser, "model_dir", "where official models are kept (~/.cache/whisper)", metavar="DIR")
    flag(parser, "device", "cpu, cuda, … (default: a GPU if there is one)")
    told = "CPU threads; 0: as many as PyTorch chooses"
    flag(parser, "threads", told, type=optional_int, default=0)


def add_speed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speed")
    told = ", ".join(f"--{name} {value}" for name, value in FAST.flags.items())
    told = f"the quickest that keeps the word error rate: {told}"
    flag(group, "fast", told, type=boolean, default=False)
    flag(
        group,
        "compute_type",
        "float32, int8 (on a CPU), bfloat16 or float16 (default: float32, on a GPU see --fp16)",
        metavar="TYPE",
    )
    told = "windows decoded at a time, of several files or parts"
    flag(group, "batch_size", told, type=int, default=1)
    told = "read half minutes between pauses, each by itself, instead of one after the other"
    flag(group, "cut_at_pauses", told, type=boolean, default=False)
    told = "no times within a window: fewer tokens, and a segment is a whole window"
    flag(group, "without_timestamps", told, type=boolean, default=False)
    if isinstance(parser, Parser):
        parser.presets = {"--fast": FAST.flags}


def add_input_flags(parser: argparse.ArgumentParser, word_timestamps: bool) -> Any:
    """Add the flags for task, language, prompt and times; return their group."""
    group = parser.add_argument_group("what is heard")
    tasks = ["transcribe", "translate"]
    flag(group, "task", "X to X, or X to English", default="transcribe", choices=tasks)
    flag(group, "language", "code or English name (default: detected)")
    flag(group, "initial_prompt", "text before the first window: names, spelling, style")
    told = "it is put before every window"
    flag(group, "carry_initial_prompt", told, type=boolean, default=False)
    told = "each window is told the text before it"
    flag(group, "condition_on_previous_text", told, type=boolean, default=True)
    told = "start,end,start,end,… of the parts, in seconds"
    flag(group, "clip_timestamps", told, default="0")
    told = "find the time of each word"
    flag(group, "word_timestamps", told, type=boolean, default=word_timestamps)
    told = "joined to the word after them"
    flag(group, "prepend_punctuations", told, default=PREPEND_PUNCTUATIONS)
    told = "joined to the word before"
    flag(group, "append_punctuations", told, default=APPEND_PUNCTUATIONS)
    return group


def add_padding(parser: argparse.ArgumentParser) -> Any:
    """Add the flags for padding; return their group."""
    group = parser.add_argument_group("padding")
    flag(
        group,
        "padding",
        f"what the model may see of it: {ALLOWED}; default: full, all of it, as openai-whisper",
        metavar="POLICY",
    )
    group.add_argument(
        "--no_policy_fallback",
        dest="policy_fallback",
        action="store_false",
        help="keep texts that run away; default: decode them again with all of the padding",
    )
    return group


def add_search(parser: argparse.ArgumentParser) -> Any:
    """Add the flags for search and for the fallback thresholds; return their group."""
    group = parser.add_argument_group("search")
    flag(group, "temperature", "0: the likeliest text; above: drawn", type=float, default=0.0)
    flag(group, "best_of", "texts drawn at temperatures above 0", type=optional_int, default=5)
    flag(group, "beam_size", "beams at temperature 0; None: greedy", type=optional_int, default=5)
    flag(group, "patience", "of the beam, arXiv:2204.05424", type=float)
    told = "α of arXiv:1609.08144; default: divide by the length"
    flag(group, "length_penalty", told, type=float)
    told = "ids, comma-separated; -1: non-speech symbols"
    flag(group, "suppress_tokens", told, default="-1")
    flag(
        group,
        "temperature_increment_on_fallback",
        "step to the next temperature when a window fails a threshold below; None: no next one",
        type=optional_float,
        default=0.2,
    )
    told = "above: failed"
    flag(group, "compression_ratio_threshold", told, type=optional_float, default=2.4)
    told = "below, on average: failed"
    other = "log_prob_threshold"
    flag(group, "logprob_threshold", told, other, type=optional_float, default=-1.0)
    told = "above, and failed by log-probability: silence"
    flag(group, "no_speech_threshold", told, type=optional_float, default=0.6)
    flag(
        group,
        "hallucination_silence_threshold",
        "with word times: skip silences longer than that around suspicious text, in seconds",
        type=optional_float,
    )
    return group


def run(args: argparse.Namespace) -> int:
    from asrmask.console import say
    from asrmask.transcription import jobs

    layout = SubtitleLayout(**{f.name: getattr(args, f.name) for f in fields(SubtitleLayout)})
    if not args.word_timestamps:
        for name in [f.name for f in fields(SubtitleLayout) if getattr(layout, f.name)]:
            raise OptionError(f"--{name} needs --word_timestamps True, got it without")
    forms = args.output_format
    if args.diagnose and "json" not in forms:
        raise OptionError(
            f"--diagnose is for --output_format json or all, got {','.join(forms) or 'none'}"
        )
    if args.batch_size < 1:
        raise OptionError(f"--batch_size must be 1 or more, got {args.batch_size}")
    planned = jobs.plan(args.audio, args.output_dir, forms)
    settings, options = options_from_args(args)
    todo = [job for job in planned if not (args.skip_existing and job.is_done())]
    if len(todo) < len(planned):
        n_done = len(planned) - len(todo)
        say(f"outputs are there already: {n_done} of {counted(len(planned), 'file')}")
    if not todo:
        return 0
    model, options = load(args, options)
    callbacks = None
    if args.diagnose:
        from asrmask.inspection.diagnosis import Diagnose
        from asrmask.transcription.window_loop import Callbacks

        callbacks = Callbacks(on_window=Diagnose(model))
    return jobs.work(
        todo, model, settings, options, layout, args.verbose, callbacks, args.batch_size
    )


def options_from_args(args: argparse.Namespace) -> "tuple[Settings, DecodingOptions]":
    """Return the settings of the window loop and the decoding options from the flags."""
    import numpy as np

    from asrmask.audio.vad import VadOptions
    from asrmask.decoding.options import DecodingOptions
    from asrmask.tokenizer.languages import language_code
    from asrmask.transcription.settings import Settings, at_temperature

    named = vars(args)
    loop = {f.name: named[f.name] for f in fields(Settings) if f.name in named}
    step = args.temperature_increment_on_fallback
    if step is not None:
        if not step > 0:
            raise OptionError(f"temperature_increment_on_fallback must be above 0, got {step}")
        if 0 <= args.temperature <= 1:
            loop["temperature"] = tuple(np.arange(args.temperature, 1.0 + 1e-6, step).tolist())
    given = {f.name: named.get(f"vad_{f.name}") for f in fields(VadOptions)}
    loop["vad_parameters"] = {name: value for name, value in given.items() if value is not None}
    search = {f.name: named[f.name] for f in fields(DecodingOptions) if f.name in named}
    if args.language is not None:
        search["language"] = language_code(args.language)
    settings, options = Settings(**loop), DecodingOptions(**search)
    settings.check()
    for temperature in settings.temperatures:
        at_temperature(options, temperature).check()
    return settings, options


def load(args: argparse.Namespace, options: "DecodingOptions") -> "tuple[Whisper, DecodingOptions]":
    """Load the model, and remove options that it does not support."""
    import torch

    from asrmask.checkpoints import load_model
    from asrmask.console import say
    from asrmask.malloc import keep_freed_memory

    if args.threads is not None and args.threads < 0:
        raise OptionError(f"--threads must be 0 or more, got {args.threads}")
    if args.threads:
        torch.set_num_threads(args.threads)
    compute_type = getattr(args, "compute_type", None)
    if getattr(args, "fast", False) and _is_gpu(args.device):
        compute_type = None  # half precision on a GPU, see --fp16
    keep_freed_memory()
    model = load_model(
        args.model,
        device=args.device,
        download_root=args.model_dir,
        compute_type=compute_type,
    )
    if not model.is_multilingual and options.language not in {None, "en"}:
        say(f"{args.model} knows English only, --language {args.language} is left out")
        options = replace(options, language="en")
    if not model.is_multilingual and options.task != "transcribe":
        say(f"{args.model} knows English only, --task {options.task} is left out")
        options = replace(options, task="transcribe")
    if not model.is_multilingual and getattr(args, "multilingual", False):
        say(f"{args.model} knows English only, --multilingual is left out")
    return model, options


def _is_gpu(device: str | None) -> bool:
    import torch

    return torch.cuda.is_available() if device is None else not device.startswith("cpu")
