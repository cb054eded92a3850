"""Text that was probably never said: words that are too short, too long or too unlikely.

Used with word times only: a suspicious stretch between silences is dropped, and the silence is
skipped.
"""

from asrmask.audio import FRAMES_PER_SECOND, N_FRAMES
from asrmask.transcription import Segment, Word
from asrmask.words import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS, end_of

PUNCTUATION = PREPEND_PUNCTUATIONS + APPEND_PUNCTUATIONS
N_JUDGED = 8  # words at the beginning of a segment
EDGE_S = 2.0  # that close to a window's edge counts as beside silence


def anomaly(word: Word) -> float:
    """How odd a word is: 0 for an ordinary one."""
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
    """Whether nearly every word of a segment's beginning is odd, or a few are very odd."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.word not in PUNCTUATION][:N_JUDGED]
    score = sum(map(anomaly, words))
    return score >= 3 or score + 0.01 >= len(words)


def with_words(segments: list[Segment]) -> Segment | None:
    return next((segment for segment in segments if segment.words), None)


def judge(
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
    """Where the next window begins, and how many of this one's segments stay.

    None of them stays, and nothing else is made of this window, if it opens with silence.
    start, size: of this window, in frames; n_frames: of the recording
    longest:     frames that a window may have
    seek:        where the next window would begin, and `settled`: whether that is certain
    """
    offset_s = start / FRAMES_PER_SECOND
    window_end_s = (start + longest) / FRAMES_PER_SECOND
    last_word_s = end_of(segments)
    if not settled and last_word_s is not None and last_word_s > offset_s:
        rest_s = window_end_s - last_word_s
        seek = round(last_word_s * FRAMES_PER_SECOND) if rest_s > threshold else start + size

    first = with_words(segments)
    if first is not None and is_anomaly(first) and first.start - offset_s > threshold:
        # silence comes first: look again behind it
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
