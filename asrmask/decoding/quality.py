"""Detect wrong texts: endless, repetitive, too short or too unlikely."""

import zlib
from collections.abc import Sequence

from asrmask.audio.constants import FRAMES_PER_SECOND, POSITIONS_PER_SECOND
from asrmask.audio.spectrogram import Features
from asrmask.decoding.options import DecodingResult

# beyond these limits, a text decoded with hidden padding is decoded again with all padding
MAX_COMPRESSION = 2.4  # the same as in the window loop's temperature fallback
MIN_LOGPROB = -0.7  # stricter than that fallback (−1): full padding is a better retry
MIN_SURE_LOGPROB = -0.3  # where no other temperature is tried: the text may be another one
FEW_TOKENS = 5  # with fewer tokens, one rare word dominates the average log-probability
LONG_REPEAT = 6  # tokens: nobody repeats so long a phrase at once
TEXT_TOKENS = 50_256  # ids below are text in every vocabulary; special tokens follow
MAX_LATE_S = 1.0  # latest start of words after the end of the audio
LOUD = 0.4  # a loud frame is at most this far below the 95th percentile, mean over Mel bands: 16 dB
MIN_TEXT_RATE = 13  # bytes of text per second of loud frames; complete texts have 14 or more
MIN_LOUD_S = 1.0


def compression_ratio(text: str) -> float:
    """Return text size divided by its zlib size: high for repetitive text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def runaway_reason(
    result: DecodingResult,
    n_positions: int,
    *,
    max_compression: float | None = MAX_COMPRESSION,
    min_logprob: float | None = MIN_LOGPROB,
) -> str | None:
    """Return why a text decoded with hidden padding is unreliable; None if it is reliable.

    n_positions: encoder positions of audio in the window
    """
    if not result.ended:
        return "no end"
    compresses = max_compression is not None and result.compression_ratio > max_compression
    if compresses or has_immediate_repeat([t for t in result.tokens if t < TEXT_TOKENS]):
        return "repetition"
    is_long = len(result.tokens) >= FEW_TOKENS
    if is_long and min_logprob is not None and result.avg_logprob < min_logprob:
        return "unsure"
    end_s = n_positions / POSITIONS_PER_SECOND
    if result.last_start is not None and result.last_start - end_s > MAX_LATE_S:
        return "times past the end"
    return None


def stops_early(text: str, window: Features) -> bool:
    """Return whether a text is too short for the loud audio in its window.

    Without timestamps, the model often mistakes the pause after a heading for the end of speech.
    """
    loudness = window.frames[:, : window.n_frames].mean(dim=0)
    loud_s = float((loudness > loudness.quantile(0.95) - LOUD).sum()) / FRAMES_PER_SECOND
    return loud_s >= MIN_LOUD_S and len(text.encode()) < MIN_TEXT_RATE * loud_s


def has_immediate_repeat(tokens: Sequence[int], min_length: int = LONG_REPEAT) -> bool:
    """Return whether a phrase of at least min_length tokens is immediately repeated.

    >>> has_immediate_repeat([7, 1, 2, 3, 1, 2, 3, 8], 3)
    True
    >>> has_immediate_repeat([1, 2, 3, 8, 1, 2, 3], 3)
    False
    """
    for period in range(min_length, len(tokens) // 2 + 1):
        n_equal = 0
        for a, b in zip(tokens, tokens[period:], strict=False):
            n_equal = n_equal + 1 if a == b else 0
            if n_equal == period:
                return True
    return False
