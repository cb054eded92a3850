"""Many windows at a time: what the walks through several recordings ask for, answered together.

A decoder step reads all of its weights, for one text or for sixteen. Windows of like lengths make a
batch, so that little is computed in vain; each gets the text that it would get alone.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asrmask.allocation import trim
from asrmask.decoding import decode_memory
from asrmask.encoding import encode_all, n_keys
from asrmask.errors import OptionError
from asrmask.model import Room, Whisper
from asrmask.policy import N_POSITIONS
from asrmask.settings import sorted_out
from asrmask.transcriber import Audio, Stream, answer, opened, transcribe
from asrmask.transcription import Segment, Transcription
from asrmask.walk import Answer, Ask, Walk

AHEAD = 2  # batches whose windows wait, to be matched by length
MOST_BYTES = 16 * 2**20  # of what is remembered of a batch; but two windows always fit


def transcribe_all(
    model: Whisper, audios: Sequence[Audio], *, batch_size: int = 8, **options: Any
) -> list[Transcription]:
    """The text, segments and language of many recordings.

    audios:     each as in `transcribe`
    batch_size: windows that are decoded at a time; 1: one recording after the other
    options:    as in `transcribe`
    """
    if batch_size < 1:
        raise OptionError(f"batch_size must be 1 or more, got {batch_size}")
    if batch_size == 1:
        return [transcribe(model, audio, **options) for audio in audios]
    settings, decoding = sorted_out(options)
    numbers: dict[Stream, int] = {}

    def streams() -> Iterator[Stream]:
        for i, audio in enumerate(audios):
            stream = Stream(model, opened(audio), settings, decoding)
            numbers[stream] = i
            yield stream

    found = {}
    for stream, outcome in transcriptions(model, streams(), batch_size):
        if isinstance(outcome, Exception):
            raise outcome
        found[numbers.pop(stream)] = outcome
    return [found[i] for i in range(len(audios))]


@dataclass
class _Task:
    """A recording that is being transcribed: what each of its parts has said.

    error: what ended the work on it before its end
    """

    stream: Stream
    parts: list[list[Segment]] = field(default_factory=list)
    n_open: int = 0
    all_begun: bool = False
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or (self.all_begun and self.n_open == 0)

    def outcome(self) -> Transcription | Exception:
        if self.error is not None:
            return self.error
        try:
            return self.stream.transcription([segment for part in self.parts for segment in part])
        except Exception as error:
            return error


@dataclass
class _Going:
    """A walk under way."""

    task: _Task
    walk: Walk
    said: list[Segment]


def transcriptions(
    model: Whisper, streams: Iterator[Stream], batch_size: int
) -> Iterator[tuple[Stream, Transcription | Exception]]:
    """Each recording with its transcription, or the exception that ended it, as soon as it is done.

    An exception ends the recording that it came from; the others go on.

    streams: taken one by one, when there is room for their windows
    """
    tasks: list[_Task] = []
    waiting: list[_Going] = []
    begun = _begun(streams, tasks)
    most_keys = max(MOST_BYTES // Room.bytes_of_key(model), 2 * N_POSITIONS)
    room = Room(model, most_keys)
    more = True
    while more or waiting:
        while more and len(waiting) < AHEAD * batch_size:
            going = next(begun, None)
            if going is None:
                more = False
            elif going.walk.ask is not None:
                waiting.append(going)
            else:
                going.task.n_open -= 1
        batch = _matching(waiting, batch_size, most_keys)
        _go_on(model, batch, room)
        waiting = [g for g in waiting if g.walk.ask is not None and g.task.error is None]
        if waiting or more:
            trim()  # batches differ, and what is kept of each would add up
        for task in [task for task in tasks if task.is_done]:
            tasks.remove(task)
            yield task.stream, task.outcome()


def _begun(streams: Iterator[Stream], tasks: list[_Task]) -> Iterator[_Going]:
    """Every walk of every recording, begun when it is asked for."""
    for stream in streams:
        task = _Task(stream)
        tasks.append(task)
        try:
            for walk in stream.walks:
                said: list[Segment] = []
                task.parts.append(said)
                task.n_open += 1
                yield _Going(task, walk, said)
                if task.error is not None:
                    break
        except Exception as error:
            task.error = error
        task.all_begun = True


def _go_on(model: Whisper, batch: Sequence[_Going], room: Room) -> None:
    """Answer the walks of a batch; what fails for several is tried again with each alone."""
    try:
        answers = answer_all(model, [_ask(going) for going in batch], room)
    except Exception as error:
        for going in batch:
            if len(batch) > 1:
                _go_on(model, [going], room)
            else:
                going.task.error = error
        return
    for going, (memory, result) in zip(batch, answers, strict=True):
        try:
            going.said += going.walk.tell(memory, result)
        except Exception as error:
            going.task.error = error
        if going.walk.ask is None:
            going.task.n_open -= 1


def _ask(going: _Going) -> Ask:
    assert going.walk.ask is not None
    return going.walk.ask


def _matching(waiting: Sequence[_Going], batch_size: int, most_keys: int) -> list[_Going]:
    """The walk that waits longest, and those that can be answered with it, nearest in length.

    most_keys: of all of them together
    """
    if not waiting:
        return []
    first = _ask(waiting[0])
    if not _is_shared(first):
        return [waiting[0]]
    alike = [going for going in waiting if _is_alike(_ask(going), first)]
    alike.sort(key=lambda going: abs(_length(going) - _length(waiting[0])))
    chosen = alike[:batch_size]
    while len(chosen) > 1 and sum(map(_n_keys, chosen)) > most_keys:
        chosen.pop()
    return sorted(chosen, key=_length)


def _length(going: _Going) -> int:
    return _ask(going).window.n_frames


def _n_keys(going: _Going) -> int:
    """How many keys the decoder attends to, of a window."""
    ask = _ask(going)
    return n_keys(ask.policy, ask.policy.visible(ask.window.n_positions))


def _is_shared(ask: Ask) -> bool:
    """Whether it can be answered beside others: first attempts are."""
    return ask.memory is None and ask.options.temperature == 0


def _is_alike(ask: Ask, other: Ask) -> bool:
    if not _is_shared(ask) or ask.keep_memory != other.keep_memory:
        return False
    return ask.policy == other.policy and ask.options == other.options


def answer_all(model: Whisper, asks: Sequence[Ask], room: Room) -> list[Answer]:
    """The texts of windows that are asked for alike; memories where they are wanted again."""
    if not asks:
        return []
    if not _is_shared(asks[0]):
        (ask,) = asks
        # drawn by the window's own dice, so that its text does not depend on what came before it
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(ask.window.frames.numpy().tobytes()))
            return [answer(model, ask)]
    is_kept = asks[0].keep_memory
    windows = [ask.window for ask in asks]
    memory = encode_all(model, windows, asks[0].policy, None if is_kept else room)
    results = decode_memory(model, memory, asks[0].options)
    return [(memory.one(i) if is_kept else None, result) for i, result in enumerate(results)]
