"""Many files: what each is to become, the work on them one by one, and what went wrong."""

import os
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asrmask.audio import HOP_LENGTH, Recording
from asrmask.batches import transcriptions
from asrmask.errors import AsrmaskError, AudioError, OptionError, counted, one_line, printable
from asrmask.settings import Settings
from asrmask.transcriber import Stream
from asrmask.transcription import Segment, Transcription
from asrmask.walk import Watcher
from asrmask.writers import Layout, line, save

if TYPE_CHECKING:
    from asrmask.decoding import DecodingOptions
    from asrmask.model import Whisper

# files taken from a folder; a file that is named is always tried
LINES_S = 5  # seconds between lines on how far the work has come
ENDINGS = """
    .3gp .aac .ac3 .aif .aiff .amr .au .avi .caf .flac .flv .m4a .m4b .m4v .mka .mkv .mov .mp2
    .mp3 .mp4 .mpeg .mpg .oga .ogg .ogv .opus .ts .voc .w64 .wav .weba .webm .wma .wmv
"""


@dataclass(frozen=True)
class Job:
    """One file to transcribe, and the files to write."""

    source: str
    outputs: dict[str, Path]  # format → file

    @property
    def name(self) -> str:
        return "standard input" if self.source == "-" else self.source

    def is_done(self) -> bool:
        return bool(self.outputs) and all(map(os.path.isfile, self.outputs.values()))


def plan(sources: Sequence[str], folder: str, forms: Sequence[str]) -> list[Job]:
    """The jobs of a call; files whose outputs would have the same name keep their endings."""
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
    """The file itself, or the audio and video files in a folder.

    A folder without any stays as it is: `check_folder` refuses it, and the others are still done.
    """
    if source == "-" or not os.path.isdir(source):
        return [source]
    try:
        paths = sorted(Path(source).iterdir())
    except OSError as error:
        raise OptionError(f"{source}: {error.strerror}, expected a folder to read") from None
    endings = ENDINGS.split()
    media = [path for path in paths if path.suffix.lower() in endings]
    # a link to nothing is kept, to be told as an error
    found = [str(path) for path in media if os.path.isfile(path) or not os.path.exists(path)]
    return found or [source]


def check_folder(source: str) -> None:
    """Raise AudioError if it is a folder that `files_of` found no audio or video files in."""
    if source != "-" and os.path.isdir(source):
        n_files = len(os.listdir(source))
        found = counted(n_files, "other file") if n_files else "an empty folder"
        raise AudioError(f"{source}: expected a folder with audio or video files, got {found}")


def _stem(source: str) -> str:
    return "stdin" if source == "-" else Path(source).stem


@dataclass
class Work:
    """The jobs of a call, and what has become of them."""

    jobs: Sequence[Job]
    layout: Layout
    verbose: bool | None
    failed: list[str] = field(default_factory=list)
    audio_s: float = 0.0  # of the files that are done

    def __post_init__(self) -> None:
        self.left = [job.name for job in self.jobs]

    def say_text(self, segments: Iterable[Segment]) -> None:
        """Segments on standard output, as they are asked for."""
        for segment in segments:
            if self.verbose is not False and segment.text:
                print(line(segment) if self.verbose else segment.text.strip(), flush=True)

    def settle(self, job: Job, problems: Sequence[str]) -> None:
        """A job is over."""
        if problems:
            self.failed.append(job.name)
        self.left.remove(job.name)
        for problem in problems:
            say(f"error: {problem}")

    @contextmanager
    def trying(self, job: Job) -> Iterator[None]:
        """Within it, what goes wrong with a file ends that job alone."""
        try:
            yield
        except AsrmaskError as error:
            self.settle(job, [str(error)])
        except BrokenPipeError:  # the reader of our text has gone: no use in going on
            raise
        except OSError as error:  # an output that cannot be written: the others still may
            told = f"{job.name}: {error.strerror or error}, expected to write its outputs"
            self.settle(job, [told])
        except Exception as error:  # a defect of ours: the others are still done
            if os.environ.get("ASRMASK_DEBUG"):
                traceback.print_exc()
            told = f"{job.name}: unexpected {type(error).__name__} ({one_line(error)})"
            self.settle(job, [f"{told}, please report it with what ASRMASK_DEBUG=1 shows"])

    def finish(self, job: Job, opened: "Opened", result: Transcription) -> None:
        """Write what a job is to give."""
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
        """1 if any failed."""
        if self.failed and len(self.jobs) > 1:
            say(f"{len(self.failed)} of {len(self.jobs)} files failed: {' '.join(self.failed)}")
        return 1 if self.failed else 0


def work(
    jobs: Sequence[Job],
    model: "Whisper",
    settings: Settings,
    options: "DecodingOptions",
    layout: Layout,
    verbose: bool | None,
    watch: Watcher | None = None,
    batch_size: int = 1,
) -> int:
    """Do every job; the exit code: 1 if any failed, after all the others are done."""
    todo = Work(jobs, layout, verbose)
    try:
        if batch_size > 1:
            _in_batches(todo, model, settings, options, watch, batch_size)
        else:
            _one_by_one(todo, model, settings, options, watch)
    except KeyboardInterrupt:
        return todo.interrupted()
    return todo.exit_code()


