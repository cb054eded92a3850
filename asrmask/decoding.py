"""Decoding: a batch of windows in, a result for each out."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from asrmask.audio import CHUNK_LENGTH, FRAMES_PER_SECOND, Features
from asrmask.encoding import FULL, encode
from asrmask.errors import OptionError, check_names
from asrmask.filters import (
    Filter,
    NoRepeatNgram,
    RepetitionPenalty,
    SuppressBlank,
    SuppressTokens,
    TimestampRules,
)
from asrmask.model import Memory, Whisper
from asrmask.policy import POSITIONS_PER_SECOND, Policy
from asrmask.search import Beam, Candidate, Greedy, Strategy, search
from asrmask.tokenizer import Tokenizer, get_tokenizer

# beyond these, a text that was found without all of the padding is decoded again with it
MOST_COMPRESSION = 2.4  # as for the temperatures of the window loop
LEAST_LOGPROB = -0.7  # stricter than theirs (−1): here a better try is at hand
FEW_TOKENS = 5  # fewer are unsure by nature: their average is one rare word's
LONG_REPEAT = 6  # tokens that nobody says twice in a row
TEXT_TOKENS = 50_256  # words and marks come before the special tokens, in every vocabulary
MOST_LATE_S = 1.0  # that words may begin after the end of the audio
LOUD = 0.4  # below the loud frames of a window, on average over Mel bands: 16 dB
LEAST_RATE = 10  # bytes of text for a second of loud frames: speech has 15 and more
LEAST_LOUD_S = 1.0
MOST_TEMPERATURE = 1000.0  # every token is as likely as any other long before


def check_temperature(temperature: float) -> None:
    """Raise OptionError unless texts can be drawn at this temperature."""
    if not 0 <= temperature <= MOST_TEMPERATURE:
        raise OptionError(f"temperature must be in 0..{MOST_TEMPERATURE:g}, got {temperature}")


@dataclass(frozen=True)
class DecodingOptions:
    """How windows become text; names, meanings and defaults are openai-whisper's."""

    task: str = "transcribe"  # or "translate" (to English), or "lang_id"
    language: str | None = None  # None: detected

    temperature: float = 0.0
    sample_len: int | None = None  # most tokens a window may have; default: half the context
    best_of: int | None = None  # texts drawn, if temperature > 0
    beam_size: int | None = None  # beams, if temperature is 0
    patience: float | None = None  # of the beam (arXiv:2204.05424), default 1
    length_penalty: float | None = None  # α of arXiv:1609.08144; None: divide by the length

    prompt: str | list[int] | None = None  # what was said before this window
    prefix: str | list[int] | None = None  # how this window's text begins; part of the text

    suppress_tokens: str | Iterable[int] | None = "-1"  # ids; -1 stands for non-speech symbols
    suppress_blank: bool = True

    # in addition, under faster-whisper's names
    repetition_penalty: float = 1.0  # above 1: what a text has already is less likely in it
    no_repeat_ngram_size: int = 0  # so many tokens in a row never come twice in a text; 0: they may

    without_timestamps: bool = False
    max_initial_timestamp: float | None = 1.0  # seconds

    fp16: bool = True  # half precision on a GPU; a CPU computes in float32 either way

    def check(self) -> None:
        """Raise OptionError unless these go together."""
        if self.task not in {"transcribe", "translate", "lang_id"}:
            raise OptionError(f"task must be transcribe, translate or lang_id, got {self.task!r}")
        check_temperature(self.temperature)
        for name in ("beam_size", "best_of", "sample_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be 1 or more, got {value}")
        if self.beam_size is not None and self.best_of is not None:
            raise OptionError("beam_size and best_of exclude each other, got both")
        if self.beam_size is not None and self.temperature > 0:
            raise OptionError(
                f"beam_size needs temperature 0, got {self.temperature}: use best_of to sample"
            )
        if self.best_of is not None and self.temperature == 0:
            raise OptionError("best_of needs a temperature above 0, got 0")
        if self.patience is not None and self.beam_size is None:
            raise OptionError("patience needs beam_size, got none")
        if self.patience is not None and not (
            0 <= self.patience < inf and round((self.beam_size or 0) * self.patience) >= 1
        ):
            raise OptionError(f"patience × beam_size must be 1 or more, got {self.patience}")
        if not 0 < self.repetition_penalty < inf:
            raise OptionError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if not self.no_repeat_ngram_size >= 0:
            raise OptionError(
                f"no_repeat_ngram_size must be 0 or more, got {self.no_repeat_ngram_size}"
            )
        if self.length_penalty is not None and not 0 <= self.length_penalty <= 1:
            raise OptionError(f"length_penalty must be in 0..1, got {self.length_penalty}")


