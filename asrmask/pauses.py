"""Where to cut a long recording: at its quietest moments, into parts that fit a window."""

from asrmask.audio import N_FRAMES, Spectrogram

HUSH = 30  # frames that are quiet together: 0.3 s


def cut(
    spectrogram: Spectrogram, start: int, end: int, longest: int = N_FRAMES
) -> list[tuple[int, int]]:
    """Parts of start..end, of `longest` frames at the most; the whole if it is no longer."""
    end = min(end, spectrogram.n_frames)
    if end - start <= longest:
        return [(start, end)] if start < end else []
    part = longest // 2  # frames that a part has, about
    reach = longest // 6  # frames around an even cut in which the quietest moment is sought
    n_parts = -(-(end - start) // part)
    loudness = spectrogram.loudness
    cuts = [start]
    for i in range(1, n_parts):
        even = start + (end - start) * i // n_parts
        first = even - reach - HUSH // 2
        around = loudness[first : even + reach + HUSH // 2]
        hush = around.unfold(0, HUSH, 1).mean(dim=-1)
        cuts.append(first + int(hush.argmin()) + HUSH // 2)
    return list(zip(cuts, [*cuts[1:], end], strict=True))