def _one_by_one(
    todo: Work,
    model: "Whisper",
    settings: Settings,
    options: "DecodingOptions",
    watch: Watcher | None,
) -> None:
    for i, job in enumerate(todo.jobs):
        title = f"[{i + 1}/{len(todo.jobs)}] {job.name}"
        with todo.trying(job), progress(title) as advance:
            begun, shares = time.perf_counter(), Shares(advance, 1)
            opened = open_job(job)
            running = opened.stream(model, settings, options, shares.of(job, opened, watch))
            say_language(running, options)
            for segment in running:
                todo.say_text([segment])
            result = running.result()
            say_time(result.duration, begun)
            todo.finish(job, opened, result)


def _in_batches(
    todo: Work,
    model: "Whisper",
    settings: Settings,
    options: "DecodingOptions",
    watch: Watcher | None,
    batch_size: int,
) -> None:
    """Windows of several files at a time; texts on standard output in the order of the files."""
    begun = time.perf_counter()
    known: dict[Stream, tuple[Job, Opened]] = {}
    texts: dict[str, list[Segment]] = {}  # of files that are done, before the earlier ones are
    order = iter(todo.jobs)
    next_job = next(order, None)

    def streams() -> Iterator[Stream]:
        for job in todo.jobs:
            stream = None
            with todo.trying(job):
                opened = open_job(job)
                stream = opened.stream(model, settings, options, shares.of(job, opened, watch))
                known[stream] = job, opened
            if stream is not None:
                yield stream

    with progress(counted(len(todo.jobs), "file")) as advance:
        shares = Shares(advance, len(todo.jobs))
        for stream, outcome in transcriptions(model, streams(), batch_size):
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


def say_language(stream: Stream, options: "DecodingOptions") -> None:
    """The language, if it was detected."""
    if options.language is None and stream.model.is_multilingual:
        say(f"language: {stream.language}")


def say_time(audio_s: float, begun: float) -> None:
    """How long the work on so many seconds of audio took."""
    say(f"{audio_s:.1f} s of audio in {time.perf_counter() - begun:.1f} s")


@dataclass(frozen=True)
class Opened:
    """A job's recording, and what was wrong with its file."""

    recording: Recording
    problems: list[str]
    is_silent: bool  # nothing but zeros

    def stream(
        self,
        model: "Whisper",
        settings: Settings,
        options: "DecodingOptions",
        watch: Watcher | None,
    ) -> Stream:
        """Its transcription, to be run; that of silence is empty, where a model may invent text."""
        stream = Stream(model, self.recording, settings, options, watch)
        if self.is_silent:
            stream.walks = iter(())
        return stream


def open_job(job: Job) -> Opened:
    """The recording of a job, if its file holds one."""
    problems: list[str] = []
    check_folder(job.source)
    recording = Recording.open(job.source, problems)
    if recording.n_samples < HOP_LENGTH:
        raise AudioError(
            f"{job.name}: too short, got {recording.n_samples} samples, "
            f"expected {HOP_LENGTH} or more"
        )
    is_silent = recording.is_silent()
    if is_silent:
        say(f"{job.name}: only silence, its transcript is empty")
    return Opened(recording, problems, is_silent)


class Advance:
    """How far the work has come; shown by the bar that makes it.

    told:     the part that was done last
    is_whole: that part is complete
    """

    def __call__(self, done: float, total: int, told: str = "", is_whole: bool = False) -> None:
        """Nothing is shown where there is no terminal."""


class Shares:
    """Shows how much of the files is done: each window is a share of its file."""

    def __init__(self, advance: Advance, n_files: int):
        self.advance = advance
        self.n_files = n_files
        self.done: dict[str, float] = defaultdict(float)  # 0..1, by name

    def add(self, job: Job, share: float) -> None:
        self.done[job.name] = min(self.done[job.name] + share, 1.0)
        self.advance(sum(self.done.values()), self.n_files)

    def of(self, job: Job, opened: Opened, watch: Watcher | None) -> Watcher:
        """A watcher that adds what is done of a file."""
        n_frames = opened.recording.n_samples / HOP_LENGTH
        return replace(watch or Watcher(), moved=lambda n: self.add(job, n / n_frames))


class Lines(Advance):
    """Plain lines with the time left: one for each whole part, others every few seconds.

    The first call says what was done before.
    """

    def __init__(self) -> None:
        self.begun: tuple[float, float] | None = None  # time, and what was done by then
        self.said = 0.0

    def __call__(self, done: float, total: int, told: str = "", is_whole: bool = False) -> None:
        now = time.monotonic()
        if self.begun is None:
            self.begun, self.said = (now, done), now
        if not told or not (is_whole or now - self.said >= LINES_S):
            return
        since, before = self.begun
        left_s = (now - since) * (total - done) / max(done - before, 1)
        left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
        say(f"{told}; {done} of {total} in all, {left} left")
        self.said = now


@contextmanager
def progress(title: str, has_lines: bool = False) -> Iterator[Advance]:
    """A bar with the time left on a terminal; otherwise one plain line, or several."""
    if not sys.stderr.isatty():
        say(title)
        yield Lines() if has_lines else Advance()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    # text for a terminal is written above the bar; text for a file goes its own way
    bar = Progress(
        *columns,
        console=Console(stderr=True, highlight=False, soft_wrap=True),
        redirect_stdout=sys.stdout.isatty(),
        transient=True,
    )
    with bar:
        task = bar.add_task(printable(title), total=None)

        class Shown(Advance):
            def __call__(
                self, done: float, total: int, told: str = "", is_whole: bool = False
            ) -> None:
                bar.update(task, completed=min(done, total), total=total)

        yield Shown()


def say(text: str) -> None:
    """A line for the user, beside the text that goes to standard output."""
    print(f"asrmask: {printable(text)}", file=sys.stderr, flush=True)
