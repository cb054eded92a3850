"""Policies of commitment: which words of an update are final.

A policy sees the words after the committed ones, as candidates, and says how many are ready.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from asrmask.errors import OptionError, brief
from asrmask.transcription.word_timing import WordTiming

PUNCTUATION = " .,;:!?-…\"'“”‘’()[]。，、！？"


@dataclass
class LiveWord:
    """A word that is not committed yet.

    age: number of updates in a row that had it and all words before it
    """

    timing: WordTiming
    age: int = 1

    @property
    def key(self) -> str:
        """What must stay the same: the word without case and punctuation."""
        word = self.timing.word.strip(PUNCTUATION).casefold()
        return word or self.timing.word


def candidates(timings: Sequence[WordTiming], previous: Sequence[LiveWord]) -> list[LiveWord]:
    """Return the words of an update with their ages, from those of the previous update."""
    found = [LiveWord(timing) for timing in timings]
    for new, old in zip(found, previous, strict=False):
        if new.key != old.key:
            break
        new.age = old.age + 1
    return found


@dataclass(frozen=True)
class LocalAgreement:
    """LocalAgreement-n: words that n updates in a row agree on.

    n:        updates that must agree
    margin:   seconds; a word that ends closer to the end of the audio is not ready
    last:     the same for the last word: it may be the beginning of a longer one
    doubt:    a word below this probability is in doubt
    patience: how many updates more must agree on such a word
    limit:    seconds; a word that ended longer ago is not in doubt
    """

    n: int = 2
    margin: float = 0.4
    last: float = 0.7
    doubt: float = 0.5
    patience: int = 3
    limit: float = 1.0

    def n_ready(self, words: Sequence[LiveWord], audio_end_s: float) -> int:
        """Return how many words are final; audio_end_s: end of the audio, on their clock."""
        for i, word in enumerate(words):
            since_s = audio_end_s - word.timing.end
            in_doubt = word.timing.probability < self.doubt and since_s < self.limit
            margin = self.last if word is words[-1] else self.margin
            if word.age < self.n + self.patience * in_doubt or since_s < margin:
                return i
        return len(words)


@dataclass(frozen=True)
class AttentionGuided:
    """Attention-guided (AlignAtt): words that attend to audio before the newest.

    margin: seconds; a word that attends most to audio closer to its end is not ready
    """

    margin: float = 0.8

    def n_ready(self, words: Sequence[LiveWord], audio_end_s: float) -> int:
        """See LocalAgreement.n_ready."""
        for i, word in enumerate(words):
            if word.timing.focus > audio_end_s - self.margin:
                return i
        return len(words)


Commitment = LocalAgreement | AttentionGuided
POLICIES: Mapping[str, type[Commitment]] = {
    "agreement": LocalAgreement,
    "attention": AttentionGuided,
}


def parse(text: str) -> Commitment:
    """Parse a policy: its name, then settings.

    >>> parse("agreement,n=3")
    LocalAgreement(n=3, margin=0.4, last=0.7, doubt=0.5, patience=3, limit=1.0)
    """
    name, *settings = text.split(",")
    if name not in POLICIES:
        raise OptionError(f"commit must be one of {', '.join(POLICIES)}, got {brief(name)}")
    known = [field.name for field in fields(POLICIES[name])]
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            values[key] = int(value) if key in {"n", "patience"} else float(value)
        except ValueError:
            key = ""
        if key not in known:
            expected = ", ".join(f"{key}=X" for key in known)
            raise OptionError(f"{name} takes {expected}, got {brief(setting)}")
    return POLICIES[name](**values)
