"""The Python API for live transcription."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from asrmask.audio.recording import Recording
from asrmask.errors import OptionError
from asrmask.live.events import Event
from asrmask.live.loop import LiveLoop
from asrmask.live.settings import split_live_options
from asrmask.model.whisper import Whisper
from asrmask.transcription.scheduler import choose_batch, decode_batch

MAX_BATCH = 16

Samples = np.ndarray | Tensor


class LiveTranscriber:
    """Transcribes audio while it arrives.

    Events depend on the samples alone: not on how they are cut into pieces, nor on the clock.
    """

    def __init__(self, model: Whisper, **options: Any):
        """options: fields of LiveSettings and of DecodingOptions"""
        self.loop = LiveLoop(model, *split_live_options(options))

    def push(self, samples: Samples, *, late: bool = False) -> list[Event]:
        """Add audio and return what it leads to.

        samples: mono 16 kHz, floats in −1..1 or integers of 16 or 32 bits
        late:    more audio is waiting already: no update before the end of an utterance
        """
        return push_all([self], [samples], late=late)[0]

    def finish(self) -> list[Event]:
        """End the audio and return the last events."""
        self.loop.close()
        _answer([self.loop])
        return self.loop.take_events()


def push_all(
    transcribers: Sequence[LiveTranscriber],
    pieces: Sequence[Samples],
    *,
    late: bool = False,
) -> list[list[Event]]:
    """Add a piece to each of several transcribers of one model. They are decoded in batches."""
    if len({id(one.loop.model) for one in transcribers}) > 1:
        raise OptionError("transcribers must share one model, got several")
    for one, samples in zip(transcribers, pieces, strict=True):
        recording = Recording.of(samples)
        one.loop.add(recording.read(0, recording.n_samples), late=late)
    _answer([one.loop for one in transcribers])
    return [one.loop.take_events() for one in transcribers]


def _answer(loops: Sequence[LiveLoop]) -> None:
    """Answer all requests of the loops, those that are alike in one batch."""
    while waiting := [loop for loop in loops if loop.request is not None]:
        batch = choose_batch(waiting, MAX_BATCH)
        replies = decode_batch(batch[0].model, [loop.asked for loop in batch])
        for loop, reply in zip(batch, replies, strict=True):
            loop.send(*reply)


def listen(model: Whisper, chunks: Iterable[Samples], **options: Any) -> Iterator[Event]:
    """Transcribe audio while it arrives, and yield events.

    chunks:  mono 16 kHz samples, in pieces of any size
    options: see LiveSettings and DecodingOptions
    """
    transcriber = LiveTranscriber(model, **options)
    for samples in chunks:
        yield from transcriber.push(samples)
    yield from transcriber.finish()
