"""Transcription results: dataclasses that can be read like openai-whisper's dictionaries."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

ATTRIBUTE = {"in_dictionary": False}  # metadata of fields left out of the dictionary


class Record(Mapping[str, Any]):
    """Base of dataclasses that can be read as a dictionary of their fields that are not None.

    Fields marked ATTRIBUTE are left out, to match openai-whisper's dictionary. For JSON, use
    json.dumps(record.to_dict()).
    """

    def __getitem__(self, name: str) -> Any:
        if name not in iter(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (
            f.name
            for f in fields(self)  # type: ignore[arg-type]
            if f.metadata.get("in_dictionary", True) and getattr(self, f.name) is not None
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def to_dict(self) -> dict[str, Any]:
        """Convert to nested plain dictionaries and lists."""
        return {name: _plain(value) for name, value in self.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, list) else value


@dataclass(eq=False)
class Word(Record):
    """A word with its leading space and punctuation, and its times."""

    word: str
    start: float  # seconds
    end: float
    probability: float


@dataclass(eq=False)
class Diagnosis(Record):
    """The decoder's attention on padding while it wrote a segment."""

    padding_s: float  # visible padding, in seconds
    # share of cross-attention on padding, mean over tokens, heads and layers; None: none visible
    attention_on_padding: float | None = None
    by_layer: list[float] | None = None  # the same for each decoder layer


@dataclass(eq=False)
class Segment(Record):
    """A section of speech and its text."""

    id: int
    seek: int  # frame at which the segment's window starts
    start: float  # seconds
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[Word] | None = None  # None: not requested
    language: str | None = None  # None: that of the recording
    policy: str | None = None  # padding policy it was decoded with; None: no policy was requested
    diagnosis: Diagnosis | None = None  # None: not requested


@dataclass(eq=False)
class PaddingUse(Record):
    """How much padding of a recording was computed under a policy."""

    policy: str
    windows: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # reason → windows decoded again
    padding_computed_s: float = 0.0  # by the encoder, including windows decoded again
    padding_avoided_s: float = 0.0

    def add(self, computed_s: float, avoided_s: float, reason: str | None = None) -> None:
        """Count a window; reason: why it was decoded again, or None."""
        self.windows += 1
        self.padding_computed_s = round(self.padding_computed_s + computed_s, 2)
        self.padding_avoided_s = round(self.padding_avoided_s + avoided_s, 2)
        if reason is not None:
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def __str__(self) -> str:
        again = ", ".join(f"{reason}: {n}" for reason, n in self.fallbacks.items())
        return (
            f"padding {self.policy}: {self.padding_computed_s:.1f} s of padding computed, "
            f"{self.padding_avoided_s:.1f} s avoided; {sum(self.fallbacks.values())} of "
            f"{self.windows} windows decoded again with all of it"
            + (f" ({again})" if again else "")
        )


@dataclass(eq=False)
class Transcription(Record):
    """The result for a recording."""

    text: str
    segments: list[Segment] = field(default_factory=list)
    language: str = "en"
    padding: PaddingUse | None = None  # None: no policy was requested
    language_probability: float = field(default=1.0, metadata=ATTRIBUTE)  # 1: given by the caller
    duration: float = field(default=0.0, metadata=ATTRIBUTE)  # of the recording, in seconds
