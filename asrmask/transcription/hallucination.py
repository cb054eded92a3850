"""Detect hallucinated text: words that are too short, too long or too unlikely.

Needs word timestamps. Suspicious text between silences is dropped, and the silence is skipped.
"""

from asrmask.audio.constants import FRAMES_PER_SECOND, N_FRAMES
from asrmask.transcription.punctuation import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS
from asrmask.transcription.result import Segment, Word
from asrmask.transcription.word_timing import end_of

PUNCTUATION = PREPEND_PUNCTUATIONS + APPEND_PUNCTUATIONS
N_JUDGED = 8  # words at the start of a segment that are scored
EDGE_S = 2.0  # closer to a window's edge counts as next to silence


def anomaly(word: Word) -> float:
    """Return an anomaly score of a word: 0 for a normal one."""
    duration = word.end - word.start
    score = 0.0
    if word.probability < 0.15:
        score += 1.0
    if duration < 0.133:
        score += (0.133 - duration) * 15
    if duration > 2.0:
        score += duration - 2.0
    return score


def is_anomaly(segment: Segment | None) -> bool:
    """Return whether nearly all of the first words are anomalous, or a few are strongly so."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.word not in PUNCTUATION][:N_JUDGED]
    score = sum(map(anomaly, words))
    return score >= 3 or score + 0.01 >= len(words)


def with_words(segments: list[Segment]) -> Segment | None:
    return next((segment for segment in segments if segment.words), None)


def skip_hallucinations(
    segments: list[Segment],
    threshold: float,
    *,
    start: int,
    size: int,
    n_frames: int,
    seek: int,
    settled: bool,
    last_speech_s: float,
    longest: int = N_FRAMES,
) -> tuple[int, int | None]:
    """Return the start of the next window, and how many segments of this one to keep.

    The count is None if the window opens with silence: discard it and decode from the new start.

    start, size: of this window, in frames
    n_frames:    of the recording
    longest:     maximum frames of a window
    seek:        proposed start of the next window
    settled:     do not move `seek` to the end of the last word
    """
    offset_s = start / FRAMES_PER_SECOND
    window_end_s = (start + longest) / FRAMES_PER_SECOND
    last_word_s = end_of(segments)
    if not settled and last_word_s is not None and last_word_s > offset_s:
        rest_s = window_end_s - last_word_s
        seek = round(last_word_s * FRAMES_PER_SECOND) if rest_s > threshold else start + size

    first = with_words(segments)
    if first is not None and is_anomaly(first) and first.start - offset_s > threshold:
        # the window opens with silence: decode again from its end
        return start + round((first.start - offset_s) * FRAMES_PER_SECOND), None

    previous_end_s = last_speech_s
    for i, segment in enumerate(segments):
        if not segment.words:
            continue
        if is_anomaly(segment):
            following = with_words(segments[i + 1 :])
            next_start_s = offset_s + size / FRAMES_PER_SECOND
            if following is not None and following.words:
                next_start_s = following.words[0].start
            silence_before = (
                segment.start - previous_end_s > threshold
                or segment.start < threshold
                or segment.start - offset_s < EDGE_S
            )
            silence_after = (
                next_start_s - segment.end > threshold
                or is_anomaly(following)
                or window_end_s - segment.end < EDGE_S
            )
            if silence_before and silence_after:
                if n_frames / FRAMES_PER_SECOND - segment.end < threshold:
                    return n_frames, i
                return round(max(offset_s + 1, segment.start) * FRAMES_PER_SECOND), i
        previous_end_s = segment.end
    return seek, len(segments)
