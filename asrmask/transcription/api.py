"""The Python API for transcription."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor
from typing_extensions import Unpack

from asrmask.audio.media import Source
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features
from asrmask.decoding.language import detect_language
from asrmask.decoding.options import DecodeKeywords, DecodingOptions, DecodingResult
from asrmask.decoding.task import decode
from asrmask.errors import OptionError
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer
from asrmask.transcription.presets import Preset, get_preset
from asrmask.transcription.result import Transcription
from asrmask.transcription.scheduler import run_streams
from asrmask.transcription.settings import Settings, TranscribeKeywords, split_options
from asrmask.transcription.stream import TranscriptionStream
from asrmask.transcription.window_loop import Callbacks
from asrmask.transcription.writers import line

Audio = Source | np.ndarray | Tensor | Recording


def as_recording(audio: Audio) -> Recording:
    """Convert a file or 16 kHz samples to a Recording; see `transcribe`."""
    if isinstance(audio, Recording):
        return audio
    return Recording.of(audio) if isinstance(audio, (np.ndarray, Tensor)) else Recording.open(audio)


def stream(
    model: Whisper,
    audio: Audio,
    settings: Settings | None = None,
    options: DecodingOptions | None = None,
    callbacks: Callbacks | None = None,
) -> TranscriptionStream:
    """Transcribe a recording lazily: iterate to get segments as they are decoded."""
    settings, options = settings or Settings(), options or DecodingOptions()
    return TranscriptionStream(model, as_recording(audio), settings, options, callbacks)


def transcribe(
    model: Whisper,
    audio: Audio,
    *,
    preset: str | Preset | None = None,
    batch_size: int | None = None,
    verbose: bool | None = None,
    **options: Unpack[TranscribeKeywords],
) -> Transcription:
    """Transcribe a recording of any length to text, segments and language.

    audio:      a path ("-": standard input), the bytes of a file, an open file, or 16 kHz samples:
                floats in −1..1 or 16-bit integers, mono or (channels, n)
    preset:     a named set of options: "fast". Explicit options override it. Its full speed needs
                a model loaded with compute_type="int8"
    batch_size: windows decoded together; needs independent parts (cut_at_pauses)
    verbose:    print segments as they are decoded
    options:    fields of Settings and DecodingOptions, with openai-whisper's names
    """
    chosen = get_preset(preset)
    settings, decoding = split_options({**chosen.options, **options})
    running = stream(model, audio, settings, decoding)
    size = _batch_size(batch_size, chosen.batch_size)
    if size > 1:
        ((_, outcome),) = run_streams(model, iter([running]), size)
        if isinstance(outcome, Exception):
            raise outcome
        if verbose:
            print(*map(line, outcome.segments), sep="\n", flush=True)
        return outcome
    for segment in running:
        if verbose:
            print(line(segment), flush=True)
    return running.result()


def transcribe_all(
    model: Whisper,
    audios: Sequence[Audio],
    *,
    preset: str | Preset | None = None,
    batch_size: int | None = None,
    **options: Unpack[TranscribeKeywords],
) -> list[Transcription]:
    """Transcribe many recordings, decoding several windows together.

    batch_size: windows decoded together; None: the preset's, or 8; 1: no batching
    others:     see `transcribe`
    """
    chosen = get_preset(preset)
    size = _batch_size(batch_size, chosen.batch_size if preset else 8)
    settings, decoding = split_options({**chosen.options, **options})
    if size == 1:
        return [stream(model, audio, settings, decoding).result() for audio in audios]
    numbers: dict[TranscriptionStream, int] = {}

    def streams() -> Iterator[TranscriptionStream]:
        for i, audio in enumerate(audios):
            one = stream(model, audio, settings, decoding)
            numbers[one] = i
            yield one

    found = {}
    for one, outcome in run_streams(model, streams(), size):
        if isinstance(outcome, Exception):
            raise outcome
        found[numbers.pop(one)] = outcome
    return [found[i] for i in range(len(audios))]


def _batch_size(given: int | None, default: int) -> int:
    if given is not None and given < 1:
        raise OptionError(f"batch_size must be 1 or more, got {given}")
    return given or default


class TranscribingWhisper(Whisper):
    """Whisper with openai-whisper's methods; returned by `load_model`.

    The base model (model/whisper.py) does not handle files or text.
    """

    def transcribe(
        self,
        audio: Audio,
        *,
        preset: str | Preset | None = None,
        batch_size: int | None = None,
        verbose: bool | None = None,
        **options: Unpack[TranscribeKeywords],
    ) -> Transcription:
        """See asrmask.transcribe."""
        return transcribe(
            self, audio, preset=preset, batch_size=batch_size, verbose=verbose, **options
        )

    def decode(
        self,
        mel: Tensor | Features | Sequence[Features],
        options: DecodingOptions | None = None,
        *,
        padding: Policy | str | None = None,
        **overrides: Unpack[DecodeKeywords],
    ) -> DecodingResult | list[DecodingResult]:
        """See asrmask.decode."""
        return decode(self, mel, options, padding=padding, **overrides)

    def detect_language(
        self, mel: Tensor | Features | Sequence[Features], tokenizer: Tokenizer | None = None
    ) -> tuple[Tensor, dict[str, float] | list[dict[str, float]]]:
        """See asrmask.detect_language."""
        return detect_language(self, mel, tokenizer)
