"""Word timestamps by dynamic time warping over cross-attention.

Some decoder heads attend to the audio of the token being decoded. Their averaged attention is a
map of tokens against time, and the cheapest path through it gives the times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asrmask.audio.constants import FRAMES_PER_POSITION, FRAMES_PER_SECOND, POSITIONS_PER_SECOND
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer
from asrmask.transcription.result import Segment, Word
from asrmask.transcription.settings import Settings

MEDIAN_WIDTH = 7  # positions
# compare-exchange pairs that move the median of seven values to the middle: 10 × as fast as a sort
MEDIAN_NETWORK = [
    *((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)),
    *((2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)),
]
SENTENCE_ENDS = ".。!！?？"


@dataclass
class WordTiming:
    """A word and its times within its window.

    focus: the latest time that any of its tokens attends to most
    """

    word: str
    tokens: list[int]
    start: float  # seconds
    end: float
    probability: float
    focus: float = 0.0

    @property
    def duration(self) -> float:
        return self.end - self.start


def dtw_path(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cheapest path through a cost matrix, as row and column indices.

    The path leads from the first to the last cell, by steps down, right or diagonal. It is computed
    along anti-diagonals, whose cells do not depend on each other.

    >>> dtw_path(np.array([[0.0, 9.0, 9.0], [9.0, 0.0, 0.0]]))
    (array([0, 1, 1]), array([0, 1, 2]))
    """
    n_rows, n_columns = cost.shape
    n_diagonals = n_rows + n_columns - 1
    # one row per anti-diagonal: skewed[d, i] = cost[i, d − i]
    skewed = np.zeros((n_diagonals + 1, n_rows))
    for i in range(n_rows):
        skewed[i : i + n_columns, i] = cost[i]
    steps = np.empty((n_diagonals, n_rows), dtype=np.int8)
    # total costs on the last two diagonals, at index i + 1; infinite outside the matrix
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
    # NaN costs (from a single position) lead out of the matrix, as upstream
    while i >= 0 or j >= 0:
        path.append((i, j))
        step = 2 if i < 0 else 1 if j < 0 else int(steps[i + j, i])
        i -= step != 2
        j -= step != 1
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def attention_map(weights: Tensor) -> Tensor:
    """Standardise each head over tokens, smooth it over time, and average the heads.

    weights: (heads, tokens, positions)
    returns (tokens, positions)
    """
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = (weights - mean) / std
    half = MEDIAN_WIDTH // 2
    if weights.shape[-1] > half:
        padded = F.pad(weights, (half, half), mode="reflect")
        shifted = [padded[..., i : i - 6 or None] for i in range(MEDIAN_WIDTH)]
        # head by head: one head fits into the CPU cache
        weights = torch.stack([median_of_seven(list(x)) for x in zip(*shifted, strict=True)])
    return weights.mean(dim=0)


