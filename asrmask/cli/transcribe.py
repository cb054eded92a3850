"""asrmask transcribe: transcribe audio files to text and subtitles."""

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from asrmask.cli import Parser, boolean, flags
from asrmask.cli.flags import Flag, add_flags, optional_float, optional_int
from asrmask.errors import OptionError, counted
from asrmask.model.policy import ALLOWED
from asrmask.transcription.presets import FAST
from asrmask.transcription.punctuation import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS
from asrmask.transcription.writers import WRITERS, SubtitleLayout

if TYPE_CHECKING:
    from asrmask.decoding.options import DecodingOptions
    from asrmask.model.whisper import Whisper
    from asrmask.transcription.jobs import JobRunner
    from asrmask.transcription.settings import Settings

USAGE = "FILE… [OPTION…]"
FAST_FLAGS = ", ".join(f"--{name} {value}" for name, value in FAST.flags.items())


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


flags.METAVARS[formats] = "FORMAT,…"
# fmt: off
SPEED: list[Flag] = [
    ("fp16", boolean, True, "half precision on a GPU"),
    ("fast", boolean, False, f"fastest settings that keep the word error rate: {FAST_FLAGS}"),
    ("compute_type", "TYPE", None,
     "float32, int8 (CPU only), bfloat16 or float16 (default: float32; on a GPU see --fp16)"),
    ("batch_size", int, 1, "windows decoded together, from several files or parts of a file"),
    ("cut_at_pauses", boolean, False,
     "cut recordings at pauses into parts of up to 30 s, which are decoded independently"),
    ("without_timestamps", boolean, False,
     "no timestamp tokens: faster, but each segment is a whole window"),
]
OUTPUT: list[Flag] = [
    ("output_dir o", "DIR", ".", "folder for the outputs"),
    ("output_format f", formats, "all",
     f"comma-separated: {', '.join(WRITERS)}; all; none: print the text only"),
    ("verbose", boolean, None,
     "True: print segments with timestamps; False: print no text (default: text only)"),
    ("skip_existing", boolean, False, "skip files whose outputs all exist"),
]
SUBTITLES: list[Flag] = [
    ("highlight_words", boolean, False, "underline each word as it is spoken in srt and vtt"),
    ("max_line_width", optional_int, None, "maximum characters in a line"),
    ("max_line_count", optional_int, None, "maximum lines in a subtitle"),
    ("max_words_per_line", optional_int, None, "maximum words in a line"),
]
INPUT: list[Flag] = [
    ("task", ("transcribe", "translate"), "transcribe",
     "transcribe speech in its language, or translate it to English"),
    flags.LANGUAGE,
    ("initial_prompt", "TEXT", None,
     "text given as a prompt for the first window: names, spelling, style"),
    ("carry_initial_prompt", boolean, False, "give the initial prompt to every window"),
    ("condition_on_previous_text", boolean, True,
     "give the text of the previous windows as a prompt for the next window"),
    ("clip_timestamps", "TIMES", "0",
     "start,end,start,end,… of the parts to transcribe, in seconds; the last end may be left out"),
]
PUNCTUATION: list[Flag] = [
    ("prepend_punctuations", "TEXT", PREPEND_PUNCTUATIONS, "symbols merged with the next word"),
    ("append_punctuations", "TEXT", APPEND_PUNCTUATIONS, "symbols merged with the previous word"),
]
EXTRA_INPUT: list[Flag] = [
    ("hotwords", "TEXT", None, "names and terms, given to every window as a prompt"),
    ("prefix", "TEXT", None, "text that the first window begins with"),
    ("multilingual", boolean, False, "detect the language of every window"),
    ("chunk_length", float, None, "seconds of audio in a window, 1 to 30 (default: 30)"),
]
VAD: list[Flag] = [
    ("vad_filter", boolean, False, "transcribe only the parts with speech"),
    ("vad_threshold", float, None, "speech starts above this probability"),
    ("vad_neg_threshold", float, None, "speech ends below this probability"),
    ("vad_min_speech_duration_ms", int, None, "drop shorter speech"),
    ("vad_max_speech_duration_s", float, None, "split longer speech"),
    ("vad_min_silence_duration_ms", int, None, "a shorter silence does not end speech"),
    ("vad_speech_pad_ms", int, None, "added before and after speech"),
]
SEARCH: list[Flag] = [
    ("temperature", float, 0.0, "sampling temperature; 0: no sampling"),
    ("best_of", optional_int, 5, "number of candidates when sampling with non-zero temperature"),
    ("beam_size", optional_int, 5, "number of beams at temperature 0; None: greedy"),
    ("patience", float, None, "patience of beam search, arXiv:2204.05424 (default: 1.0)"),
    ("length_penalty", float, None,
     "length penalty α, arXiv:1609.08144 (default: divide by the length)"),
    ("suppress_tokens", "IDS", "-1",
     "comma-separated token ids that are never decoded; -1: most special characters"),
    ("temperature_increment_on_fallback", optional_float, 0.2,
     "added to the temperature when decoding fails a threshold below; None: no fallback"),
    ("compression_ratio_threshold", optional_float, 2.4,
     "decoding fails if the gzip compression ratio of the text is higher"),
    ("logprob_threshold log_prob_threshold", optional_float, -1.0,
     "decoding fails if the average log probability is lower"),
    ("no_speech_threshold", optional_float, 0.6,
     "a window is silence if the probability of <|nospeech|> is higher and the log probability "
     "fails"),
    ("hallucination_silence_threshold", optional_float, None,
     "with word timestamps: skip longer silences around possible hallucinations, in seconds"),
]
EXTRA_SEARCH: list[Flag] = [
    ("repetition_penalty", float, 1.0, "above 1: tokens that the text has already are less likely"),
    ("no_repeat_ngram_size", int, 0, "never repeat this many tokens in a row; 0: no limit"),
    ("sample_len max_new_tokens", optional_int, None,
     "maximum tokens of a window (default: half the context)"),
]
# fmt: on


