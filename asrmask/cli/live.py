"""asrmask live: transcribe a microphone, a pipe or a file while the audio arrives."""

import argparse
import json
import shutil
import signal
import sys
import threading
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from asrmask.audio.constants import SAMPLE_RATE
from asrmask.cli import Parser, boolean, flags
from asrmask.cli.flags import Flag, add_flags
from asrmask.cli.transcribe import formats, load
from asrmask.console import say
from asrmask.errors import AsrmaskError, OptionError
from asrmask.files import atomic_write
from asrmask.live.transcript import Transcript
from asrmask.transcription.presets import FAST
from asrmask.transcription.writers import WRITERS

if TYPE_CHECKING:
    import numpy as np

    from asrmask.live.api import LiveTranscriber
    from asrmask.live.events import Event

USAGE = "[- | FILE --simulate] [OPTION…]"
NAME = "live"  # of output files, for a microphone
CLEAR, DIM, PLAIN = "\x1b[K", "\x1b[2m", "\x1b[0m"
# fmt: off
SOURCE: list[Flag] = [
    ("microphone", "DEVICE", None, "its number or part of its name (default: the system's)"),
    ("list_devices", boolean, False, "list the microphones, and do nothing else"),
    ("rate", int, None, "standard input is raw mono PCM, s16le, at this rate"),
    ("simulate", boolean, False, "read a file at the speed of speech"),
    ("fastest", boolean, False, "with --simulate: as fast as possible, with the same text"),
]
OUTPUT: list[Flag] = [
    ("json", boolean, False, "print every event as a line of JSON"),
    ("save", "FILE.wav", None, "keep the audio, as 16 kHz mono WAV"),
    ("output_dir o", "DIR", ".", "folder for the outputs"),
    ("output_format f", formats, "none",
     f"written at the end; comma-separated: {', '.join(WRITERS)}; all; none"),
]
TEXT: list[Flag] = [
    ("task", ("transcribe", "translate"), "transcribe",
     "transcribe speech in its language, or translate it to English"),
    flags.LANGUAGE,
    ("initial_prompt", "TEXT", None, "text given as a prompt: names, spelling, style"),
    ("hotwords", "TEXT", None, "names and terms, given as a prompt"),
    ("condition_on_previous_text", boolean, False, "give the text of earlier utterances as prompt"),
]
UPDATES: list[Flag] = [
    ("step", float, 0.3, "seconds of audio between two updates"),
    ("commit", "POLICY", "agreement",
     "when words are final: agreement[,n=N][,margin=S]…, or attention[,margin=S]"),
    ("endpoint", float, 1.2, "seconds of silence that end an utterance"),
    ("buffer", float, 15.0, "seconds of audio in an update, at most"),
    ("padding", "POLICY", "virtual", "what the model may see of it"),
    ("compute_type", "TYPE", FAST.compute_type, "of the model: int8 or float32"),
]
# fmt: on


def add_arguments(parser: Parser) -> None:
    text = "- for standard input, or a file with --simulate (default: the microphone)"
    parser.add_argument("source", nargs="?", metavar="SOURCE", help=text)
    add_flags(parser, [*flags.MODEL, flags.DEVICE, flags.THREADS])
    add_flags(parser.add_argument_group("audio"), SOURCE)
    add_flags(parser.add_argument_group("output"), OUTPUT)
    add_flags(parser.add_argument_group("language and prompts"), TEXT)
    add_flags(parser.add_argument_group("updates"), UPDATES)


def run(args: argparse.Namespace) -> int:
    from asrmask.live import LiveTranscriber, sources
    from asrmask.live.settings import split_live_options
    from asrmask.transcription.jobs import plan

    if args.list_devices:
        print(*sources.devices(), sep="\n")
        return 0
    check_source(args)
    (job,) = plan([args.source or NAME], args.output_dir, args.output_format)
    settings, options = split_live_options(live_options(args))
    settings.check()
    options.check()
    session = Session(args, settings.step)
    model, _ = load(args, options)
    language = args.language if model.is_multilingual else None
    live = LiveTranscriber(model, **live_options(args) | {"language": language})
    session.run(live)
    session.close(job.outputs, live.loop.language if model.is_multilingual else None)
    return 1 if session.problems else 0


def check_source(args: argparse.Namespace) -> None:
    """Raise OptionError for flags that do not belong to the source."""
    is_file = args.source not in {None, "-"}
    if is_file and not args.simulate:
        raise OptionError(f"a file needs --simulate, got {args.source} without")
    if args.simulate and not is_file:
        raise OptionError(f"--simulate needs a file, got {args.source or 'none'}")
    if args.fastest and not args.simulate:
        raise OptionError("--fastest needs --simulate, got it without")
    if args.rate is not None and args.source != "-":
        raise OptionError(f"--rate needs the source -, got {args.source or 'the microphone'}")
    if args.microphone is not None and args.source is not None:
        raise OptionError(f"--microphone excludes a source, got {args.source}")
    if args.save is not None and not args.save.lower().endswith(".wav"):
        raise OptionError(f"--save must be a .wav file, got {args.save}")


