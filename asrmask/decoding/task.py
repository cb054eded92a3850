"""Decode windows into one result per window, and detect their languages."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from asrmask.audio.constants import POSITIONS_PER_SECOND
from asrmask.audio.spectrogram import Features
from asrmask.decoding.filters import token_filters
from asrmask.decoding.options import DecodeKeywords, DecodingOptions, DecodingResult
from asrmask.decoding.quality import compression_ratio, runaway_reason
from asrmask.decoding.search import Beam, Candidate, Greedy, Strategy, search
from asrmask.errors import OptionError, check_names
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer

Windows = Tensor | Features | Sequence[Features]


@overload
def decode(
    model: Whisper,
    mel: Features,
    options: DecodingOptions | None = None,
    **overrides: Unpack[DecodeKeywords],
) -> DecodingResult: ...


@overload
def decode(
    model: Whisper,
    mel: Sequence[Features] | CrossAttentionCache,
    options: DecodingOptions | None = None,
    **overrides: Unpack[DecodeKeywords],
) -> list[DecodingResult]: ...


@overload
def decode(
    model: Whisper,
    mel: Windows,
    options: DecodingOptions | None = None,
    **overrides: Unpack[DecodeKeywords],
) -> DecodingResult | list[DecodingResult]: ...


def decode(
    model: Whisper,
    mel: Windows | CrossAttentionCache,
    options: DecodingOptions | None = None,
    *,
    padding: Policy | str | None = None,
    policy_fallback: bool = True,
    **overrides: Any,
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
    windows, policy, is_single = prepare_windows(mel, padding)
    results = decode_encoded(model, encode(model, windows, policy), options)
    results = [replace(result, policy=policy) for result in results]
    if policy_fallback and policy.kind != "full" and not isinstance(windows, Tensor):
        reasons = {
            i: reason
            for i, (result, window) in enumerate(zip(results, windows, strict=True))
            if (reason := runaway_reason(result, window.n_positions)) is not None
        }
        if reasons:
            encoded = encode(model, [windows[i] for i in reasons], policy.fallback)
            retried = decode_encoded(model, encoded, options)
            for (i, reason), result in zip(reasons.items(), retried, strict=True):
                results[i] = replace(result, policy=policy.fallback, fallback=reason)
    return results[0] if is_single else results


def detect_language(
    model: Whisper,
    mel: Windows,
    tokenizer: Tokenizer | None = None,
    *,
    padding: Policy | str | None = None,
) -> tuple[Tensor, dict[str, float] | list[dict[str, float]]]:
    """Return language tokens and probabilities of one window (n_mels, 3000) or a batch."""
    windows, policy, is_single = prepare_windows(mel, padding)
    if tokenizer is None:
        tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    languages = language_of(model, encode(model, windows, policy), tokenizer)
    tokens = torch.tensor([tokenizer.language_tokens[code] for code, _ in languages])
    probs = [clip_probs for _, clip_probs in languages]
    return (tokens[0], probs[0]) if is_single else (tokens, probs)


def prepare_windows(mel: Windows, padding: Policy | str | None) -> tuple[Any, Policy, bool]:
    """Return the windows as a batch, their policy, and whether a single window was given.

    padding: None: `full` with the fill of the windows
    """
    windows: Any = [mel] if isinstance(mel, Features) else mel
    is_single = isinstance(mel, Features) or (isinstance(mel, Tensor) and mel.ndim == 2)
    if isinstance(mel, Tensor):
        windows = mel[None] if is_single else mel
    elif not isinstance(windows, (list, tuple)) or any(
        not isinstance(w, Features) for w in windows
    ):
        raise OptionError(
            f"mel must be a tensor of log-Mel frames or Features, got {type(mel).__name__}: "
            f"log_mel_spectrogram makes one from samples"
        )
    if padding is not None:
        return windows, Policy.parse(padding), is_single
    has_fill = len(windows) > 0 and isinstance(windows[0], Features)
    return windows, Policy(fill=windows[0].fill) if has_fill else Policy(), is_single


def use_precision(model: Whisper, fp16: bool) -> None:
    """Convert a model on a GPU to float16 or float32; leave a model on a CPU unchanged."""
    if model.device.type != "cpu":
        model.to(torch.float16 if fp16 else torch.float32)


def decode_encoded(
    model: Whisper, encoded: CrossAttentionCache, options: DecodingOptions
) -> list[DecodingResult]:
    """Decode every clip of an encoded batch."""
    options.check()
    tokenizer = tokenizer_of(model, options)
    is_detected = options.language is None and model.is_multilingual
    languages: Sequence[tuple[str, dict[str, float] | None]]
    if is_detected or options.task == "lang_id":
        languages = language_of(model, encoded, tokenizer)
    else:
        languages = [(options.language or "en", None)] * encoded.n_clips
    results = [
        DecodingResult(features, code, probs)
        for features, (code, probs) in zip(encoded.features, languages, strict=True)
    ]
    if options.task == "lang_id":
        return results

    first = [encoded.first_of(i) for i in range(encoded.n_clips)]
    start, prefix = initial_tokens(tokenizer, options, model.dims.n_text_ctx)
    prefixes = [shift_timestamps(prefix, tokenizer, n) for n in first]
    prompts = torch.tensor([start + tokens for tokens in prefixes], device=model.device)
    sot_index = start.index(tokenizer.sot)
    if is_detected:
        tokens = [tokenizer.language_tokens[code] for code, _ in languages]
        prompts[:, sot_index + 1] = torch.tensor(tokens, device=model.device)
    candidates, no_speech_probs = search(
        model,
        encoded,
        prompts,
        _strategy(model, options, tokenizer.eot),
        token_filters(model, tokenizer, options, first, len(prefix)),
        n_prefix=len(prefix),
        max_tokens=options.sample_len or model.dims.n_text_ctx // 2,
        probe=(sot_index, tokenizer.no_speech),
    )
    for i, no_speech_prob in enumerate(no_speech_probs):
        best = max(candidates[i], key=lambda c: _score(c, options.length_penalty, len(prefix)))
        text = tokenizer.decode(best.tokens).strip()
        tokens = shift_timestamps(best.tokens, tokenizer, -first[i])
        results[i] = replace(
            results[i],
            tokens=tokens,
            text=text,
            avg_logprob=best.sum_logprob / (len(best.tokens) - len(prefix) + 1),
            no_speech_prob=no_speech_prob,
            temperature=options.temperature,
            compression_ratio=compression_ratio(text),
            ended=best.ended,
            last_start=_last_start(tokens, tokenizer.timestamp_begin),
        )
    return results


def tokenizer_of(model: Whisper, options: DecodingOptions) -> Tokenizer:
    return get_tokenizer(
        model.is_multilingual,
        num_languages=model.num_languages,
        language=options.language or "en",
        task=options.task,
    )


@torch.inference_mode()
def language_of(
    model: Whisper, encoded: CrossAttentionCache, tokenizer: Tokenizer
) -> list[tuple[str, dict[str, float]]]:
    """Return the likeliest language of each clip, and the probabilities of all languages."""
    if not model.is_multilingual:
        raise OptionError("languages are detected by multilingual models only, got an English one")
    start = torch.full((encoded.n_clips, 1), tokenizer.sot, device=model.device)
    x, _ = model.decoder(start, encoded, model.decoder.cache(encoded.n_clips, 1))
    tokens = tokenizer.language_tokens
    logits = model.decoder.logits(x[:, 0])[:, list(tokens.values())]
    probs = [dict(zip(tokens, row, strict=True)) for row in logits.softmax(dim=-1).tolist()]
    return [(max(clip, key=clip.__getitem__), clip) for clip in probs]


def initial_tokens(
    tokenizer: Tokenizer, options: DecodingOptions, n_ctx: int
) -> tuple[list[int], list[int]]:
    """Return the tokens before the text of a window, and the prefix of the text.

    The first are the prompt and the start sequence. The prefix starts with the timestamp 0.00,
    unless timestamps are off.
    """
    start = list(tokenizer.sot_sequence)
    if options.without_timestamps:
        start.append(tokenizer.no_timestamps)
    if options.prompt:
        previous = _encode(tokenizer, options.prompt)[-(n_ctx // 2 - 1) :]
        start = [tokenizer.sot_prev, *previous, *start]
    text = options.prefix.strip() if isinstance(options.prefix, str) else options.prefix
    prefix = _encode(tokenizer, text) if text else []
    if prefix and not options.without_timestamps and prefix[0] < tokenizer.timestamp_begin:
        prefix = [tokenizer.timestamp_begin, *prefix]
    n_tokens = len(start) + len(prefix)
    if n_tokens > n_ctx:
        raise OptionError(f"prompt and prefix must leave room in {n_ctx} tokens, got {n_tokens}")
    return start, prefix


def _encode(tokenizer: Tokenizer, text: str | list[int]) -> list[int]:
    return tokenizer.encode(" " + text.strip()) if isinstance(text, str) else list(text)


def shift_timestamps(tokens: list[int], tokenizer: Tokenizer, steps: int) -> list[int]:
    """Shift timestamp tokens by `steps`, but not before 0.00."""
    begin = tokenizer.timestamp_begin
    return [max(begin, t + steps) if t >= begin else t for t in tokens] if steps else tokens


def _score(candidate: Candidate, length_penalty: float | None, n_prefix: int) -> float:
    """Return the length-normalised log-probability of a candidate, without its prefix."""
    length = len(candidate.tokens) - n_prefix
    if length_penalty is None:
        return candidate.sum_logprob / max(length, 1)
    return candidate.sum_logprob / ((5 + length) / 6) ** length_penalty


def _last_start(tokens: list[int], begin: int) -> float | None:
    """Return the last timestamp that is followed by text, in seconds."""
    starts = [time - begin for time, following in pairwise(tokens) if time >= begin > following]
    return starts[-1] / POSITIONS_PER_SECOND if starts else None


def _strategy(model: Whisper, options: DecodingOptions, eot: int) -> Strategy:
    if options.beam_size is not None:
        return Beam(eot, options.beam_size, options.patience or 1.0)
    n_texts = options.best_of or 1
    return Greedy(eot, options.temperature, n_texts, best_tokens=model.decoder.best_tokens)
