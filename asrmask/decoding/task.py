"""Decode a batch of windows into one result per window."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from asrmask.audio.constants import CHUNK_LENGTH, POSITIONS_PER_SECOND
from asrmask.audio.spectrogram import Features
from asrmask.decoding.filters import (
    Filter,
    NoRepeatNgram,
    RepetitionPenalty,
    SuppressBlank,
    SuppressTokens,
    TimestampRules,
)
from asrmask.decoding.language import language_of
from asrmask.decoding.options import DecodeKeywords, DecodingOptions, DecodingResult
from asrmask.decoding.quality import compression_ratio, runaway
from asrmask.decoding.search import Beam, Candidate, Greedy, SearchResult, Strategy, search
from asrmask.decoding.windows import _batch, _policy, use_precision
from asrmask.errors import OptionError, check_names
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer


@overload
def decode(
    model: Whisper,
    mel: Features,
    options: DecodingOptions | None = None,
    *,
    padding: Policy | str | None = None,
    policy_fallback: bool = True,
    **overrides: Unpack[DecodeKeywords],
) -> DecodingResult: ...


@overload
def decode(
    model: Whisper,
    mel: Sequence[Features] | CrossAttentionCache,
    options: DecodingOptions | None = None,
    *,
    padding: Policy | str | None = None,
    policy_fallback: bool = True,
    **overrides: Unpack[DecodeKeywords],
) -> list[DecodingResult]: ...


@overload
def decode(
    model: Whisper,
    mel: Tensor | Features | Sequence[Features],
    options: DecodingOptions | None = None,
    *,
    padding: Policy | str | None = None,
    policy_fallback: bool = True,
    **overrides: Unpack[DecodeKeywords],
) -> DecodingResult | list[DecodingResult]: ...


def decode(
    model: Whisper,
    mel: Tensor | Features | Sequence[Features] | CrossAttentionCache,
    options: DecodingOptions | None = None,
    *,
    padding: Policy | str | None = None,
    policy_fallback: bool = True,
    **overrides: Unpack[DecodeKeywords],
) -> DecodingResult | list[DecodingResult]:
    """Decode one window to a result, or a batch of windows to a list of results.

    mel:             log-Mel frames (n_mels, 3000) or (B, n_mels, 3000), Features or a list of them,
                     or the return value of `encode`
    padding:         how much padding the model may see; None: all of it, with any fill
    policy_fallback: decode again with all padding if the result with hidden padding is unreliable
    """
    check_names(overrides, DecodingOptions.__dataclass_fields__)
    options = replace(options or DecodingOptions(), **overrides)
    if isinstance(mel, CrossAttentionCache):
        if padding is not None:
            raise OptionError(f"padding is for windows, got {padding} with encoded windows")
        return decode_encoded(model, mel, options)
    use_precision(model, options.fp16)
    windows, single = _batch(mel)
    policy = _policy(padding, windows)
    results = decode_encoded(model, encode(model, windows, policy), options)
    results = [replace(result, policy=policy) for result in results]
    if policy_fallback and policy.kind != "full" and not isinstance(windows, Tensor):
        reasons = {
            i: reason
            for i, (result, window) in enumerate(zip(results, windows, strict=True))
            if (reason := runaway(result, window.n_positions)) is not None
        }
        if reasons:
            encoded = encode(model, [windows[i] for i in reasons], policy.fallback)
            again = decode_encoded(model, encoded, options)
            for (i, reason), result in zip(reasons.items(), again, strict=True):
                results[i] = replace(result, policy=policy.fallback, fallback=reason)
    return results[0] if single else results


def decode_encoded(
    model: Whisper, encoded: CrossAttentionCache, options: DecodingOptions
) -> list[DecodingResult]:
    """Decode every clip of an encoded batch."""
    options.check()
    tokenizer = get_tokenizer(
        model.is_multilingual,
        num_languages=model.num_languages,
        language=options.language or "en",
        task=options.task,
    )
    n_clips = encoded.n_clips
    languages = [options.language or "en"] * n_clips
    probs: list[dict[str, float] | None] = [None] * n_clips
    if options.task == "lang_id" or (options.language is None and model.is_multilingual):
        found = language_of(model, encoded, tokenizer)
        languages, probs = [code for code, _ in found], [p for _, p in found]
    if options.task == "lang_id":
        return [DecodingResult(encoded.features[i], languages[i], probs[i]) for i in range(n_clips)]

    first = [encoded.first_of(i) for i in range(n_clips)]
    opened = opening(tokenizer, options, model.dims.n_text_ctx)
    given = beginning(tokenizer, options)
    sot_index = opened.index(tokenizer.sot)
    prompts = torch.tensor(
        [opened + _shifted(given, tokenizer.timestamp_begin, f) for f in first],
        device=model.device,
    )
    if options.language is None and model.is_multilingual:
        tokens = [tokenizer.language_tokens[code] for code in languages]
        prompts[:, sot_index + 1] = torch.tensor(tokens, device=model.device)
    clips = search(
        model,
        encoded,
        prompts,
        _strategy(options, tokenizer.eot),
        _filters(model, tokenizer, options, first, len(given)),
        n_prefix=len(given),
        max_tokens=options.sample_len or model.dims.n_text_ctx // 2,
        probe=(sot_index, tokenizer.no_speech),
    )
    return [
        replace(
            _result(tokenizer, options, clip, first[i], len(given)),
            audio_features=encoded.features[i],
            language=languages[i],
            language_probs=probs[i],
        )
        for i, clip in enumerate(clips)
    ]


def _result(
    tokenizer: Tokenizer, options: DecodingOptions, clip: SearchResult, first: int, n_prefix: int
) -> DecodingResult:
    """Return the best text of a clip whose audio starts at position `first`."""
    best = _best(clip.candidates, options.length_penalty, n_prefix)
    text = tokenizer.decode(best.tokens).strip()
    begin = tokenizer.timestamp_begin
    tokens = _shifted(best.tokens, begin, -first)
    starts = [time - begin for time, after in pairwise(tokens) if time >= begin > after]
    return DecodingResult(
        torch.empty(0),
        options.language or "en",
        tokens=tokens,
        text=text,
        avg_logprob=best.sum_logprob / (len(best.tokens) - n_prefix + 1),
        no_speech_prob=clip.probability,
        temperature=options.temperature,
        compression_ratio=compression_ratio(text),
        ended=best.ended,
        last_start=starts[-1] / POSITIONS_PER_SECOND if starts else None,
    )


def _shifted(tokens: list[int], begin: int, steps: int) -> list[int]:
    """Shift timestamp tokens by `steps`, but not before `begin`, the token of 0.00."""
    return [max(begin, t + steps) if t >= begin else t for t in tokens] if steps else tokens


def _tokens(tokenizer: Tokenizer, text: str | list[int]) -> list[int]:
    return tokenizer.encode(" " + text.strip()) if isinstance(text, str) else list(text)


def opening(tokenizer: Tokenizer, options: DecodingOptions, n_ctx: int) -> list[int]:
    """Return the tokens before the text of a window: prompt and start sequence."""
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
    """Return the prefix tokens of a window's text, led by 0.00 unless timestamps are off."""
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
    n_prefix: int,
) -> list[Filter]:
    filters: list[Filter] = []
    if options.repetition_penalty != 1:
        filters.append(RepetitionPenalty(options.repetition_penalty))
    if options.no_repeat_ngram_size:
        filters.append(NoRepeatNgram(options.no_repeat_ngram_size))
    if options.suppress_blank:
        filters.append(SuppressBlank(tokenizer, model.device, n_prefix))
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
    # never part of a text; the probability of no_speech is read at sot
    tokens |= {tokenizer.transcribe, tokenizer.translate, tokenizer.sot, tokenizer.sot_prev}
    return sorted(tokens | {tokenizer.sot_lm, tokenizer.no_speech})


def _best(
    candidates: list[Candidate], length_penalty: float | None, n_prefix: int = 0
) -> Candidate:
    """Return the candidate with the best length-normalised score, ignoring n_prefix tokens."""

    def score(candidate: Candidate) -> float:
        length = len(candidate.tokens) - n_prefix
        if length_penalty is None:
            return candidate.sum_logprob / max(length, 1)
        return candidate.sum_logprob / ((5 + length) / 6) ** length_penalty

    return max(candidates, key=score)
