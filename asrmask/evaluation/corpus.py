"""Read data sets of speech: clips with their transcripts and speakers."""

import csv
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrmask.errors import AsrmaskError, AudioError, OptionError
from asrmask.extras import require

if TYPE_CHECKING:
    from asrmask.audio.recording import Recording

# manifest columns → the names that data sets use for them
COLUMNS = {
    "path": ("path", "audio", "audio_filepath", "file", "file_name"),
    "text": ("text", "sentence", "transcript", "transcription", "normalized_text"),
    "language": ("language", "lang", "locale"),
    "speaker": ("speaker", "speaker_id", "client_id"),
    "id": ("id", "utt_id"),
}
MANIFESTS = ("manifest.tsv", "manifest.jsonl", "metadata.jsonl")


@dataclass(frozen=True)
class Clip:
    """A recording and its transcript."""

    path: Path
    text: str | None = None  # the transcript, if known
    language: str = "en"
    speaker: str | None = None  # if known
    id: str = ""  # default: the file's name without suffix
    data: bytes | None = field(default=None, repr=False)  # the audio, if it is not in a file

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", self.path.stem)

    @contextmanager
    def file(self) -> Iterator[Path]:
        """The path of the clip's file. Clips in memory are written to a temporary file."""
        if self.data is None:
            yield self.path
            return
        with tempfile.NamedTemporaryFile(suffix=self.path.suffix) as file:
            file.write(self.data)
            file.flush()
            yield Path(file.name)

    def recording(self) -> "Recording":
        from asrmask.audio.recording import Recording

        with self.file() as path:
            return Recording.open(path)


def read(source: Path) -> list[Clip]:
    """Return the clips of a data set. The list is empty only if the data set is.

    source: a manifest (.tsv, .csv or .jsonl), a folder with a manifest, a LibriSpeech folder as
            published, or a Hugging Face data set saved to disk
    """
    if not source.exists():
        raise AudioError(f"{source}: no such file or folder, expected a data set")
    if source.is_file():
        return list(_manifest(source))
    for name in MANIFESTS:
        if (source / name).is_file():
            return list(_manifest(source / name))
    if transcripts := sorted(source.rglob("*.trans.txt")):
        return [clip for path in transcripts for clip in _librispeech(path)]
    if (source / "state.json").is_file():
        return list(_arrow(source))
    if (source / "dataset_dict.json").is_file():
        parts = ", ".join(sorted(p.parent.name for p in source.glob("*/state.json")))
        raise OptionError(f"{source}: a data set in parts, expected one of them: {parts}")
    raise AudioError(
        f"{source}: expected manifest.tsv or manifest.jsonl, LibriSpeech's *.trans.txt, or a data "
        f"set saved by Hugging Face's datasets, got none"
    )


def is_data_set(folder: Path) -> bool:
    """Whether a folder is a data set that `read` accepts, rather than a folder of files."""
    known = (*MANIFESTS, "state.json", "dataset_dict.json")
    return any((folder / name).is_file() for name in known) or any(folder.rglob("*.trans.txt"))


def _manifest(path: Path) -> Iterator[Clip]:
    """Yield the clips of a manifest file."""
    readers: dict[str, Callable[[Iterable[str]], Iterable[Any]]] = {
        ".jsonl": lambda lines: (json.loads(line) for line in lines if line.strip()),
        ".tsv": _tsv,
        ".csv": csv.DictReader,
    }
    if path.suffix not in readers:
        raise OptionError(f"{path}: expected a manifest .tsv, .csv or .jsonl")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(readers[path.suffix](file), start=1):
                yield _clip(row, path.parent, f"{path}: row {number}")
    except OSError as error:
        raise AudioError(f"{path}: {error.strerror}, expected a manifest") from None
    except RecursionError:
        raise AudioError(f"{path}: expected a manifest, got JSON nested too deeply") from None
    except (ValueError, csv.Error) as error:
        raise AudioError(f"{path}: expected a manifest, got {error}") from None


