"""Read data sets of speech: clips with their transcripts and speakers."""

import csv
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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


def from_manifest(folder: Path) -> list[Clip]:
    """Return the clips in a folder's manifest.tsv."""
    return list(_manifest(folder / "manifest.tsv"))


def _manifest(path: Path) -> Iterator[Clip]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows: Iterable[Mapping[str, Any]]
            if path.suffix == ".jsonl":
                rows = (json.loads(line) for line in file if line.strip())
            elif path.suffix == ".tsv":
                rows = _tsv(file)
            elif path.suffix == ".csv":
                rows = csv.DictReader(file)
            else:
                raise OptionError(f"{path}: expected a manifest .tsv, .csv or .jsonl")
            for number, row in enumerate(rows, start=1):
                yield _clip(row, path.parent, f"{path}: row {number}")
    except OSError as error:
        raise AudioError(f"{path}: {error.strerror}, expected a manifest") from None
    except RecursionError:
        raise AudioError(f"{path}: expected a manifest, got JSON nested too deeply") from None
    except (ValueError, csv.Error) as error:
        raise AudioError(f"{path}: expected a manifest, got {error}") from None


def _tsv(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a TSV file as dicts, keyed by the header line.

    Quotation marks are plain characters, because texts may begin with them. Python's csv module is
    not used because it limits the length of fields.
    """
    rows = (line.rstrip("\r\n").split("\t") for line in lines if line.strip("\r\n"))
    names = next(rows, [])
    for row in rows:
        yield dict(zip(names, row, strict=False))


def _clip(row: Mapping[str, Any], folder: Path, place: str) -> Clip:
    if not isinstance(row, Mapping):
        raise AudioError(f"{place}: expected an object, got {type(row).__name__}")
    found = {
        name: next((str(row[key]) for key in keys if row.get(key) not in (None, "")), None)
        for name, keys in COLUMNS.items()
    }
    if found["path"] is None:
        raise AudioError(f"{place}: expected a column path, got {', '.join(map(str, row))}")
    path = Path(found["path"])
    return Clip(
        folder / os.fsdecode(found["path"].encode()),  # names are UTF-8 in any locale
        found["text"],
        found["language"] or "en",
        found["speaker"] or speaker_of(path.name),
        found["id"] or path.stem,
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
        names = [
            part["filename"]
            for part in json.loads((folder / "state.json").read_bytes())["_data_files"]
        ]
        for name in names:
            with pyarrow.memory_map(str(folder / name)) as file:
                for batch in pyarrow.ipc.open_stream(file):
                    for row in batch.to_pylist():
                        audio = row.pop("audio", None) or {}
                        path = audio.get("path") or row.get("path") or f"{len(row)}.wav"
                        clip = _clip({**row, "path": path}, folder, str(folder / name))
                        yield Clip(
                            clip.path,
                            clip.text,
                            clip.language,
                            clip.speaker,
                            clip.id,
                            audio.get("bytes"),
                        )
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise AudioError(f"{folder}: expected a data set saved to disk, got {error}") from None


def speaker_of(name: str) -> str | None:
    """Return the speaker id in a LibriSpeech file name; None for other names.

    >>> speaker_of("1688-142285-0000.flac")
    '1688'
    """
    found = re.fullmatch(r"(\d+)-\d+-\d+", Path(name).stem)
    return found[1] if found else None


def check(clips: Sequence[Clip]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the duration in seconds of each valid clip and the problem of each other, by id."""
    counts = Counter(clip.id for clip in clips)
    good: dict[str, float] = {}
    bad: dict[str, str] = {}
    for clip in clips:
        if counts[clip.id] > 1:
            bad[clip.id] = f"{counts[clip.id]} clips have this id"
        elif not (clip.text or "").strip():
            bad[clip.id] = "no transcript"
        elif clip.data is None and not os.path.isfile(clip.path):
            bad[clip.id] = f"no such file: {clip.path}"
        else:
            try:
                seconds = clip.recording().duration_s
                if seconds < 0.1:
                    bad[clip.id] = f"too short, {seconds:.3f} s"
                else:
                    good[clip.id] = seconds
            except AsrmaskError as error:
                bad[clip.id] = str(error)
    return good, bad
