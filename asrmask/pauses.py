"""Where to cut a long recording: at its quietest moments, into parts that fit a window."""

from asrmask.audio import FRAMES_PER_SECOND, N_FRAMES, Spectrogram

PART = 15 * FRAMES_PER_SECOND  # frames that a part has, about
REACH = 5 * FRAMES_PER_SECOND  # frames around an even cut in which the quietest moment is sought
HUSH = 30  # frames that are quiet together: 0.3 s


def cut(spectrogram: Spectrogram, start: int, end: int) -> list[tuple[int, int]]:
    """Parts of start..end, of half a minute at the most; the whole if it is no longer."""
    end = min(end, spectrogram.n_frames)
    if end - start <= N_FRAMES:
        return [(start, end)] if start < end else []
    n_parts = -(-(end - start) // PART)
    loudness = spectrogram.loudness
    cuts = [start]
    for i in range(1, n_parts):
        even = start + (end - start) * i // n_parts
        first = even - REACH - HUSH // 2
        around = loudness[first : even + REACH + HUSH // 2]
        hush = around.unfold(0, HUSH, 1).mean(dim=-1)
        cuts.append(first + int(hush.argmin()) + HUSH // 2)
    return list(zip(cuts, [*cuts[1:], end], strict=True))