def median_of_seven(values: list[Tensor]) -> Tensor:
    """Return the elementwise median of seven tensors."""
    for i, j in MEDIAN_NETWORK:
        a, b = values[i], values[j]
        values[i], values[j] = torch.minimum(a, b), torch.maximum(a, b)
    return values[MEDIAN_WIDTH // 2]


class CrossScores:
    """A recorder of the cross-attention scores of one clip: place → (H, tokens, positions)."""

    quantities = frozenset({"scores"})

    def __init__(self) -> None:
        self.scores: dict[str, Tensor] = {}

    def __call__(self, place: str, quantity: str, tensor: Tensor) -> None:
        if quantity == "scores" and place.endswith(".cross"):
            self.scores[place] = tensor[0]


@torch.inference_mode()
def align(
    model: Whisper,
    tokenizer: Tokenizer,
    text_tokens: list[int],
    encoded: CrossAttentionCache,
    n_frames: int,
    n_known: int = 0,
) -> list[WordTiming]:
    """Return the words of a window's text, with times and probabilities.

    encoded:  the encoded window, a batch of one
    n_frames: number of its frames that are not padding; word times are within them
    n_known:  number of tokens at the start of the text whose probabilities are not needed
    """
    words, word_tokens = tokenizer.split_to_word_tokens([*text_tokens, tokenizer.eot])
    if len(word_tokens) <= 1:
        return []
    prompt_tokens = [*tokenizer.sot_sequence, tokenizer.no_timestamps]
    tokens = torch.tensor([[*prompt_tokens, *text_tokens, tokenizer.eot]], device=model.device)
    record = CrossScores()
    x, _ = model.decoder(tokens, encoded, model.decoder.cache(1, tokens.shape[1]), record)
    first = len(tokenizer.sot_sequence)
    # the output at each position predicts the next token
    last = first + len(text_tokens)
    logits = model.decoder.logits(x[0, first + n_known : last])[:, : tokenizer.eot]
    rows = torch.arange(len(logits), device=model.device)
    token_logits = logits[rows, tokens[0, len(prompt_tokens) + n_known : -1]]
    logprobs = token_logits - logits.logsumexp(dim=-1)
    probabilities = [1.0] * n_known + logprobs.exp().tolist()

    heads = [record.scores[f"decoder.{layer}.cross"][head] for layer, head in model.alignment_heads]
    # equivalent to a padding mask: the softmax covers only positions of real audio
    start = encoded.first_of(0) - encoded.origin
    audio = slice(start, start + n_frames // FRAMES_PER_POSITION)
    weights = torch.stack(heads)[:, :, audio].softmax(dim=-1)
    attention = attention_map(weights)[first:-1]
    token_index, position = dtw_path(-attention.double().cpu().numpy())
    focus = attention.argmax(dim=-1).tolist()

    # where the path reaches a new token
    is_start = np.pad(np.diff(token_index), (1, 0), constant_values=1).astype(bool)
    times = (position[is_start] / POSITIONS_PER_SECOND).tolist()
    bounds = np.cumsum([0, *map(len, word_tokens[:-1])])
    return [
        WordTiming(
            word,
            group,
            times[a],
            times[b],
            float(np.mean(probabilities[a:b])),
            max(focus[a:b]) / POSITIONS_PER_SECOND,
        )
        for word, group, (a, b) in zip(words, word_tokens, pairwise(bounds), strict=False)
    ]


def merge_punctuations(timings: list[WordTiming], prepended: str, appended: str) -> None:
    """Merge punctuation into adjacent words, in place. Merged entries stay as empty words."""
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
    encoded: CrossAttentionCache,
    n_frames: int,
    settings: Settings,
    last_speech_s: float,
) -> None:
    """Add words to the segments of a window, and adjust the segments' times to them."""
    texts = [[token for token in s.tokens if token < tokenizer.eot] for s in segments]
    timings = align(model, tokenizer, list(chain(*texts)), encoded, n_frames)
    durations = [t.duration for t in timings if t.duration != 0]
    median = min(0.7, float(np.median(durations))) if durations else 0.0
    if durations:
        _shorten_at_sentence_ends(timings, 2 * median)
    merge_punctuations(timings, settings.prepend_punctuations, settings.append_punctuations)

    remaining = iter(timings)
    for segment, text in zip(segments, texts, strict=True):
        offset_s = segment.seek / FRAMES_PER_SECOND
        segment.words = []
        n_tokens = 0
        while n_tokens < len(text) and (timing := next(remaining, None)) is not None:
            n_tokens += len(timing.tokens)
            if timing.word:
                start = max(0.0, round(offset_s + timing.start, 2))
                end = max(0.0, round(offset_s + timing.end, 2))
                segment.words.append(Word(timing.word, start, end, timing.probability))
        if segment.words:
            _fit_times(segment, segment.words, median, last_speech_s)
            last_speech_s = segment.end


def last_word_end(segments: Sequence[Segment]) -> float | None:
    """Return the end of the last word, or of the last segment if there are no words."""
    for segment in reversed(segments):
        if segment.words:
            return segment.words[-1].end
    return segments[-1].end if segments else None


def _shorten_at_sentence_ends(timings: list[WordTiming], longest: float) -> None:
    """Shorten long durations of sentence-ending marks and of the words after them."""
    for previous, timing in pairwise(timings):
        if timing.duration > longest:
            if timing.word in SENTENCE_ENDS:
                timing.end = timing.start + longest
            elif previous.word in SENTENCE_ENDS:
                timing.start = timing.end - longest


def _fit_times(segment: Segment, words: list[Word], median: float, last_speech_s: float) -> None:
    """Cut pauses out of the first and last words, and make word and segment times agree."""
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
