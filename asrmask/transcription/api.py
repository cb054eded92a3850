"""The Python API for transcription."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from typing_extensions import Unpack

from asrmask.audio.media import Source
from asrmask.audio.recording import Recording
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode, detect_language
from asrmask.errors import OptionError
from asrmask.model.whisper import Whisper
from asrmask.transcription.presets import Preset, get_preset
from asrmask.transcription.result import Transcription
from asrmask.transcription.scheduler import run_streams
from asrmask.transcription.settings import Settings, TranscribeKeywords, split_options
from asrmask.transcription.stream import TranscriptionStream
from asrmask.transcription.window_loop import Callbacks
from asrmask.transcription.writers import format_segment

Audio = Source | np.ndarray | Tensor | Recording


def stream(
    model: Whisper,
    audio: Audio,
    settings: Settings | None = None,
    options: DecodingOptions | None = None,
    callbacks: Callbacks | None = None,
) -> TranscriptionStream:
    """Transcribe a recording lazily: iterate to get segments as they are decoded."""
    settings, options = settings or Settings(), options or DecodingOptions()
    if isinstance(audio, (np.ndarray, Tensor)):
        audio = Recording.of(audio)
    elif not isinstance(audio, Recording):
        audio = Recording.open(audio)
    return TranscriptionStream(model, audio, settings, options, callbacks)


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
    size = chosen.batch_size if batch_size is None else batch_size
    if size != 1:
        (result,) = transcribe_all(model, [audio], preset=preset, batch_size=size, **options)
        if verbose:
            print(*map(format_segment, result.segments), sep="\n", flush=True)
        return result
    running = stream(model, audio, *split_options({**chosen.options, **options}))
    for segment in running:
        if verbose:
            print(format_segment(segment), flush=True)
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
    if batch_size is None:
        batch_size = chosen.batch_size if preset else 8
    if batch_size < 1:
        raise OptionError(f"batch_size must be 1 or more, got {batch_size}")
    settings, decoding = split_options({**chosen.options, **options})
    if batch_size == 1:
        return [stream(model, audio, settings, decoding).result() for audio in audios]
    streams = ((i, stream(model, audio, settings, decoding)) for i, audio in enumerate(audios))
    finished = run_streams(model, streams, batch_size)
    results = {i: running.transcription() for i, running in finished}
    return [results[i] for i in range(len(audios))]


class TranscribingWhisper(Whisper):
    """Whisper with openai-whisper's methods; returned by `load_model`.

    The base model (model/whisper.py) does not handle files or text.
    """

    transcribe = transcribe
    decode = decode
    detect_language = detect_language
