"""Transcribe each clip with asrmask and with other systems, and find the first differences."""

import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asrmask import systems
from asrmask.audio.constants import FRAMES_PER_SECOND, SAMPLE_RATE
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features
from asrmask.comparison.divergence import DecodingAttempt, first_divergence, pair_windows
from asrmask.comparison.sampling import record_draws
from asrmask.comparison.stages import Record, compare, worst_by_group
from asrmask.comparison.transcripts import compare_times, first_difference
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.errors import AsrmaskError, AudioError, AudioWarning, OptionError, one_line
from asrmask.evaluation import corpus
from asrmask.evaluation.alignment import n_different
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import errors as count_errors
from asrmask.model.whisper import Whisper
from asrmask.systems import DecodingSettings, Named, System, SystemTranscript, TimedText, upstream
from asrmask.transcription import jobs
from asrmask.transcription.result import Transcription
from asrmask.transcription.settings import Settings
from asrmask.transcription.stream import TranscriptionStream
from asrmask.transcription.window_loop import POSITION_S, Callbacks

OPENAI = "openai-whisper"
# options that openai-whisper's transcribe does not have, or sets by itself
NOT_UPSTREAM = {
    *("vad_filter", "vad_parameters", "hotwords", "multilingual", "chunk_length"),
    *("repetition_penalty", "no_repeat_ngram_size", "padding", "policy_fallback", "cut_at_pauses"),
    *("prompt", "fp16"),
}
WARMUP_S = 5  # of the first clip, to warm up every system before timing
MANIFESTS = {".tsv", ".csv", ".jsonl"}


@dataclass(frozen=True)
class Run:
    """A recording and its transcription by asrmask."""

    samples: np.ndarray
    stream: TranscriptionStream
    result: Transcription
    attempts: list[DecodingAttempt]
    seconds: float
    language: str = "en"  # selects the text normaliser
    reference: str | None = None  # transcript, if known

    def normalise(self, text: str) -> str:
        return upstream.normalizer(self.language)(text)

    def n_words_different(self, theirs: str) -> int:
        """Count the words in which another system's text differs from ours."""
        return n_different(self.normalise(theirs), self.normalise(self.result.text))

    def record(self, transcript: SystemTranscript, seconds: float) -> Record:
        """Return the record of a transcription by any system: text, times, speed and errors."""
        record = {**asdict(transcript), "took_s": seconds, "wer": None, "errors": None}
        if self.reference is not None:
            errors = count_errors(self.normalise(self.reference), self.normalise(transcript.text))
            record |= {"wer": errors.wer if errors.n_words else None, "errors": asdict(errors)}
        return record


def run(model: Whisper, samples: np.ndarray, settings: Settings, options: DecodingOptions) -> Run:
    """Transcribe samples with asrmask's window loop, and record every attempt on a window."""
    attempts: list[DecodingAttempt] = []

    def record(window: Features, options: DecodingOptions, result: DecodingResult) -> None:
        result = replace(result, audio_features=torch.empty(0))  # large
        tokens = [draw.tokens for draw in draws]
        attempts.append(DecodingAttempt(stream.seek, window.n_frames, options, result, tokens))
        draws.clear()

    torch.manual_seed(0)  # fallback temperatures sample
    begun = time.perf_counter()
    with record_draws() as draws:
        stream = TranscriptionStream(
            model, Recording.of(samples), settings, options, Callbacks(on_attempt=record)
        )
        result = stream.result()
    return Run(samples, stream, result, attempts, time.perf_counter() - begun)


