"""When each word was said: dynamic time warping over cross-attention.

Some heads of the decoder look at the audio that they are spelling out. Their attention, put
together, is a map of tokens against time, and the cheapest way through it gives the times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asrmask.audio import FRAMES_PER_POSITION, FRAMES_PER_SECOND
from asrmask.model import Memory, Whisper
from asrmask.policy import POSITIONS_PER_SECOND
from asrmask.tokenizer import Tokenizer
from asrmask.transcription import Segment, Word

MEDIAN_WIDTH = 7  # positions
# exchanges that bring the median of seven values to the middle: a sort would take ten times as long
MEDIAN_NETWORK = [
    *((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)),
    *((2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)),
]
SENTENCE_ENDS = ".。!！?？"
PREPEND_PUNCTUATIONS = "\"'“¿([{-"
APPEND_PUNCTUATIONS = "\"'.。,，!！?？:：”)]}、"


@dataclass
class Timing:
    """A word's place within its window."""

    word: str
    tokens: list[int]
    start: float  # seconds
    end: float
    probability: float

    @property
    def duration(self) -> float:
        return self.end - self.start


def warp(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest path through a cost matrix, as row and column indices.

    From (0, 0) to the last corner, by steps down, right or diagonal. Computed along
    anti-diagonals, whose cells do not depend on each other.

    >>> warp(np.array([[0.0, 9.0, 9.0], [9.0, 0.0, 0.0]]))
    (array([0, 1, 1]), array([0, 1, 2]))
    """
    n_rows, n_columns = cost.shape
    n_diagonals = n_rows + n_columns - 1
    # a row for each anti-diagonal: skewed[d, i] = cost[i, d − i]
    skewed = np.zeros((n_diagonals + 1, n_rows))
    for i in range(n_rows):
        skewed[i : i + n_columns, i] = cost[i]
    steps = np.empty((n_diagonals, n_rows), dtype=np.int8)
    # totals of the last two diagonals, at i + 1; what lies outside the matrix is infinite
    older = np.full(n_rows + 1, np.inf)
    newer = older.copy()
    older[0] = 0
    for d in range(n_diagonals):
        low, high = max(0, d - n_columns + 1), min(n_rows, d + 1)
        both, down, right = older[low:high], newer[low:high], newer[low + 1 : high + 1]
        diagonal = both < np.minimum(down, right)
        downward = down < np.minimum(both, right)
        chosen = np.where(diagonal, both, np.where(downward, down, right))
        steps[d, low:high] = 2 - 2 * diagonal - downward
        older.fill(np.inf)
        older[low + 1 : high + 1] = skewed[d, low:high] + chosen
        older, newer = newer, older
    i, j = n_rows - 1, n_columns - 1
    path = []
    # costs that are no numbers (a single position) lead out of the matrix, as they do upstream
    while i >= 0 or j >= 0:
        path.append((i, j))
        step = 2 if i < 0 else 1 if j < 0 else int(steps[i + j, i])
        i -= step != 2
        j -= step != 1
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def attention_map(weights: Tensor) -> Tensor:
    """Tokens against time: each head standardised over the tokens, smoothed, and averaged.

    weights: (heads, tokens, positions)
    returns (tokens, positions)
    """
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = (weights - mean) / std
    half = MEDIAN_WIDTH // 2
    if weights.shape[-1] > half:
        padded = F.pad(weights, (half, half), mode="reflect")
        shifted = [padded[..., i : i - 6 or None] for i in range(MEDIAN_WIDTH)]
        # head by head: one fits into the processor's cache
        weights = torch.stack([median_of_seven(list(x)) for x in zip(*shifted, strict=True)])
    return weights.mean(dim=0)


def median_of_seven(values: list[Tensor]) -> Tensor:
    """The median of seven tensors, element by element."""
    for a, b in MEDIAN_NETWORK:
        values[a], values[b] = (
            torch.minimum(values[a], values[b]),
            torch.maximum(values[a], values[b]),
        )
    return values[MEDIAN_WIDTH // 2]


@torch.inference_mode()
def align(
    model: Whisper, tokenizer: Tokenizer, text_tokens: list[int], memory: Memory, n_frames: int
) -> list[Timing]:
    """The words of a window's text, with their times and probabilities.

    memory: of that one window, encoded already
    n_frames: how many of its frames are real: words are sought there alone
    """
    if not text_tokens:
        return []
    words, word_tokens = tokenizer.split_to_word_tokens([*text_tokens, tokenizer.eot])
    if len(word_tokens) <= 1:
        return []
    opening = [*tokenizer.sot_sequence, tokenizer.no_timestamps]
    tokens = torch.tensor([[*opening, *text_tokens, tokenizer.eot]], device=model.device)
    scores: dict[str, Tensor] = {}

    def keep(place: str, quantity: str, tensor: Tensor) -> None:
        if quantity == "scores" and place.endswith(".cross"):
            scores[place] = tensor[0]  # (H, tokens, positions)

    x, _ = model.decoder(tokens, memory, model.decoder.cache(1, tokens.shape[1]), keep)
    first = len(tokenizer.sot_sequence)
    # the position before each token predicts it
    logits = model.decoder.logits(x[0, first : first + len(text_tokens)])[:, : tokenizer.eot]
    index = torch.tensor(text_tokens, device=model.device)[:, None]
    picked = logits.gather(1, index)[:, 0]
    probabilities = (picked - logits.logsumexp(dim=-1)).exp().tolist()

    heads = [scores[f"decoder.{layer}.cross"][head] for layer, head in model.alignment_heads]
    # a padding mask in all but name: only positions of real audio enter the softmax
    start = memory.first_of(0) - memory.origin
    own = slice(start, start + n_frames // FRAMES_PER_POSITION)
    weights = torch.stack(heads)[:, :, own].softmax(dim=-1)
    rows, columns = warp(-attention_map(weights)[first:-1].double().cpu().numpy())

    starts = np.array([True, *(np.diff(rows) != 0)])  # where the path comes to a new token
    times = columns[starts] / POSITIONS_PER_SECOND
    bounds = np.cumsum([0, *(len(group) for group in word_tokens[:-1])])
    return [
        Timing(
            words[i],
            word_tokens[i],
            float(times[a]),
            float(times[b]),
            float(np.mean(probabilities[a:b])),
        )
        for i, (a, b) in enumerate(pairwise(bounds))
    ]


def merge_punctuations(timings: list[Timing], prepended: str, appended: str) -> None:
    """Give punctuation to the word it belongs to; what was merged away stays as an empty word."""
    following = len(timings) - 1
    for i in range(len(timings) - 2, -1, -1):
        mark, word = timings[i], timings[following]
        if mark.word.startswith(" ") and mark.word.strip() in prepended:
            word.word = mark.word + word.word
            word.tokens = mark.tokens + word.tokens
            mark.word, mark.tokens = "", []
        else:
            following = i
    previous = 0
    for i in range(1, len(timings)):
        word, mark = timings[previous], timings[i]
        if not word.word.endswith(" ") and mark.word in appended:
            word.word += mark.word
            word.tokens = word.tokens + mark.tokens
            mark.word, mark.tokens = "", []
        else:
            previous = i


def add_words(
    segments: Sequence[Segment],
    model: Whisper,
    tokenizer: Tokenizer,
    memory: Memory,
    n_frames: int,
    *,
    prepended: str = PREPEND_PUNCTUATIONS,
    appended: str = APPEND_PUNCTUATIONS,
    last_speech_s: float = 0.0,
) -> None:
    """Set the words of a window's segments, and the segments' times by their words."""
    if not segments:
        return
    texts = [[token for token in s.tokens if token < tokenizer.eot] for s in segments]
    timings = align(model, tokenizer, [t for text in texts for t in text], memory, n_frames)
    durations = [t.duration for t in timings if t.duration != 0]
    median = min(0.7, float(np.median(durations))) if durations else 0.0
    if durations:
        _shorten_at_sentence_ends(timings, 2 * median)
    merge_punctuations(timings, prepended, appended)

    offset_s = segments[0].seek / FRAMES_PER_SECOND
    waiting = iter(timings)
    for segment, text in zip(segments, texts, strict=True):
        words: list[Word] = []
        n_taken = 0
        while n_taken < len(text) and (timing := next(waiting, None)) is not None:
            n_taken += len(timing.tokens)
            if timing.word:
                start = max(0.0, round(offset_s + timing.start, 2))
                end = max(0.0, round(offset_s + timing.end, 2))
                words.append(Word(timing.word, start, end, timing.probability))
        if words:
            _fit(segment, words, median, last_speech_s)
            last_speech_s = segment.end
        segment.words = words


def end_of(segments: Sequence[Segment]) -> float | None:
    """When the last word ends, or the last segment if there are no words."""
    for segment in reversed(segments):
        if segment.words:
            return segment.words[-1].end
    return segments[-1].end if segments else None


def _shorten_at_sentence_ends(timings: list[Timing], longest: float) -> None:
    """A pause after a sentence belongs to neither the mark before it nor the word after it."""
    for previous, timing in pairwise(timings):
        if timing.duration > longest:
            if timing.word in SENTENCE_ENDS:
                timing.end = timing.start + longest
            elif previous.word in SENTENCE_ENDS:
                timing.start = timing.end - longest


def _fit(segment: Segment, words: list[Word], median: float, last_speech_s: float) -> None:
    """Take pauses out of the first and last words, and let words and segment agree on the rest."""
    longest = 2 * median
    first, last = words[0], words[-1]
    second = words[1] if len(words) > 1 else None
    after_pause = first.end - last_speech_s > 4 * median
    first_long = first.end - first.start > longest
    pair_long = second is not None and second.end - first.start > 2 * longest
    if after_pause and (first_long or pair_long):
        if second is not None and second.end - second.start > longest:
            first.end = second.start = max(second.end / 2, second.end - longest)
        first.start = max(0, first.end - longest)
    if segment.start < first.end and segment.start - 0.5 > first.start:
        first.start = max(0, min(first.end - median, segment.start))
    else:
        segment.start = first.start
    if segment.end > last.start and segment.end + 0.5 < last.end:
        last.end = max(last.start + median, segment.end)
    else:
        segment.end = last.end
