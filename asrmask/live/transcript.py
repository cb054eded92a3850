"""Collect the events of live transcription into a transcription that the writers take."""

from math import log

from asrmask.decoding.quality import compression_ratio
from asrmask.live.events import Committed, Endpoint, Event
from asrmask.transcription.result import Segment, Transcription, Word
from asrmask.transcription.word_timing import SENTENCE_ENDS

LONG_S = 8.0  # a segment this long ends with its sentence
LEAST_PROBABILITY = 1e-6


class Transcript:
    """The committed text so far, as segments: utterances, or sentences of long ones."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.language = "en"
        self._words: list[Word] = []
        self._tokens: list[int] = []

    def add(self, event: Event) -> list[Segment]:
        """Add an event and return the segments that it completes."""
        n_before = len(self.segments)
        if isinstance(event, Committed):
            self.language = event.language
            self._words += event.words
            self._tokens += event.tokens
            is_long = self._words[-1].end - self._words[0].start >= LONG_S
            if is_long and self._words[-1].word[-1:] in SENTENCE_ENDS:
                self.close()
        elif isinstance(event, Endpoint):
            self.close()
        return self.segments[n_before:]

    def result(self, duration_s: float) -> Transcription:
        """Return the transcription; words after the last segment become one."""
        self.close()
        text = "".join(segment.text for segment in self.segments)
        return Transcription(text, self.segments, self.language, duration=duration_s)

    def close(self) -> list[Segment]:
        """End the segment of the words so far, and return it."""
        if not self._words:
            return []
        words, self._words = self._words, []
        tokens, self._tokens = self._tokens, []
        text = "".join(word.word for word in words)
        logprobs = [log(max(word.probability, LEAST_PROBABILITY)) for word in words]
        self.segments.append(
            Segment(
                id=len(self.segments),
                seek=round(words[0].start * 100),
                start=words[0].start,
                end=words[-1].end,
                text=text,
                tokens=tokens,
                temperature=0.0,
                avg_logprob=sum(logprobs) / len(logprobs),
                compression_ratio=compression_ratio(text),
                no_speech_prob=0.0,
                words=words,
            )
        )
        return self.segments[-1:]
