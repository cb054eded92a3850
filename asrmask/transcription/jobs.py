"""Transcribe many files: plan outputs, process the files, report errors."""

import os
import signal
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asrmask.audio.recording import Recording
from asrmask.console import Advance, progress, say
from asrmask.errors import AsrmaskError, AudioError, OptionError, counted, one_line
from asrmask.transcription.result import Segment, Transcription
from asrmask.transcription.scheduler import run_streams
from asrmask.transcription.settings import Settings
from asrmask.transcription.stream import TranscriptionStream
from asrmask.transcription.window_loop import Callbacks
from asrmask.transcription.writers import SubtitleLayout, line, save

if TYPE_CHECKING:
    from asrmask.decoding.options import DecodingOptions
    from asrmask.model.whisper import Whisper

# extensions to take from a folder; a file named explicitly is always tried
ENDINGS = """
    .3gp .aac .ac3 .aif .aiff .amr .au .avi .caf .flac .flv .m4a .m4b .m4v .mka .mkv .mov .mp2
    .mp3 .mp4 .mpeg .mpg .oga .ogg .ogv .opus .ts .voc .w64 .wav .weba .webm .wma .wmv
"""


@dataclass(frozen=True)
class Job:
    """One file to transcribe, and its output files."""

    source: str
    outputs: dict[str, Path]  # format → file

    @property
    def name(self) -> str:
        return "standard input" if self.source == "-" else self.source

    def is_done(self) -> bool:
        return bool(self.outputs) and all(map(os.path.isfile, self.outputs.values()))


def plan(sources: Sequence[str], folder: str, forms: Sequence[str]) -> list[Job]:
    """Return one job per input file; output names keep the extension where stems collide."""
    named = list(dict.fromkeys(file for source in sources for file in files_of(source)))
    stems = Counter(map(_stem, named))
    jobs: list[Job] = []
    taken: dict[Path, str] = {}
    for source in named:
        stem = _stem(source)
        name = stem if stems[stem] == 1 else Path(source).name
        outputs = {form: Path(folder) / f"{name}.{form}" for form in forms}
        for path in outputs.values():
            if path in taken:
                raise OptionError(
                    f"{taken[path]} and {source} would both write {path}: "
                    "give them in separate calls with an --output_dir each"
                )
            taken[path] = source
        jobs.append(Job(source, outputs))
    if forms:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"--output_dir must be a folder, got {folder} ({error.strerror})"
            ) from None
        if not os.access(folder, os.W_OK):
            raise OptionError(f"--output_dir must be a folder to write in, got {folder}")
    return jobs


def files_of(source: str) -> list[str]:
    """Return the file itself, or the audio and video files in a folder.

    A folder without any is returned as is. `check_folder` rejects it later, so that the other
    sources are still processed.
    """
    if source == "-" or not os.path.isdir(source):
        return [source]
    try:
        paths = sorted(Path(source).iterdir())
    except OSError as error:
        raise OptionError(f"{source}: {error.strerror}, expected a folder to read") from None
    endings = ENDINGS.split()
    media = [path for path in paths if path.suffix.lower() in endings]
    # keep broken links, so that they are reported as errors
    found = [str(path) for path in media if os.path.isfile(path) or not os.path.exists(path)]
    return found or [source]


def check_folder(source: str) -> None:
    """Raise AudioError for a folder in which `files_of` found no audio or video files."""
    if source != "-" and os.path.isdir(source):
        n_files = len(os.listdir(source))
        found = counted(n_files, "other file") if n_files else "an empty folder"
        raise AudioError(f"{source}: expected a folder with audio or video files, got {found}")


def _stem(source: str) -> str:
    return "stdin" if source == "-" else Path(source).stem


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, where Python's own handler would raise it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if caught:
        raise KeyboardInterrupt


@dataclass
class FileQueue:
    """The jobs of one command, and their outcomes."""

    jobs: Sequence[Job]
    layout: SubtitleLayout
    verbose: bool | None
    failed: list[str] = field(default_factory=list)
    audio_s: float = 0.0  # total of finished files

    def __post_init__(self) -> None:
        self.left = [job.name for job in self.jobs]

    def say_text(self, segments: Iterable[Segment]) -> None:
        """Print segments to standard output, in the form set by `verbose`."""
        for segment in segments:
            if self.verbose is not False and segment.text:
                print(line(segment) if self.verbose else segment.text.strip(), flush=True)

    def settle(self, job: Job, problems: Sequence[str]) -> None:
        """Mark a job as over, and print its problems."""
        if problems:
            self.failed.append(job.name)
        self.left.remove(job.name)
        for problem in problems:
            say(f"error: {problem}")

    @contextmanager
    def trying(self, job: Job) -> Iterator[None]:
        """Catch errors in the block: they end this job only."""
        try:
            yield
        except AsrmaskError as error:
            self.settle(job, [str(error)])
        except BrokenPipeError:  # nobody reads our output any more: stop
            raise
        except OSError as error:  # output not writable: others may be
            told = f"{job.name}: {error.strerror or error}, expected to write its outputs"
            self.settle(job, [told])
        except Exception as error:  # a bug: continue with the other files
            if os.environ.get("ASRMASK_DEBUG"):
                traceback.print_exc()
            told = f"{job.name}: unexpected {type(error).__name__} ({one_line(error)})"
            self.settle(job, [f"{told}, please report it with what ASRMASK_DEBUG=1 shows"])

    def finish(self, job: Job, opened: "Opened", result: Transcription) -> None:
        """Write the outputs of a job, all of them even if the user interrupts."""
        with delayed_interrupt():
            for form, path in job.outputs.items():
                save(result, path, form, self.layout)
            self.audio_s += result.duration
            if result.padding is not None:
                say(str(result.padding))
            self.settle(job, opened.problems)

    def interrupted(self) -> int:
        n_done = len(self.jobs) - len(self.left) - len(self.failed)
        files = counted(len(self.jobs), "file")
        say(f"interrupted: {n_done} of {files} done, left: {' '.join(self.left)}")
        return 130

    def exit_code(self) -> int:
        """Return 1 if any job failed, else 0."""
        if self.failed and len(self.jobs) > 1:
            say(f"{len(self.failed)} of {len(self.jobs)} files failed: {' '.join(self.failed)}")
        return 1 if self.failed else 0