def add_arguments(parser: Parser) -> None:
    parser.add_argument("audio", nargs="+", metavar="FILE", help=flags.FILES)
    add_model(parser)
    parser.presets = {"--fast": FAST.flags}
    add_flags(parser.add_argument_group("speed"), SPEED)
    add_flags(parser.add_argument_group("output"), OUTPUT)
    add_flags(parser.add_argument_group("subtitles (need --word_timestamps)"), SUBTITLES)
    add_flags(add_input_flags(parser, word_timestamps=False), EXTRA_INPUT)
    text = "write the share of the decoder's attention on padding to the JSON of every segment"
    add_flags(add_padding(parser), [("diagnose", boolean, False, text)])
    add_flags(parser.add_argument_group("voice activity detection (Silero VAD)"), VAD)
    add_flags(add_search(parser), EXTRA_SEARCH)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags for weights and device."""
    add_flags(parser, [*flags.MODEL, flags.DEVICE, flags.THREADS])


def add_input_flags(parser: argparse.ArgumentParser, word_timestamps: bool) -> Any:
    """Add the flags for task, language, prompt and times; return their group."""
    text = "find the start and end of every word"
    words: Flag = ("word_timestamps", boolean, word_timestamps, text)
    add_flags(parser.add_argument_group("word timestamps"), [words, *PUNCTUATION])
    group = parser.add_argument_group("language, prompts and clips")
    add_flags(group, INPUT)
    return group


def add_padding(parser: argparse.ArgumentParser) -> Any:
    """Add the flags for padding; return their group."""
    group = parser.add_argument_group("padding")
    text = f"what the model may see of it: {ALLOWED} (default: full, as openai-whisper)"
    add_flags(group, [("padding", "POLICY", None, text)])
    text = "keep failed texts (default: decode them again with full padding)"
    group.add_argument(
        "--no_policy_fallback", dest="policy_fallback", action="store_false", help=text
    )
    return group


def add_search(parser: argparse.ArgumentParser) -> Any:
    """Add the flags for search and for the fallback thresholds; return their group."""
    group = parser.add_argument_group("decoding")
    add_flags(group, SEARCH)
    return group


def run(args: argparse.Namespace) -> int:
    from asrmask.malloc import keep_all_objects

    with keep_all_objects():
        runner = _start(args)
    return runner.run(args.batch_size) if runner else 0


def _start(args: argparse.Namespace) -> "JobRunner | None":
    """Plan the outputs and load the model. None: nothing is to be done."""
    from asrmask.console import say
    from asrmask.transcription import jobs

    layout = SubtitleLayout(**{f.name: getattr(args, f.name) for f in fields(SubtitleLayout)})
    if not args.word_timestamps:
        for name in [f.name for f in fields(SubtitleLayout) if getattr(layout, f.name)]:
            raise OptionError(f"--{name} needs --word_timestamps True, got it without")
    if args.diagnose and "json" not in args.output_format:
        given = ",".join(args.output_format) or "none"
        raise OptionError(f"--diagnose is for --output_format json or all, got {given}")
    if args.batch_size < 1:
        raise OptionError(f"--batch_size must be 1 or more, got {args.batch_size}")
    planned = jobs.plan(args.audio, args.output_dir, args.output_format)
    settings, options = options_from_args(args)
    todo = [job for job in planned if not (args.skip_existing and job.is_done())]
    if n_done := len(planned) - len(todo):
        say(f"outputs are there already: {n_done} of {counted(len(planned), 'file')}")
    if not todo:
        return None
    model, options = load(args, options)
    callbacks = None
    if args.diagnose:
        from asrmask.inspection.diagnosis import Diagnose
        from asrmask.transcription.window_loop import Callbacks

        callbacks = Callbacks(on_window=Diagnose(model))
    return jobs.JobRunner(todo, model, settings, options, layout, args.verbose, callbacks)


def options_from_args(args: argparse.Namespace) -> "tuple[Settings, DecodingOptions]":
    """Return the settings of the window loop and the decoding options from the flags."""
    import numpy as np

    from asrmask.audio.vad import VadOptions
    from asrmask.decoding.options import DecodingOptions
    from asrmask.tokenizer.languages import language_code
    from asrmask.transcription.settings import Settings, at_temperature

    given = vars(args)
    loop = {f.name: given[f.name] for f in fields(Settings) if f.name in given}
    step = args.temperature_increment_on_fallback
    if step is not None:
        if not step > 0:
            raise OptionError(f"temperature_increment_on_fallback must be above 0, got {step}")
        if 0 <= args.temperature <= 1:
            loop["temperature"] = tuple(np.arange(args.temperature, 1.0 + 1e-6, step).tolist())
    vad = {f.name: given.get(f"vad_{f.name}") for f in fields(VadOptions)}
    loop["vad_parameters"] = {name: value for name, value in vad.items() if value is not None}
    search = {f.name: given[f.name] for f in fields(DecodingOptions) if f.name in given}
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

    flags.set_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    compute_type = getattr(args, "compute_type", None)
    if getattr(args, "fast", False) and not device.startswith("cpu"):
        compute_type = None  # half precision on a GPU, see --fp16
    keep_freed_memory()
    model = load_model(
        args.model,
        device=device,
        download_root=args.model_dir,
        compute_type=compute_type,
        adapter=args.adapter,
    )
    if not model.is_multilingual:
        ignored = {
            f"language {args.language}": options.language not in {None, "en"},
            f"task {options.task}": options.task != "transcribe",
            "multilingual": getattr(args, "multilingual", False),
        }
        for flag in [flag for flag, is_given in ignored.items() if is_given]:
            say(f"{args.model} is English-only, --{flag} is ignored")
        language = "en" if options.language is not None else None
        options = replace(options, language=language, task="transcribe")
    return model, options