@dataclass(frozen=True)
class DecodingResult:
    """One window's text, and how sure the model was."""

    audio_features: Tensor  # (T, D); T = 0: they were let go
    language: str
    language_probs: dict[str, float] | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    avg_logprob: float = float("nan")
    no_speech_prob: float = float("nan")
    temperature: float = float("nan")
    compression_ratio: float = float("nan")
    ended: bool = True  # False: the text was cut off at the most tokens it may have
    last_start: float | None = None  # seconds: the last timestamp that words follow
    policy: Policy = FULL  # what the model saw of the padding
    fallback: str | None = None  # why it was not decoded under the policy that was asked for


def compression_ratio(text: str) -> float:
    """How many times shorter zlib makes the text: a text that repeats itself shrinks much."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


@torch.inference_mode()
def language_of(
    model: Whisper, memory: Memory, tokenizer: Tokenizer
) -> list[tuple[str, dict[str, float]]]:
    """Each clip's likeliest language, and the probabilities of all."""
    if not model.is_multilingual:
        raise OptionError("languages are detected by multilingual models only, got an English one")
    start = torch.full((memory.n_clips, 1), tokenizer.sot, device=model.device)
    x, _ = model.decoder(start, memory, model.decoder.cache(memory.n_clips, 1))
    tokens = tokenizer.language_tokens
    logits = model.decoder.logits(x[:, 0])[:, list(tokens.values())]
    found = []
    for row in logits.softmax(dim=-1).tolist():
        probs = dict(zip(tokens, row, strict=True))
        found.append((max(probs, key=lambda code: probs[code]), probs))
    return found


def detect_language(
    model: Whisper,
    mel: Tensor | Features | Sequence[Features],
    tokenizer: Tokenizer | None = None,
    *,
    padding: Policy | str | None = None,
) -> tuple[Tensor, Any]:
    """Language tokens and probabilities of a window (n_mels, 3000) or a batch of windows."""
    windows, single = _batch(mel)
    if tokenizer is None:
        tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    found = language_of(model, encode(model, windows, _policy(padding, windows)), tokenizer)
    tokens = torch.tensor([tokenizer.language_tokens[code] for code, _ in found])
    probs = [p for _, p in found]
    return (tokens[0], probs[0]) if single else (tokens, probs)


def decode(
    model: Whisper,
    mel: Tensor | Features | Sequence[Features] | Memory,
    options: DecodingOptions | None = None,
    *,
    padding: Policy | str | None = None,
    policy_fallback: bool = True,
    **overrides: Any,
) -> Any:
    """The result of one window, or a list of results for a batch of windows.

    mel:             log-Mel frames (n_mels, 3000) or (B, n_mels, 3000), Features or a list of them,
                     or a memory from `encode`
    padding:         what the model may see of the padding; None: all of it, whatever its fill
    policy_fallback: decode again with all the padding where a result runs away without it
    """
    check_names(overrides, DecodingOptions.__dataclass_fields__)
    options = replace(options or DecodingOptions(), **overrides)
    if isinstance(mel, Memory):
        if padding is not None:
            raise OptionError(f"padding is for windows, got {padding} with a memory, made already")
        return decode_memory(model, mel, options)
    use_precision(model, options.fp16)
    windows, single = _batch(mel)
    policy = _policy(padding, windows)
    results = decode_memory(model, encode(model, windows, policy), options)
    results = [replace(result, policy=policy) for result in results]
    if policy_fallback and policy.kind != "full" and not isinstance(windows, Tensor):
        reasons = {
            i: reason
            for i, (result, window) in enumerate(zip(results, windows, strict=True))
            if (reason := runaway(result, window.n_positions)) is not None
        }
        if reasons:
            memory = encode(model, [windows[i] for i in reasons], policy.fallback)
            again = decode_memory(model, memory, options)
            for (i, reason), result in zip(reasons.items(), again, strict=True):
                results[i] = replace(result, policy=policy.fallback, fallback=reason)
    return results[0] if single else results


def runaway(
    result: DecodingResult,
    n_positions: int,
    *,
    most_compression: float | None = MOST_COMPRESSION,
    least_logprob: float | None = LEAST_LOGPROB,
) -> str | None:
    """Why a text found without all of the padding is not to be trusted; None if it is.

    n_positions: of audio, in its window
    """
    if not result.ended:
        return "no end"
    compressed = most_compression is not None and result.compression_ratio > most_compression
    if compressed or says_twice([t for t in result.tokens if t < TEXT_TOKENS]):
        return "repetition"
    enough = len(result.tokens) >= FEW_TOKENS
    if least_logprob is not None and enough and result.avg_logprob < least_logprob:
        return "unsure"
    if result.last_start is not None:
        late_s = result.last_start - n_positions / POSITIONS_PER_SECOND
        return "times past the end" if late_s > MOST_LATE_S else None
    return None


