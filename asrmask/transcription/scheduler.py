"""Decode the requests of several window loops in batches.

A decoder step reads all weights, whether for one text or for sixteen. Batches hold windows of
similar length, to waste little computation. Each window gets the same text as it would alone.
"""

import zlib
from collections.abc import Iterator, Sequence

import torch

from asrmask.audio.constants import N_POSITIONS
from asrmask.decoding.task import decode_encoded
from asrmask.model.encoding import encode_all, n_cross_keys
from asrmask.model.whisper import Whisper
from asrmask.transcription.result import Transcription
from asrmask.transcription.stream import TranscriptionStream, decode_request
from asrmask.transcription.window_loop import DecodeReply, DecodeRequest, WindowLoop

AHEAD = 2  # pending windows, in batches: more choice of similar lengths
MAX_BATCH_BYTES = 64 * 2**20  # of cross-attention keys and values; two windows always fit


def run_streams(
    model: Whisper, streams: Iterator[TranscriptionStream], batch_size: int
) -> Iterator[tuple[TranscriptionStream, Transcription | Exception]]:
    """Yield each finished recording with its transcription, or with the exception that ended it.

    An exception ends only the recording that raised it.

    streams: consumed lazily, when more windows are needed
    """
    open_streams: list[TranscriptionStream] = []
    loops: list[WindowLoop] = []
    started = _start(streams, open_streams)
    max_keys = max(MAX_BATCH_BYTES // model.decoder.cross_bytes(), 2 * N_POSITIONS)
    has_more = True
    while has_more or loops:
        while has_more and len(loops) < AHEAD * batch_size:
            loop = next(started, None)
            if loop is None:
                has_more = False
            elif loop.request is not None:
                loops.append(loop)
        _decode(model, _choose_batch(loops, batch_size, max_keys))
        loops = [loop for loop in loops if loop.request and loop.stream.error is None]
        for stream in [stream for stream in open_streams if stream.is_finished]:
            open_streams.remove(stream)
            yield stream, _outcome(stream)


def _start(
    streams: Iterator[TranscriptionStream], open_streams: list[TranscriptionStream]
) -> Iterator[WindowLoop]:
    """Lazily start every window loop of every recording."""
    for stream in streams:
        open_streams.append(stream)
        try:
            yield from stream.start_loops()
        except Exception as error:
            stream.error = error


def _outcome(stream: TranscriptionStream) -> Transcription | Exception:
    if stream.error is not None:
        return stream.error
    try:
        return stream.transcription()
    except Exception as error:
        return error


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


def _request(loop: WindowLoop) -> DecodeRequest:
    assert loop.request is not None
    return loop.request


def _choose_batch(
    loops: Sequence[WindowLoop], batch_size: int, max_keys: int
) -> Sequence[WindowLoop]:
    """The oldest request and others of similar length, as one batch.

    max_keys: maximum cross-attention keys in the batch
    """
    if not loops:
        return []
    first = _request(loops[0])
    if not _can_batch(first):
        return loops[:1]
    alike = [loop for loop in loops if _is_alike(_request(loop), first)]
    alike.sort(key=lambda loop: abs(_length(loop) - _length(loops[0])))
    chosen = alike[:batch_size]
    while len(chosen) > 1 and sum(map(_n_keys, chosen)) > max_keys:
        chosen.pop()
    return sorted(chosen, key=_length)


def _length(loop: WindowLoop) -> int:
    return _request(loop).window.n_frames


def _n_keys(loop: WindowLoop) -> int:
    request = _request(loop)
    return n_cross_keys(request.policy, request.window.n_positions)


def _can_batch(request: DecodeRequest) -> bool:
    """Return whether a request can be batched: only first attempts at temperature 0."""
    return request.encoded is None and request.options.temperature == 0


def _is_alike(request: DecodeRequest, other: DecodeRequest) -> bool:
    if not _can_batch(request) or request.keep_encoded != other.keep_encoded:
        return False
    return request.policy == other.policy and request.options == other.options


def decode_batch(model: Whisper, requests: Sequence[DecodeRequest]) -> list[DecodeReply]:
    """Decode windows that share the same options, in one batch."""
    if not requests:
        return []
    first = requests[0]
    if not _can_batch(first):
        (request,) = requests
        # seed from the window, so that its text does not depend on earlier windows
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(request.window.frames.numpy().tobytes()))
            return [decode_request(model, request)]
    encoded = encode_all(model, [request.window for request in requests], first.policy)
    results = decode_encoded(model, encoded, first.options)
    kept = [encoded.select([i]) if first.keep_encoded else None for i in range(len(requests))]
    return list(zip(kept, results, strict=True))
