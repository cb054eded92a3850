"""What live transcription reports: plain data, in the order of the audio."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from asrmask.transcription.result import ATTRIBUTE, Record, Word


@dataclass(eq=False)
class Event(Record):
    """The base of all events.

    time: seconds of audio that had arrived
    """

    kind: ClassVar[str]
    time: float

    def to_dict(self) -> dict[str, Any]:
        return {"event": self.kind, **super().to_dict()}


@dataclass(eq=False)
class Partial(Event):
    """Words after the committed ones, which may still change.

    They hold until the next event: another partial text, or none.
    """

    kind = "partial"
    text: str


@dataclass(eq=False)
class Committed(Event):
    """Words that never change. Texts of all these events, joined, are the transcript."""

    kind = "committed"
    text: str
    words: list[Word]
    language: str
    tokens: list[int] = field(default_factory=list, metadata=ATTRIBUTE)


@dataclass(eq=False)
class Endpoint(Event):
    """The speaker paused: the utterance is final."""

    kind = "endpoint"
    start: float  # seconds, of the utterance
    end: float
