"""What a transcription gives back: plain data that also reads as openai-whisper's dictionaries."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

ATTRIBUTE = {"in_dictionary": False}  # metadata of a field


class Record(Mapping[str, Any]):
    """A dataclass that reads as a dictionary of its fields, without those that are None.

    json.dumps takes dictionaries alone: json.dumps(record.to_dict()). Fields marked ATTRIBUTE are
    not in the dictionary, which is openai-whisper's.
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
        """Plain dictionaries and lists all the way down."""
        return {name: _plain(value) for name, value in self.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, list) else value


@dataclass(eq=False)
class Word(Record):
    """A word, with the space before it and its punctuation, and when it was said."""

    word: str
    start: float  # seconds
    end: float
    probability: float


@dataclass(eq=False)
class Diagnosis(Record):
    """Where the decoder looked while it wrote a segment."""

    padding_s: float  # seconds of padding that it could see
    # share of its attention that was on padding: mean over tokens, heads and layers; None: there
    # was no padding to see
    attention_on_padding: float | None = None
    by_layer: list[float] | None = None  # the same, decoder layer by layer


@dataclass(eq=False)
class Segment(Record):
    """A stretch of speech and its text."""

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
    words: list[Word] | None = None  # None: not asked for
    language: str | None = None  # None: the recording's
    policy: str | None = None  # what the model saw of the padding; None: no policy was asked for
    diagnosis: Diagnosis | None = None  # None: not asked for


@dataclass(eq=False)
class PaddingUse(Record):
    """What became of a recording's padding under a policy."""

    policy: str
    windows: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # reason → windows decoded again
    padding_computed_s: float = 0.0  # by the encoder, when a window is decoded again too
    padding_avoided_s: float = 0.0

    def add(self, computed_s: float, avoided_s: float, reason: str | None = None) -> None:
        """Count a window; reason: why it was decoded again, if it was."""
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
    """The text of a whole recording."""

    text: str
    segments: list[Segment] = field(default_factory=list)
    language: str = "en"
    padding: PaddingUse | None = None  # None: no policy was asked for
    language_probability: float = field(default=1.0, metadata=ATTRIBUTE)  # 1: it was given
    duration: float = field(default=0.0, metadata=ATTRIBUTE)  # of the recording, in seconds