@dataclass(frozen=True)
class UpstreamPeer:
    """Compares every stage of every window with openai-whisper, on the same weights."""

    other: Any  # upstream.twin, or a model like it
    name: str = OPENAI

    def transcribe(
        self, samples: np.ndarray, settings: Settings, options: DecodingOptions
    ) -> tuple[Any, list[upstream.Attempt]]:
        given = vars(options) | vars(settings)  # both have a temperature: the loop's counts
        torch.manual_seed(0)
        return upstream.transcribe(
            self.other, samples, **{k: v for k, v in given.items() if k not in NOT_UPSTREAM}
        )

    def compare(self, ours: Run, output: Any) -> tuple[SystemTranscript, Record]:
        """Return their transcript, and fields of its record; output: of `transcribe`."""
        theirs, attempts = output
        model, settings = ours.stream.model, ours.stream.settings
        first: Any = first_divergence(model, self.other, ours.attempts, attempts, settings)
        last = ours.stream.n_frames if first is None else first.start
        difference = first_difference(ours.result, theirs)
        if difference is not None and (first is None or difference.start < last):
            first, last = difference, difference.start
        stage, stages = self._stages(ours, attempts, last)
        near_tie = str(first) if first is not None and first.is_near else None
        different = str(first) if first is not None and not first.is_near else None
        return SystemTranscript.of(theirs), {
            "first_difference": stage or different,
            "then": stage and different,
            "near_tie": near_tie,
            "stages": stages,
        }

    def _stages(
        self, ours: Run, attempts: Sequence[upstream.Attempt], last: int
    ) -> tuple[str | None, list[Record]]:
        """Return the first stage beyond its tolerance and the worst of each layer.

        last: first frame of the last window that is compared
        """
        stream, first_beyond = ours.stream, None
        worst: list[Record] = []
        for mine, others in pair_windows(ours.attempts, attempts):
            start, attempt = mine[0].start, others[-1]
            if start > last:
                break
            start_s = start / FRAMES_PER_SECOND
            window = stream.spectrogram.window(start, mine[0].n_frames, fill=stream.policy.fill)
            tokens = upstream.initial_tokens(self.other, attempt.options) + attempt.result.tokens
            tokens = tokens[: stream.model.dims.n_text_ctx]
            mel, policy = attempt.mel, stream.policy
            stages = compare(
                stream.model, self.other, window, mel, tokens, policy=policy, start_s=start_s
            )
            beyond = [stage for stage in stages if not stage.is_equal]
            if beyond and first_beyond is None:
                first_beyond = f"window at {start_s:.2f} s: {beyond[0]}"
            worst = worst_by_group([*(stage.as_dict() for stage in stages), *worst])
        return first_beyond, worst


@dataclass(frozen=True)
class TextPeer:
    """Compares text and times with any other system."""

    name: str
    system: System

    def transcribe(
        self, samples: np.ndarray, settings: Settings, options: DecodingOptions
    ) -> SystemTranscript:
        decoding = DecodingSettings(
            options.beam_size, options.language, options.task, settings.word_timestamps
        )
        self.system.load_audio = lambda path: samples  # same samples; no file is read or timed
        return self.system.transcribe(Path("samples"), decoding)

    def compare(self, ours: Run, theirs: SystemTranscript) -> tuple[SystemTranscript, Record]:
        """Return their transcript, and fields of its record."""
        mine = SystemTranscript.of(ours.result)
        if theirs.words is None:  # compare the segment times that the model wrote
            mine = replace(mine, segments=segments_from_tokens(ours), words=None)
        times = compare_times(mine, theirs, ours.normalise)
        difference = None
        if n_words := ours.n_words_different(theirs.text):
            difference = f"text: {n_words} words differ"
        elif times and not times.is_equal:
            difference = f"times: {times}"
        record = times and {**asdict(times), "summary": str(times)}
        return theirs, {"first_difference": difference, "times": record}


Peer = UpstreamPeer | TextPeer


