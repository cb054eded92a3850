"""Decode the requests of several window loops in batches.

A decoder step reads all weights, whether for one text or for sixteen. Batches hold windows of
similar length, to waste little computation. Each window gets the same text as it would alone.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import torch

from asrmask.decoding.task import decode_encoded
from asrmask.model.encoding import encode_all
from asrmask.model.whisper import Whisper
from asrmask.transcription.stream import TranscriptionStream, decode_request
from asrmask.transcription.window_loop import DecodeReply, DecodeRequest, WindowLoop

AHEAD = 2  # pending windows, in batches: more choice of similar lengths

Key = TypeVar("Key")


class Loop(Protocol):
    """Asks for texts: a window loop, or a live one."""

    request: DecodeRequest | None


AnyLoop = TypeVar("AnyLoop", bound=Loop)


def run_streams(
    model: Whisper, streams: Iterator[tuple[Key, TranscriptionStream]], batch_size: int
) -> Iterator[tuple[Key, TranscriptionStream]]:
    """Yield each recording when it is finished; its `transcription()` raises what ended it early.

    An exception ends only the recording that raised it.

    streams: (any key, recording) pairs, consumed lazily when more windows are needed
    """
    open_streams: list[tuple[Key, TranscriptionStream]] = []
    loops: list[WindowLoop] = []

    def start_loops() -> Iterator[WindowLoop]:
        for key, stream in streams:
            open_streams.append((key, stream))
            try:
                yield from (loop for loop in stream.start_loops() if loop.request)
            except Exception as error:
                stream.error = error

    started = start_loops()
    while True:
        loops += islice(started, AHEAD * batch_size - len(loops))
        batch = choose_batch(loops, batch_size)
        if batch:
            _decode(model, batch)
        loops = [loop for loop in loops if loop.request and loop.stream.error is None]
        finished = [(key, stream) for key, stream in open_streams if stream.is_finished]
        for pair in finished:
            open_streams.remove(pair)
        yield from finished
        if not batch:
            return


def _decode(model: Whisper, loops: Sequence[WindowLoop]) -> None:
    """Decode a batch and send each loop its result. If the batch fails, decode each loop alone."""
    try:
        replies = decode_batch(model, [_request(loop) for loop in loops])
    except Exception as error:
        for loop in loops:
            if len(loops) > 1:
                _decode(model, [loop])
            else:
                loop.stream.error = error
        return
    for loop, (encoded, result) in zip(loops, replies, strict=True):
        try:
            loop.send(encoded, result)
        except Exception as error:
            loop.stream.error = error


def _request(loop: Loop) -> DecodeRequest:
    assert loop.request is not None
    return loop.request


def _n_frames(loop: Loop) -> int:
    return _request(loop).window.n_frames


def choose_batch(loops: Sequence[AnyLoop], batch_size: int) -> Sequence[AnyLoop]:
    """The oldest request and others of similar length, as one batch.

    loops: each with a request
    """
    if not loops or _request(loops[0]).batch_key is None:
        return loops[:1]
    first = _request(loops[0])
    alike = [loop for loop in loops if _request(loop).batch_key == first.batch_key]
    alike.sort(key=lambda loop: abs(_n_frames(loop) - first.window.n_frames))
    return sorted(alike[:batch_size], key=_n_frames)


def decode_batch(model: Whisper, requests: Sequence[DecodeRequest]) -> list[DecodeReply]:
    """Decode requests with equal batch keys in one batch; one without a key must be alone."""
    first = requests[0]
    if first.batch_key is None:
        (request,) = requests
        # seed from the window, so that its text does not depend on earlier windows
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(request.window.frames.numpy().tobytes()))
            return [decode_request(model, request)]
    encoded = encode_all(model, [request.window for request in requests], first.policy)
    results = decode_encoded(model, encoded, first.options)
    kept = [encoded.select([i]) if first.keep_encoded else None for i in range(len(requests))]
    return list(zip(kept, results, strict=True))