def _tsv(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a TSV file as dicts, keyed by the header line.

    The csv module is not used: texts may begin with quotation marks, and it limits field lengths.
    """
    rows = (line.rstrip("\r\n").split("\t") for line in lines if line.strip("\r\n"))
    names = next(rows, [])
    for row in rows:
        yield dict(zip(names, row, strict=False))


def _clip(row: Any, folder: Path, source: str) -> Clip:
    """Convert a manifest row. source: file and row, for error messages."""
    if not isinstance(row, Mapping):
        raise AudioError(f"{source}: expected an object, got {type(row).__name__}")
    values = {
        name: next((str(row[key]) for key in keys if row.get(key) not in (None, "")), None)
        for name, keys in COLUMNS.items()
    }
    if values["path"] is None:
        raise AudioError(f"{source}: expected a column path, got {', '.join(map(str, row))}")
    path = Path(values["path"])
    return Clip(
        folder / os.fsdecode(values["path"].encode()),  # names are UTF-8 in any locale
        values["text"],
        values["language"] or "en",
        values["speaker"] or speaker_of(path.name),
        values["id"] or path.stem,
    )


def _librispeech(transcripts: Path) -> Iterator[Clip]:
    """Yield the clips of a LibriSpeech transcript file: lines "ID TEXT", audio in ID.flac."""
    for line in transcripts.read_text(encoding="utf-8").splitlines():
        name, _, text = line.strip().partition(" ")
        if name:
            yield Clip(transcripts.parent / f"{name}.flac", text, "en", speaker_of(name))


def _arrow(folder: Path) -> Iterator[Clip]:
    """Yield the clips that datasets.save_to_disk wrote. The audio column holds {bytes, path}."""
    require(f"the data set {folder}", "pyarrow")
    import pyarrow.ipc

    try:
        for part in json.loads((folder / "state.json").read_bytes())["_data_files"]:
            source = folder / part["filename"]
            with pyarrow.memory_map(str(source)) as file:
                for row in pyarrow.ipc.open_stream(file).read_all().to_pylist():
                    audio = row.pop("audio", None) or {}
                    path = audio.get("path") or row.get("path") or f"{len(row)}.wav"
                    clip = _clip({**row, "path": path}, folder, str(source))
                    yield replace(clip, data=audio.get("bytes"))
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise AudioError(f"{folder}: expected a data set saved to disk, got {error}") from None


def speaker_of(name: str) -> str | None:
    """Return the speaker id in a LibriSpeech file name; None for other names.

    >>> speaker_of("1688-142285-0000.flac")
    '1688'
    """
    match = re.fullmatch(r"(\d+)-\d+-\d+", Path(name).stem)
    return match[1] if match else None


def as_written(text: str) -> str:
    """A transcript as a model might write it: not in capitals, as LibriSpeech's are.

    >>> as_written("AND MISTER POPE ")
    'And mister pope'
    """
    text = text.strip()
    return text.capitalize() if text.isupper() else text


def check(
    clips: Sequence[Clip], needs_text: bool = True
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the duration in seconds of each usable clip and the problem of each other, by id."""
    counts = Counter(clip.id for clip in clips)
    durations: dict[str, float] = {}
    problems: dict[str, str] = {}
    for clip in clips:
        try:
            if counts[clip.id] > 1:
                problems[clip.id] = f"{counts[clip.id]} clips have this id"
            elif needs_text and not (clip.text or "").strip():
                problems[clip.id] = "no transcript"
            elif clip.data is None and not os.path.isfile(clip.path):
                problems[clip.id] = f"no such file: {clip.path}"
            elif (duration_s := clip.recording().duration_s) < 0.1:
                problems[clip.id] = f"too short, {duration_s:.3f} s"
            else:
                durations[clip.id] = duration_s
        except AsrmaskError as error:
            problems[clip.id] = str(error)
    return durations, problems