def segments_from_tokens(run: Run) -> list[TimedText]:
    """Return segments with the times of their timestamp tokens, not adjusted to word times."""
    begin = run.stream.tokenizer.timestamp_begin
    segments = []
    for segment in run.result.segments:
        first, last = (segment.tokens or [0])[0], (segment.tokens or [0])[-1]
        offset_s = segment.seek / FRAMES_PER_SECOND
        start = offset_s + (first - begin) * POSITION_S if first >= begin else segment.start
        end = offset_s + (last - begin) * POSITION_S if last >= begin else segment.end
        segments.append(TimedText(start, end, segment.text))
    return segments


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Convert any exception of another system into an AsrmaskError of one line."""
    try:
        yield
    except AsrmaskError:
        raise
    except Exception as error:
        raise AsrmaskError(f"{name} failed: {type(error).__name__}: {one_line(error)}") from error


def parse_systems(given: Sequence[str]) -> list[str]:
    """Split comma-separated names of systems, and check them; duplicates are removed.

    Settings of a system may contain commas too: faster-whisper:int8,batch=8
    """
    kinds = "|".join(map(re.escape, systems.KINDS))
    names = list(dict.fromkeys(re.split(f",(?={kinds})", ",".join(given))))
    for named in map(Named.parse, names):
        if named.name == "asrmask":
            raise OptionError("--against must name another system, got asrmask")
        named.check()
    return names


def load_peers(
    names: Sequence[str], model: Whisper, model_name: str, model_dir: str | None, folder: Path
) -> Iterator[Peer]:
    """Load systems with the weights of `model` and its thread count; folder: for their weights."""
    for name in names:
        if name == OPENAI:
            yield UpstreamPeer(upstream.twin(model))
            continue
        named, n_threads = Named.parse(name), torch.get_num_threads()
        with one_line_errors(name):
            weights = systems.prepare(named, model_name, folder, model_dir)
            system = systems.load(named, weights, threads=n_threads, model_dir=model_dir)
        yield TextPeer(name, system)


def find_clips(sources: Sequence[str], reference: str | None = None) -> list[Clip]:
    """Find the clips of sources: files, folders of files, and data sets with transcripts.

    reference: transcript of the file, if there is exactly one
    """
    clips: list[Clip] = []
    for source in sources:
        path = Path(source)
        if path.suffix in MANIFESTS or (path.is_dir() and corpus.is_data_set(path)):
            clips += corpus.read(path)
        else:
            clips += [Clip(Path(name)) for name in jobs.files_of(source)]
    if reference is None:
        return clips
    if len(clips) != 1:
        raise OptionError(f"--reference is for one file, got {len(clips)}: use a manifest")
    return [replace(clips[0], text=reference)]


def load_samples(clip: Clip) -> np.ndarray:
    """Load all samples of a clip; raise if it is broken or shorter than a frame."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", AudioWarning)  # do not compare truncated audio
        try:
            recording = clip.recording()
        except AudioWarning as problem:
            raise AudioError(str(problem)) from None
    recording.check_length(str(clip.path))
    return recording.read(0, recording.n_samples)


class Comparison:
    """asrmask and the other systems, loaded once for all clips."""

    def __init__(
        self, model: Whisper, peers: Sequence[Peer], settings: Settings, options: DecodingOptions
    ):
        self.model, self.peers, self.settings = model, peers, settings
        self.options = replace(options, fp16=False)
        self.is_warm = False

    def compare(self, clip: Clip) -> Record:
        """Transcribe a clip with all systems; return the record of their comparison."""
        samples = load_samples(clip)
        if not self.is_warm:
            self._warm_up(samples[: WARMUP_S * SAMPLE_RATE])
        ours = run(self.model, samples, self.settings, self.options)
        language = ours.result.language if clip.text is None else clip.language
        if self.options.task == "translate":
            language = "en"
        ours = replace(ours, language=language, reference=clip.text)
        against = {peer.name: self._compare_peer(peer, ours) for peer in self.peers}
        return {
            "path": str(clip.path),
            "name": clip.path.name,
            "duration_s": len(samples) / SAMPLE_RATE,
            "equal": all(record["equal"] for record in against.values()),
            "language": language,  # of the text normaliser
            "reference": clip.text,
            "asrmask": ours.record(SystemTranscript.of(ours.result), ours.seconds),
            "against": against,
        }

    def _compare_peer(self, peer: Peer, ours: Run) -> Record:
        """Return the record of the comparison with one system.

        first_difference: beyond its tolerance; None: equal
        then:             if that is a stage, the first difference of the texts
        near_tie:         the first difference, if it is within its tolerance
        stages:           the worst of each layer, over all windows
        """
        begun = time.perf_counter()
        output: Any = self._transcribe(peer, ours.samples)
        seconds = time.perf_counter() - begun
        transcript, found = peer.compare(ours, output)
        n_words = ours.n_words_different(transcript.text)
        found = {"then": None, "near_tie": None, "stages": [], "times": None, **found}
        names = {"first_difference": "first difference", "then": "then", "near_tie": "near"}
        notes = [f"{name}: {found[key]}" for key, name in names.items() if found[key] is not None]
        is_equal, times = found["first_difference"] is None, found["times"]
        if times and (is_equal or n_words):  # else they are the first difference
            notes.append(times["summary"])
        found |= {"equal": is_equal, "notes": notes, "words_different": n_words}
        return {**found, "speed": seconds / ours.seconds, **ours.record(transcript, seconds)}

    def _warm_up(self, samples: np.ndarray) -> None:
        """Run samples through all systems: timing must exclude compiling and loading."""
        run(self.model, samples, self.settings, self.options)
        for peer in self.peers:
            self._transcribe(peer, samples)
        self.is_warm = True

    def _transcribe(self, peer: Peer, samples: np.ndarray) -> Any:
        with one_line_errors(peer.name):
            return peer.transcribe(samples, self.settings, self.options)