def stops_early(text: str, window: Features) -> bool:
    """Whether a text is too short for what there is to hear in its window.

    Without timestamps a model often takes the pause behind a heading for the end of all speech.
    """
    loudness = window.frames[:, : window.n_frames].mean(dim=0)
    loud_s = float((loudness > loudness.quantile(0.95) - LOUD).sum()) / FRAMES_PER_SECOND
    return loud_s >= LEAST_LOUD_S and len(text.encode()) < LEAST_RATE * loud_s


def says_twice(tokens: Sequence[int], n_least: int = LONG_REPEAT) -> bool:
    """Whether a stretch of n_least tokens or more is followed by itself.

    >>> says_twice([7, 1, 2, 3, 1, 2, 3, 8], 3), says_twice([1, 2, 3, 8, 1, 2, 3], 3)
    (True, False)
    """
    for period in range(n_least, len(tokens) // 2 + 1):
        n_equal = 0
        for a, b in zip(tokens, tokens[period:], strict=False):
            n_equal = n_equal + 1 if a == b else 0
            if n_equal == period:
                return True
    return False


def _batch(mel: Tensor | Features | Sequence[Features]) -> tuple[Any, bool]:
    """Windows as a batch, and whether they were a single one."""
    if isinstance(mel, Features):
        return [mel], True
    if isinstance(mel, Tensor) and mel.ndim == 2:
        return mel[None], True
    if isinstance(mel, Tensor):
        return mel, False
    if isinstance(mel, (list, tuple)) and all(isinstance(window, Features) for window in mel):
        return mel, False
    raise OptionError(
        f"mel must be a tensor of log-Mel frames or Features, got {type(mel).__name__}: "
        f"log_mel_spectrogram makes one from samples"
    )


def _policy(padding: Policy | str | None, windows: Tensor | Sequence[Features]) -> Policy:
    """The policy asked for; if none, `full` with the fill that the windows have."""
    if padding is not None:
        return Policy.parse(padding)
    return FULL if isinstance(windows, Tensor) or not windows else Policy(fill=windows[0].fill)


def use_precision(model: Whisper, fp16: bool) -> None:
    """Bring a model on a GPU to half precision if asked; a CPU stays as it is."""
    if model.device.type != "cpu":
        model.to(torch.float16 if fp16 else torch.float32)


def decode_memory(model: Whisper, memory: Memory, options: DecodingOptions) -> list[DecodingResult]:
    """A result for each clip of the memory."""
    options.check()
    tokenizer = get_tokenizer(
        model.is_multilingual,
        num_languages=model.num_languages,
        language=options.language or "en",
        task=options.task,
    )
    n_clips = memory.n_clips
    languages = [options.language or "en"] * n_clips
    probs: list[dict[str, float] | None] = [None] * n_clips
    if options.task == "lang_id" or (options.language is None and model.is_multilingual):
        found = language_of(model, memory, tokenizer)
        languages, probs = [code for code, _ in found], [p for _, p in found]
    if options.task == "lang_id":
        return [DecodingResult(memory.features[i], languages[i], probs[i]) for i in range(n_clips)]

    first = [memory.first_of(i) for i in range(n_clips)]
    opened = opening(tokenizer, options, model.dims.n_text_ctx)
    given = beginning(tokenizer, options)
    probe = opened.index(tokenizer.sot)
    prompts = torch.tensor(
        [opened + _shifted(given, tokenizer.timestamp_begin, f) for f in first],
        device=model.device,
    )
    if options.language is None and model.is_multilingual:
        tokens = [tokenizer.language_tokens[code] for code in languages]
        prompts[:, probe + 1] = torch.tensor(tokens, device=model.device)
    clips = search(
        model,
        memory,
        prompts,
        _strategy(options, tokenizer.eot),
        _filters(model, tokenizer, options, first, len(given)),
        n_given=len(given),
        n_most=options.sample_len or model.dims.n_text_ctx // 2,
        probe=(probe, tokenizer.no_speech),
    )
    results = []
    for i, clip in enumerate(clips):
        best = _best(clip.candidates, options.length_penalty, len(given))
        text = tokenizer.decode(best.tokens).strip()
        begin = tokenizer.timestamp_begin
        tokens = _shifted(best.tokens, begin, -first[i])
        starts = [time - begin for time, after in pairwise(tokens) if time >= begin > after]
        results.append(
            DecodingResult(
                audio_features=memory.features[i],
                language=languages[i],
                language_probs=probs[i],
                tokens=tokens,
                text=text,
                avg_logprob=best.sum_logprob / (len(best.tokens) - len(given) + 1),
                no_speech_prob=clip.probability,
                temperature=options.temperature,
                compression_ratio=compression_ratio(text),
                ended=best.ended,
                last_start=starts[-1] / POSITIONS_PER_SECOND if starts else None,
            )
        )
    return results


def _shifted(tokens: list[int], begin: int, steps: int) -> list[int]:
    """Tokens whose times are moved by some steps; none comes before 0.00, the token `begin`."""
    return [max(begin, t + steps) if t >= begin else t for t in tokens] if steps else tokens


def _tokens(tokenizer: Tokenizer, text: str | list[int]) -> list[int]:
    return tokenizer.encode(" " + text.strip()) if isinstance(text, str) else list(text)


def opening(tokenizer: Tokenizer, options: DecodingOptions, n_ctx: int) -> list[int]:
    """The tokens before a window's text: previous text and start sequence."""
    found = list(tokenizer.sot_sequence)
    if options.without_timestamps:
        found.append(tokenizer.no_timestamps)
    if options.prompt:
        previous = _tokens(tokenizer, options.prompt)[-(n_ctx // 2 - 1) :]
        found = [tokenizer.sot_prev, *previous, *found]
    n_tokens = len(found) + len(beginning(tokenizer, options))
    if n_tokens > n_ctx:
        raise OptionError(f"prompt and prefix must leave room in {n_ctx} tokens, got {n_tokens}")
    return found


def beginning(tokenizer: Tokenizer, options: DecodingOptions) -> list[int]:
    """The tokens of a window's text that are given: the prefix, behind the time 0.00."""
    prefix = options.prefix.strip() if isinstance(options.prefix, str) else options.prefix
    if not prefix:
        return []
    tokens = _tokens(tokenizer, prefix)
    if options.without_timestamps or tokens[0] >= tokenizer.timestamp_begin:
        return tokens
    return [tokenizer.timestamp_begin, *tokens]


def _strategy(options: DecodingOptions, eot: int) -> Strategy:
    if options.beam_size is not None:
        return Beam(eot, options.beam_size, options.patience or 1.0)
    return Greedy(eot, options.temperature, options.best_of or 1)


def _filters(
    model: Whisper,
    tokenizer: Tokenizer,
    options: DecodingOptions,
    first: list[int],
    n_given: int,
) -> list[Filter]:
    filters: list[Filter] = []
    if options.repetition_penalty != 1:
        filters.append(RepetitionPenalty(options.repetition_penalty))
    if options.no_repeat_ngram_size:
        filters.append(NoRepeatNgram(options.no_repeat_ngram_size))
    if options.suppress_blank:
        filters.append(SuppressBlank(tokenizer, model.device, n_given))
    if options.suppress_tokens:
        suppressed = _suppressed(tokenizer, options.suppress_tokens, model.dims.n_vocab)
        filters.append(SuppressTokens(suppressed, model.device))
    if not options.without_timestamps:
        latest = None
        if options.max_initial_timestamp:
            position_s = CHUNK_LENGTH / model.dims.n_audio_ctx
            latest = round(options.max_initial_timestamp / position_s)
        filters.append(TimestampRules(tokenizer, latest, first))
    return filters


def _suppressed(tokenizer: Tokenizer, listed: str | Iterable[int], n_vocab: int) -> list[int]:
    try:
        items = [part for part in listed.split(",") if part] if isinstance(listed, str) else listed
        tokens = {int(item) for item in items}
    except (TypeError, ValueError):
        raise OptionError(f"suppress_tokens must be token ids or -1, got {listed!r}") from None
    if any(not -1 <= token < n_vocab for token in tokens):
        raise OptionError(f"suppress_tokens must be in -1..{n_vocab - 1}, got {sorted(tokens)}")
    if -1 in tokens:
        tokens = tokens - {-1} | set(tokenizer.non_speech_tokens)
    # never part of a text; no_speech is read at the start instead
    tokens |= {tokenizer.transcribe, tokenizer.translate, tokenizer.sot, tokenizer.sot_prev}
    return sorted(tokens | {tokenizer.sot_lm, tokenizer.no_speech})


def _best(candidates: list[Candidate], length_penalty: float | None, n_given: int = 0) -> Candidate:
    """The candidate of the highest log-probability for its length, without n_given tokens."""

    def score(candidate: Candidate) -> float:
        length = len(candidate.tokens) - n_given
        if length_penalty is None:
            return candidate.sum_logprob / max(length, 1)
        return candidate.sum_logprob / ((5 + length) / 6) ** length_penalty

    return max(candidates, key=score)
