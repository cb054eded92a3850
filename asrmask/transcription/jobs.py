"""Transcribe many files: plan outputs, process the files, report errors."""

import os
import signal
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from asrmask.audio.recording import Recording
from asrmask.console import ProgressCallback, progress, say
from asrmask.decoding.options import DecodingOptions
from asrmask.errors import AsrmaskError, AudioError, OptionError, counted, one_line
from asrmask.model.whisper import Whisper
from asrmask.transcription.result import Segment, Transcription
from asrmask.transcription.scheduler import run_streams
from asrmask.transcription.settings import Settings
from asrmask.transcription.stream import TranscriptionStream
from asrmask.transcription.window_loop import Callbacks
from asrmask.transcription.writers import SubtitleLayout, format_segment, save

# of files to take from a folder; a file named explicitly is always tried
EXTENSIONS = """
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
    files = dict.fromkeys(file for source in sources for file in files_of(source))
    stems = {file: "stdin" if file == "-" else Path(file).stem for file in files}
    n_files = Counter(stems.values())
    jobs: list[Job] = []
    writers: dict[Path, str] = {}  # output → the input that is written to it
    for file, stem in stems.items():
        name = stem if n_files[stem] == 1 else Path(file).name
        outputs = {form: Path(folder) / f"{name}.{form}" for form in forms}
        for path in outputs.values():
            if writers.setdefault(path, file) != file:
                raise OptionError(
                    f"{writers[path]} and {file} would both write {path}: "
                    "give them in separate calls with an --output_dir each"
                )
        jobs.append(Job(file, outputs))
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
    media = [path for path in paths if path.suffix.lower() in EXTENSIONS.split()]
    # keep broken links, so that they are reported as errors
    found = [str(path) for path in media if os.path.isfile(path) or not os.path.exists(path)]
    return found or [source]


def check_folder(source: str) -> None:
    """Raise AudioError for a folder in which `files_of` found no audio or video files."""
    if source != "-" and os.path.isdir(source):
        n_files = len(os.listdir(source))
        found = counted(n_files, "other file") if n_files else "an empty folder"
        raise AudioError(f"{source}: expected a folder with audio or video files, got {found}")


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


class FileProgress:
    """Progress over all files: each window adds a fraction of its file."""

    def __init__(self, advance: ProgressCallback, n_files: int):
        self.advance = advance
        self.n_files = n_files
        self.fractions: dict[str, float] = defaultdict(float)  # name → 0..1

    def add(self, name: str, fraction: float) -> None:
        self.fractions[name] = min(self.fractions[name] + fraction, 1.0)
        self.advance(sum(self.fractions.values()), self.n_files)


@dataclass
class JobRunner:
    """Runs the jobs of one command. A file that fails does not stop the others."""

    jobs: Sequence[Job]
    model: Whisper
    settings: Settings
    options: DecodingOptions
    layout: SubtitleLayout
    verbose: bool | None  # print True: segments with times, None: their text, False: nothing
    callbacks: Callbacks | None = None

    def __post_init__(self) -> None:
        self.remaining = [job.name for job in self.jobs]
        self.failed: list[str] = []
        self.audio_s = 0.0  # total of finished files

    def run(self, batch_size: int = 1) -> int:
        """Run all jobs and return the exit code: 1 if any failed, 130 if interrupted."""
        n_jobs = len(self.jobs)
        try:
            if batch_size > 1:
                self._run_batches(batch_size)
            else:
                self._run_one_by_one()
        except KeyboardInterrupt:
            n_done = n_jobs - len(self.remaining) - len(self.failed)
            files = counted(n_jobs, "file")
            say(f"interrupted: {n_done} of {files} done, left: {' '.join(self.remaining)}")
            return 130
        if self.failed and n_jobs > 1:
            say(f"{len(self.failed)} of {n_jobs} files failed: {' '.join(self.failed)}")
        return 1 if self.failed else 0

    def _run_one_by_one(self) -> None:
        for i, job in enumerate(self.jobs, start=1):
            title = f"[{i}/{len(self.jobs)}] {job.name}"
            with self._catch_errors(job), progress(title) as advance:
                start_time = time.perf_counter()
                stream, problems = self._open(job, FileProgress(advance, 1))
                self._say_language(stream)
                for segment in stream:
                    self._print([segment])
                say_time(stream.duration_s, start_time)
                self._finish(job, stream.transcription(), problems)

    def _run_batches(self, batch_size: int) -> None:
        """Batch windows of several files; print texts in the order of the files."""
        start_time = time.perf_counter()
        texts: dict[str, list[Segment]] = {}  # of finished files that wait for earlier ones
        unprinted = [job.name for job in self.jobs]

        def streams() -> Iterator[tuple[tuple[Job, list[str]], TranscriptionStream]]:
            for job in self.jobs:
                stream = None
                with self._catch_errors(job):
                    stream, problems = self._open(job, file_progress)
                if stream is not None:
                    yield (job, problems), stream

        with progress(counted(len(self.jobs), "file")) as advance:
            file_progress = FileProgress(advance, len(self.jobs))
            for (job, problems), stream in run_streams(self.model, streams(), batch_size):
                n_finished = len(self.jobs) - len(self.remaining) + 1
                say(f"[{n_finished}/{len(self.jobs)}] {job.name}")
                self._say_language(stream)
                with self._catch_errors(job):
                    result = stream.transcription()
                    texts[job.name] = result.segments
                    self._finish(job, result, problems)
                while unprinted and unprinted[0] not in self.remaining:
                    self._print(texts.pop(unprinted.pop(0), []))
                file_progress.add(job.name, 1.0)
        say_time(self.audio_s, start_time)

    def _open(self, job: Job, file_progress: FileProgress) -> tuple[TranscriptionStream, list[str]]:
        """Return the transcription of a job, not yet run, and problems found in its file."""
        problems: list[str] = []
        check_folder(job.source)
        recording = Recording.open(job.source, problems)
        recording.check_length(job.name)
        on_progress = partial(file_progress.add, job.name)
        callbacks = replace(self.callbacks or Callbacks(), on_progress=on_progress)
        stream = TranscriptionStream(self.model, recording, self.settings, self.options, callbacks)
        if recording.is_silent():
            say(f"{job.name}: only silence, its transcript is empty")
            stream.clips = []  # models hallucinate in silence
        return stream, problems

    @contextmanager
    def _catch_errors(self, job: Job) -> Iterator[None]:
        """Catch errors in the block: they end this job only."""
        try:
            yield
            return
        except AsrmaskError as error:
            problem = str(error)
        except BrokenPipeError:  # nobody reads our output any more: stop
            raise
        except OSError as error:  # output not writable: others may be
            problem = f"{job.name}: {error.strerror or error}, expected to write its outputs"
        except Exception as error:  # a bug: continue with the other files
            if os.environ.get("ASRMASK_DEBUG"):
                traceback.print_exc()
            problem = f"{job.name}: unexpected {type(error).__name__} ({one_line(error)}), "
            problem += "please report it with what ASRMASK_DEBUG=1 shows"
        self._close(job, [problem])

    def _finish(self, job: Job, result: Transcription, problems: Sequence[str]) -> None:
        """Write the outputs of a job, all of them even if the user interrupts."""
        with delayed_interrupt():
            for form, path in job.outputs.items():
                save(result, path, form, self.layout)
            self.audio_s += result.duration
            if result.padding is not None:
                say(str(result.padding))
            self._close(job, problems)

    def _close(self, job: Job, problems: Sequence[str]) -> None:
        """Mark a job as finished, and print its problems."""
        if problems:
            self.failed.append(job.name)
        self.remaining.remove(job.name)
        for problem in problems:
            say(f"error: {problem}")

    def _print(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if self.verbose is not False and segment.text:
                print(format_segment(segment) if self.verbose else segment.text.strip(), flush=True)

    def _say_language(self, stream: TranscriptionStream) -> None:
        if self.options.language is None and self.model.is_multilingual:
            say(f"language: {stream.language}")


def say_time(audio_s: float, start_time: float) -> None:
    say(f"{audio_s:.1f} s of audio in {time.perf_counter() - start_time:.1f} s")
