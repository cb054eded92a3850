"""Many files: what each is to become, the work on them one by one, and what went wrong."""

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asrmask.audio import HOP_LENGTH, Recording
from asrmask.errors import AsrmaskError, AudioError, AudioWarning, OptionError, printable
from asrmask.transcriber import Settings, Stream
from asrmask.writers import Layout, line, save

if TYPE_CHECKING:
    from asrmask.decoding import DecodingOptions
    from asrmask.model import Whisper

# files taken from a folder; a file that is named is always tried
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
    named = list(dict.fromkeys(file for source in sources for file in files(source)))
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


def files(source: str) -> list[str]:
    """The file itself, or the audio and video files in a folder.

    A folder without any stays as it is: reading it fails, and the others are still done.
    """
    if source == "-" or not os.path.isdir(source):
        return [source]
    try:
        paths = sorted(Path(source).iterdir())
    except OSError as error:
        raise OptionError(f"{source}: {error.strerror}, expected a folder to read") from None
    endings = ENDINGS.split()
    found = [str(p) for p in paths if p.suffix.lower() in endings and os.path.isfile(p)]
    return found or [source]


def _stem(source: str) -> str:
    return "stdin" if source == "-" else Path(source).stem


def work(
    jobs: Sequence[Job],
    model: "Whisper",
    settings: Settings,
    options: "DecodingOptions",
    layout: Layout,
    verbose: bool | None,
) -> int:
    """Do every job; the exit code: 1 if any failed, after all the others are done."""
    failed: list[str] = []
    left = [job.name for job in jobs]
    try:
        for i, job in enumerate(jobs):
            try:
                with progress(f"[{i + 1}/{len(jobs)}] {job.name}") as advance:
                    problems = transcribe_one(
                        job, model, settings, options, layout, verbose, advance
                    )
            except AsrmaskError as error:
                problems = [str(error)]
            except BrokenPipeError:  # the reader of our text has gone: no use in going on
                raise
            except OSError as error:  # an output that cannot be written: the others still may
                problems = [f"{job.name}: {error.strerror or error}, expected to write its outputs"]
            if problems:
                failed.append(job.name)
            left.remove(job.name)
            for problem in problems:
                say(f"error: {problem}")
    except KeyboardInterrupt:
        n_done = len(jobs) - len(left) - len(failed)
        say(f"interrupted: {n_done} of {len(jobs)} files done, left: {' '.join(left)}")
        return 130
    if failed and len(jobs) > 1:
        say(f"{len(failed)} of {len(jobs)} files failed: {' '.join(failed)}")
    return 1 if failed else 0


def transcribe_one(
    job: Job,
    model: "Whisper",
    settings: Settings,
    options: "DecodingOptions",
    layout: Layout,
    verbose: bool | None,
    advance: "Advance",
) -> list[str]:
    """Transcribe one file and write its outputs; what was wrong with it, if anything."""
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AudioWarning)
        recording = Recording.open(job.source)
    if recording.n_samples < HOP_LENGTH:
        raise AudioError(
            f"{job.name}: too short, got {recording.n_samples} samples, "
            f"expected {HOP_LENGTH} or more"
        )
    if recording.is_silent():
        raise AudioError(
            f"{job.name}: pure silence, got {recording.n_samples} zeros, expected speech"
        )
    running = Stream(model, recording, settings, options)
    if options.language is None and model.is_multilingual:
        say(f"language: {running.language}")
    for segment in running:
        if verbose is not False and segment.text:
            print(line(segment) if verbose else segment.text.strip(), flush=True)
        advance(running.seek, running.n_frames)
    result = running.result()
    for form, path in job.outputs.items():
        save(result, path, form, layout)
    say(f"{recording.duration_s:.1f} s of audio in {time.perf_counter() - begun:.1f} s")
    if result.padding is not None:
        say(str(result.padding))
    problems = (w for w in caught if issubclass(w.category, AudioWarning))
    return [str(warning.message) for warning in problems]


class Advance:
    """How far the work on a file has come, in frames; shown by the bar that makes it."""

    def __call__(self, done: int, total: int) -> None:
        """Nothing is shown where there is no terminal."""


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """A bar with the time left on a terminal; otherwise one plain line."""
    if not sys.stderr.isatty():
        say(title)
        yield Advance()
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
        console=Console(stderr=True, highlight=False),
        redirect_stdout=sys.stdout.isatty(),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=None)

        class Shown(Advance):
            def __call__(self, done: int, total: int) -> None:
                bar.update(task, completed=min(done, total), total=total)

        yield Shown()


def say(text: str) -> None:
    """A line for the user, beside the text that goes to standard output."""
    print(f"asrmask: {printable(text)}", file=sys.stderr, flush=True)