def work(
    jobs: Sequence[Job],
    model: "Whisper",
    settings: Settings,
    options: "DecodingOptions",
    layout: SubtitleLayout,
    verbose: bool | None,
    callbacks: Callbacks | None = None,
    batch_size: int = 1,
) -> int:
    """Run all jobs, even if some fail, and return the exit code: 1 if any failed."""
    todo = FileQueue(jobs, layout, verbose)
    try:
        if batch_size > 1:
            _in_batches(todo, model, settings, options, callbacks, batch_size)
        else:
            _one_by_one(todo, model, settings, options, callbacks)
    except KeyboardInterrupt:
        return todo.interrupted()
    return todo.exit_code()


def _one_by_one(
    todo: FileQueue,
    model: "Whisper",
    settings: Settings,
    options: "DecodingOptions",
    callbacks: Callbacks | None,
) -> None:
    for i, job in enumerate(todo.jobs):
        title = f"[{i + 1}/{len(todo.jobs)}] {job.name}"
        with todo.trying(job), progress(title) as advance:
            begun, shares = time.perf_counter(), Shares(advance, 1)
            opened = open_job(job)
            running = opened.stream(model, settings, options, shares.of(job, callbacks))
            say_language(running, options)
            for segment in running:
                todo.say_text([segment])
            result = running.result()
            say_time(result.duration, begun)
            todo.finish(job, opened, result)


def _in_batches(
    todo: FileQueue,
    model: "Whisper",
    settings: Settings,
    options: "DecodingOptions",
    callbacks: Callbacks | None,
    batch_size: int,
) -> None:
    """Batch windows of several files; print texts in the order of the files."""
    begun = time.perf_counter()
    known: dict[TranscriptionStream, tuple[Job, Opened]] = {}
    texts: dict[str, list[Segment]] = {}  # finished files that wait for earlier ones
    order = iter(todo.jobs)
    next_job = next(order, None)

    def streams() -> Iterator[TranscriptionStream]:
        for job in todo.jobs:
            stream = None
            with todo.trying(job):
                opened = open_job(job)
                stream = opened.stream(model, settings, options, shares.of(job, callbacks))
                known[stream] = job, opened
            if stream is not None:
                yield stream

    with progress(counted(len(todo.jobs), "file")) as advance:
        shares = Shares(advance, len(todo.jobs))
        for stream, outcome in run_streams(model, streams(), batch_size):
            job, opened = known.pop(stream)
            n_over = len(todo.jobs) - len(todo.left) + 1
            say(f"[{n_over}/{len(todo.jobs)}] {job.name}")
            say_language(stream, options)
            with todo.trying(job):
                if isinstance(outcome, Exception):
                    raise outcome
                texts[job.name] = outcome.segments
                todo.finish(job, opened, outcome)
            while next_job is not None and next_job.name not in todo.left:
                todo.say_text(texts.pop(next_job.name, []))
                next_job = next(order, None)
            shares.add(job, 1.0)
    say_time(todo.audio_s, begun)


def say_language(stream: TranscriptionStream, options: "DecodingOptions") -> None:
    """Report the language, if it was detected."""
    if options.language is None and stream.model.is_multilingual:
        say(f"language: {stream.language}")


def say_time(audio_s: float, begun: float) -> None:
    """Report the seconds of audio and the time since `begun`."""
    say(f"{audio_s:.1f} s of audio in {time.perf_counter() - begun:.1f} s")


@dataclass(frozen=True)
class Opened:
    """The opened recording of a job, and problems found in its file."""

    recording: Recording
    problems: list[str]
    is_silent: bool  # all samples are zero

    def stream(
        self,
        model: "Whisper",
        settings: Settings,
        options: "DecodingOptions",
        callbacks: Callbacks | None,
    ) -> TranscriptionStream:
        """Return its transcription, not yet run; empty for silence, where models hallucinate."""
        stream = TranscriptionStream(model, self.recording, settings, options, callbacks)
        if self.is_silent:
            stream.clips = []
        return stream


def open_job(job: Job) -> Opened:
    """Open the recording of a job. Raise AudioError if the file has none."""
    problems: list[str] = []
    check_folder(job.source)
    recording = Recording.open(job.source, problems)
    recording.check_length(job.name)
    is_silent = recording.is_silent()
    if is_silent:
        say(f"{job.name}: only silence, its transcript is empty")
    return Opened(recording, problems, is_silent)


class Shares:
    """Progress over all files: each window adds a fraction of its file."""

    def __init__(self, advance: Advance, n_files: int):
        self.advance = advance
        self.n_files = n_files
        self.done: dict[str, float] = defaultdict(float)  # 0..1, by name

    def add(self, job: Job, share: float) -> None:
        self.done[job.name] = min(self.done[job.name] + share, 1.0)
        self.advance(sum(self.done.values()), self.n_files)

    def of(self, job: Job, callbacks: Callbacks | None) -> Callbacks:
        """Return callbacks that also report the progress of a file."""
        return replace(callbacks or Callbacks(), on_progress=lambda share: self.add(job, share))