def live_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of LiveTranscriber."""
    names = [flag[0] for flag in (*TEXT, *UPDATES) if flag[0] != "compute_type"]
    return {name: getattr(args, name) for name in names}


class Session:
    """One call of the command: from a source to the terminal and to files.

    problems: what went wrong without ending the transcription
    """

    def __init__(self, args: argparse.Namespace, step: float):
        self.problems: list[str] = []
        self.n_samples = 0
        self._args = args
        self._stop = threading.Event()
        self._printer = choose_printer(args.json)
        self._audio = open_audio(args, step, self._stop, self.problems)
        self._start_time = time.perf_counter()

    def run(self, live: "LiveTranscriber") -> None:
        """Transcribe until the audio ends, or somebody ends it."""
        save = self._args.save
        with (
            nullcontext() if save is None else recording(Path(save)) as recorder,
            stop_on_signals(self._stop),
        ):
            if self._args.source is None:
                say("listening, Ctrl-C ends it")
            try:
                for samples, late in self._audio:
                    self.n_samples += len(samples)
                    if recorder is not None:
                        recorder.writeframes(samples.astype("<i2").tobytes())
                    self._printer.show(live.push(samples, late=late))
            except AsrmaskError as error:  # what was said before it counts
                self.problems.append(str(error))
            self._printer.show(live.finish())
            self._printer.end()

    def close(self, outputs: Mapping[str, Path], language: str | None) -> None:
        """Write the files and the last messages."""
        from asrmask.transcription.jobs import delayed_interrupt, say_time
        from asrmask.transcription.writers import save

        result = self._printer.transcript.result(self.n_samples / SAMPLE_RATE)
        with delayed_interrupt():
            for form, path in outputs.items():
                save(result, path, form)
        if language is not None and self._args.language is None:
            say(f"language: {language}")
        say_time(result.duration, self._start_time)
        for problem in self.problems:
            say(f"error: {problem}")


def open_audio(
    args: argparse.Namespace, step: float, stop: threading.Event, problems: list[str]
) -> "Iterator[tuple[np.ndarray, bool]]":
    """Return the audio as it arrives: blocks, and whether more is waiting than a step."""
    from asrmask.audio import media
    from asrmask.live import sources

    blocks: Iterator[np.ndarray]
    if args.source is None:
        blocks = sources.microphone(args.microphone, stop)
    elif args.source == "-":
        pipe = sys.stdin.buffer
        if args.rate is None:
            blocks = media.decode_pipe(pipe, problems)
        else:
            blocks = sources.raw_pipe(pipe, args.rate, problems)
    else:
        blocks = sources.in_pieces(media.decode(args.source, problems))
        if args.fastest:
            return ((block, False) for block in takewhile(lambda _: not stop.is_set(), blocks))
        blocks = sources.paced(blocks, stop)
    return sources.arrivals(blocks, step, stop)


@contextmanager
def recording(path: Path) -> Iterator[wave.Wave_write]:
    """Open a WAV file that is there when the block ends."""
    with atomic_write(path, binary=True) as file, wave.open(file, "wb") as recorder:
        recorder.setparams((1, 2, SAMPLE_RATE, 0, "NONE", "not compressed"))
        yield recorder


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Let Ctrl-C, or the signal to terminate, end the audio. The second Ctrl-C interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class LinePrinter:
    """Prints each utterance as a line when it is final, or each event as JSON."""

    def __init__(self, is_json: bool = False):
        self.transcript = Transcript()
        self.is_json = is_json

    def show(self, events: "Sequence[Event]") -> None:
        for event in events:
            segments = self.transcript.add(event)
            if self.is_json:
                print(json.dumps(event.to_dict(), ensure_ascii=False), flush=True)
            else:
                for segment in segments:
                    print(segment.text.strip(), flush=True)

    def end(self) -> None:
        """Print words that no endpoint followed."""
        if not self.is_json:
            for segment in self.transcript.close():
                print(segment.text.strip(), flush=True)


class TerminalPrinter(LinePrinter):
    """Prints committed words at once, and redraws the words after them, dim, in the same line."""

    def __init__(self, width: int | None = None):
        super().__init__()
        self._given_width = width
        self._line = ""
        self._partial = ""

    def show(self, events: "Sequence[Event]") -> None:
        for event in events:
            self.transcript.add(event)
            if event.kind == "committed":
                for word in event["words"]:
                    self._add(word.word)
                self._partial = ""
            elif event.kind == "partial":
                self._partial = event["text"]
            else:
                self.end()
        self._draw()

    def end(self) -> None:
        """End the line of an utterance."""
        self._partial = ""
        self._draw()
        if self._line:
            print(flush=True)
        self._line = ""

    @property
    def _width(self) -> int:
        return self._given_width or shutil.get_terminal_size().columns - 1

    def _add(self, word: str) -> None:
        if self._line and cell_len(self._line + word) > self._width:
            self.end()
        self._line += word if self._line else word.lstrip()

    def _draw(self) -> None:
        """Draw the last line again: what was said, and what fits of what may change."""
        partial = self._partial if self._line else self._partial.lstrip()
        room = max(self._width - cell_len(self._line), 0)
        partial = set_cell_size(partial, room).rstrip() if cell_len(partial) > room else partial
        print(f"\r{CLEAR}{self._line}{DIM}{partial}{PLAIN}", end="", flush=True)


def choose_printer(is_json: bool) -> LinePrinter:
    if is_json or not sys.stdout.isatty():
        return LinePrinter(is_json)
    return TerminalPrinter()
