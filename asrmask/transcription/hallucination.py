"""Detect hallucinated text: words that are too short, too long or too unlikely.

Needs word timestamps. Suspicious text between silences is dropped, and the silence is skipped.
"""

from typing import TYPE_CHECKING

from asrmask.audio.constants import FRAMES_PER_SECOND
from asrmask.transcription.punctuation import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS
from asrmask.transcription.result import Segment, Word

if TYPE_CHECKING:
    from asrmask.transcription.stream import TranscriptionStream

PUNCTUATION = PREPEND_PUNCTUATIONS + APPEND_PUNCTUATIONS
N_SCORED = 8  # words at the start of a segment that are scored
EDGE_S = 2.0  # closer to a window's edge counts as next to silence


def anomaly_score(word: Word) -> float:
    """Score how unlikely, short or long a word is: 0 for a normal one."""
    duration = word.end - word.start
    unlikely = float(word.probability < 0.15)
    return unlikely + max(0.0, 0.133 - duration) * 15 + max(0.0, duration - 2.0)


def is_anomaly(segment: Segment | None) -> bool:
    """Whether nearly all of the first words are anomalous, or a few are strongly so."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.word not in PUNCTUATION][:N_SCORED]
    score = sum(map(anomaly_score, words))
    return score >= 3 or score + 0.01 >= len(words)


def _first_with_words(segments: list[Segment]) -> Segment | None:
    return next((segment for segment in segments if segment.words), None)


def skip_hallucinations(
    segments: list[Segment],
    stream: "TranscriptionStream",
    threshold: float,
    start: int,
    size: int,
    seek: int,
    last_speech_s: float,
) -> tuple[int, int | None]:
    """Return the start of the next window, and how many segments of this one to keep.

    The count is None if the window starts with silence: discard it and decode from the new start.

    threshold: seconds; longer pauses are silence
    start:     start of this window, and size: its length, in frames
    seek:      start of the next window if nothing is dropped
    """
    start_s = start / FRAMES_PER_SECOND
    end_s = start_s + size / FRAMES_PER_SECOND
    max_end_s = (start + stream.settings.window_frames) / FRAMES_PER_SECOND
    first = _first_with_words(segments)
    if first is not None and is_anomaly(first) and first.start - start_s > threshold:
        return start + round((first.start - start_s) * FRAMES_PER_SECOND), None

    for i, segment in enumerate(segments):
        if not segment.words:
            continue
        following = _first_with_words(segments[i + 1 :])
        next_start_s = following.words[0].start if following and following.words else end_s
        silence_before = (
            segment.start - last_speech_s > threshold
            or segment.start < threshold
            or segment.start - start_s < EDGE_S
        )
        silence_after = (
            next_start_s - segment.end > threshold
            or is_anomaly(following)
            or max_end_s - segment.end < EDGE_S
        )
        if is_anomaly(segment) and silence_before and silence_after:
            if stream.n_frames / FRAMES_PER_SECOND - segment.end < threshold:
                return stream.n_frames, i
            return round(max(start_s + 1, segment.start) * FRAMES_PER_SECOND), i
        last_speech_s = segment.end
    return seek, len(segments)
