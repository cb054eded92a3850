"""Split a long recording at its quietest moments into parts that fit a window."""

from asrmask.audio.constants import N_FRAMES
from asrmask.audio.spectrogram import Spectrogram

HUSH = 30  # frames over which loudness is averaged: 0.3 s


def cut(
    spectrogram: Spectrogram, start: int, end: int, longest: int = N_FRAMES
) -> list[tuple[int, int]]:
    """Split frames start..end into (start, end) parts of at most `longest` frames."""
    end = min(end, spectrogram.n_frames)
    if end - start <= longest:
        return [(start, end)] if start < end else []
    part = longest // 2  # approximate frames per part
    reach = longest // 6  # frames to search on each side of an even cut
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
