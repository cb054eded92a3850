"""Write txt, vtt, srt, tsv and json files, byte for byte as openai-whisper does."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from asrmask.errors import OptionError
from asrmask.files import atomic_write

PAUSE_S = 3.0  # a longer pause ends a subtitle, if its lines are limited


@dataclass(frozen=True)
class SubtitleLayout:
    """Layout of words in subtitles. Every option needs word timestamps."""

    highlight_words: bool = False  # underline each word while it is spoken
    max_line_width: int | None = None  # characters
    max_line_count: int | None = None  # lines per subtitle
    max_words_per_line: int | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if name.startswith("max_") and limit is not None and limit < 1:
                raise OptionError(f"{name} must be 1 or more, got {limit}")


def timestamp(seconds: float, *, hours: bool = False, mark: str = ".") -> str:
    """Format minutes, seconds and milliseconds, and hours if not zero or requested.

    >>> timestamp(3661.5, mark=",")
    '01:01:01,500'
    """
    h, rest = divmod(round(seconds * 1000), 3_600_000)
    m, rest = divmod(rest, 60_000)
    s, ms = divmod(rest, 1_000)
    return (f"{h:02d}:" if hours or h else "") + f"{m:02d}:{s:02d}{mark}{ms:03d}"


def format_segment(segment: Any) -> str:
    """Format a segment as one line of text with its times."""
    return f"[{timestamp(segment.start)} --> {timestamp(segment.end)}] {segment.text}"


def write_txt(result: Any, file: TextIO, layout: SubtitleLayout) -> None:
    for segment in result.segments:
        print(segment.text.strip(), file=file)


def write_tsv(result: Any, file: TextIO, layout: SubtitleLayout) -> None:
    print("start", "end", "text", sep="\t", file=file)
    for segment in result.segments:
        text = segment.text.strip().replace("\t", " ")
        print(round(1000 * segment.start), round(1000 * segment.end), text, sep="\t", file=file)


def write_json(result: Any, file: TextIO, layout: SubtitleLayout) -> None:
    json.dump(result.to_dict(), file)


def write_vtt(result: Any, file: TextIO, layout: SubtitleLayout) -> None:
    print("WEBVTT\n", file=file)
    for start, end, text in cues(result.segments, layout):
        print(f"{timestamp(start)} --> {timestamp(end)}\n{text}\n", file=file)


def write_srt(result: Any, file: TextIO, layout: SubtitleLayout) -> None:
    for number, (start, end, text) in enumerate(cues(result.segments, layout), start=1):
        times = [timestamp(s, hours=True, mark=",") for s in (start, end)]
        print(f"{number}\n{times[0]} --> {times[1]}\n{text}\n", file=file)


WRITERS: dict[str, Callable[[Any, TextIO, SubtitleLayout], None]] = {
    "txt": write_txt,
    "vtt": write_vtt,
    "srt": write_srt,
    "tsv": write_tsv,
    "json": write_json,
}


def save(result: Any, path: Path, form: str, layout: SubtitleLayout | None = None) -> None:
    """Write a transcription to a file atomically."""
    with atomic_write(path) as file:
        WRITERS[form](result, file, layout or SubtitleLayout())


def cues(segments: list[Any], layout: SubtitleLayout) -> Iterator[tuple[float, float, str]]:
    """Yield subtitles as (start, end, text). Without word times, each segment is one subtitle."""
    if not segments or any(segment.words is None for segment in segments):
        for segment in segments:
            # an arrow in the text would be parsed as a cue's time line
            yield segment.start, segment.end, segment.text.strip().replace("-->", "->")
        return
    for subtitle in _subtitles(segments, layout):
        texts = [text for text, _ in subtitle]
        whole = "".join(texts)
        start, end = subtitle[0][1].start, subtitle[-1][1].end
        if not layout.highlight_words:
            yield start, end, whole
            continue
        last = start
        for i, (text, word) in enumerate(subtitle):
            if timestamp(last) != timestamp(word.start):
                yield last, word.start, whole
            marked = re.sub(r"^(\s*)(.*)$", r"\1<u>\2</u>", text)
            yield word.start, word.end, "".join([*texts[:i], marked, *texts[i + 1 :]])
            last = word.end


def _subtitles(segments: list[Any], layout: SubtitleLayout) -> Iterator[list[tuple[str, Any]]]:
    """Yield subtitles as lists of (text, word); text may start with a line break."""
    by_segment = layout.max_line_count is None or layout.max_line_width is None
    width = layout.max_line_width or 1000
    per_line = layout.max_words_per_line or 1000
    subtitle: list[tuple[str, Any]] = []
    line_length, n_lines = 0, 1
    last_s = next((w.start for s in segments for w in s.words), segments[0].start)
    for segment in segments:
        for i, word in enumerate(segment.words):
            text = word.word
            pause = not by_segment and word.start - last_s > PAUSE_S
            fits = line_length + len(text) <= width
            breaks = i % per_line == 0 and bool(subtitle) and by_segment
            if line_length > 0 and fits and not pause and not breaks:
                line_length += len(text)
            else:
                text = text.strip()
                full = layout.max_line_count is not None and (
                    pause or n_lines >= layout.max_line_count
                )
                if (subtitle and full) or breaks:
                    yield subtitle
                    subtitle, n_lines = [], 1
                elif line_length > 0:
                    n_lines += 1
                    text = "\n" + text
                line_length = len(text.strip())
            subtitle.append((text, word))
            last_s = word.start
    if subtitle:
        yield subtitle
