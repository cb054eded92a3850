"""The parity report: asrmask beside openai-whisper, printed as it goes.

Three parts: clips (stages and tokens of one window), long recordings (segments, words and speed of
the whole loop), and languages (the multilingual model).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asrmask import upstream
from asrmask.audio import load_audio
from asrmask.corpus import Clip
from asrmask.model import Whisper
from asrmask.score import Errors, errors
from asrmask.transcriber import transcribe
from asrmask.transcription import Transcription

TOLERANCE = 1e-4  # of log-Mel, encoder output and logits
NEAR = 1e-3  # a choice between logits that close may fall either way
ROUNDS = 7


def compare_clips(clips: Sequence[Clip], model: Whisper, other: Any) -> bool:
    """Stage by stage and token by token; True if all is within tolerance."""
    normalise = upstream.normalizer("en")
    worst = upstream.Stages(0.0, 0.0, 0.0)
    n_same = dict.fromkeys(upstream.MODES, 0)
    near = far = 0
    scores: dict[tuple[str, str], Errors] = {}
    print(f"{'clip':24}{'log-Mel':>10}{'encoder':>10}{'logits':>10}  tokens")
    for clip in clips:
        stages, found = upstream.compare(model, other, load_audio(clip.path))
        worst = upstream.Stages(*map(max, zip(_values(worst), _values(stages), strict=True)))
        equal = all(comparison.is_same for comparison in found)
        numbers = "".join(f"{value:10.1e}" for value in _values(stages))
        print(f"{clip.path.stem[:23]:24}{numbers}  {'equal' if equal else 'DIFFER'}", flush=True)
        for comparison in found:
            n_same[comparison.mode] += comparison.is_same
            if comparison.parting is not None:
                parting = comparison.parting
                is_near = abs(parting.gap) < NEAR
                near, far = near + is_near, far + (not is_near)
                print(
                    f"  {comparison.mode}: step {parting.step}: ours {parting.ours}, "
                    f"theirs {parting.theirs}, gap {parting.gap:.1e}"
                )
            if clip.text is not None:
                reference = normalise(clip.text)
                for who, result in (("ours", comparison.ours), ("theirs", comparison.theirs)):
                    key = (comparison.mode, who)
                    found_errors = errors(reference, normalise(result.text))
                    scores[key] = scores.get(key, Errors()) + found_errors
    print(
        f"\nlargest difference: log-Mel {worst.log_mel:.1e}, encoder {worst.encoder:.1e}, "
        f"logits {worst.logits:.1e} (tolerance {TOLERANCE:.0e})"
    )
    for mode, n in n_same.items():
        print(f"{mode:15} tokens equal on {n} of {len(clips)} clips")
        for who in ("ours", "theirs"):
            if (mode, who) in scores:
                print(f"{'':15} {who:7}{scores[mode, who]}")
    if near or far:
        print(f"{near} choices differ within {NEAR:.0e} of each other, {far} by more")
    return max(_values(worst)) <= TOLERANCE and not far


def _values(stages: upstream.Stages) -> tuple[float, float, float]:
    return stages.log_mel, stages.encoder, stages.logits


def compare_long(clips: Sequence[Clip], model: Whisper, other: Any) -> bool:
    """Segments, tokens, times and words of whole recordings; True if all are equal."""
    all_equal = True
    modes: dict[str, dict[str, Any]] = {"defaults": {}, "word times": {"word_timestamps": True}}
    for mode, choices in modes.items():
        for clip in clips:
            ours, theirs = _both(model, other, clip, **choices)
            difference = first_difference(ours, theirs)
            all_equal &= difference is None
            n_words = sum(len(segment.words or []) for segment in ours.segments)
            print(
                f"{mode:12}{clip.path.name:24}{len(ours.segments):4} segments{n_words:5} words  "
                f"{difference or 'equal'}",
                flush=True,
            )
    return all_equal


def compare_languages(clips: Sequence[Clip], model: Whisper, other: Any) -> bool:
    """Language, tokens and text with a multilingual model, and in translation; True if equal."""
    all_equal = True
    for clip in clips:
        verdicts = []
        for task in ("transcribe", "translate"):
            ours, theirs = _both(model, other, clip, task=task)
            difference = first_difference(ours, theirs)
            all_equal &= difference is None
            verdicts.append(f"{task}: {difference or 'equal'} ({ours.language})")
        print(f"{clip.path.name:24}{'; '.join(verdicts)}", flush=True)
    return all_equal


def _both(model: Whisper, other: Any, clip: Clip, **choices: Any) -> tuple[Transcription, Any]:
    samples = load_audio(clip.path)
    torch.manual_seed(0)  # fallback temperatures draw
    ours = transcribe(model, samples, **choices)
    torch.manual_seed(0)
    return ours, upstream.whisper().transcribe(other, samples, fp16=False, **choices)


def first_difference(ours: Transcription, theirs: Any) -> str | None:
    """Where two transcriptions part, in words; None if text, tokens, times and words are equal."""
    if ours["language"] != theirs["language"]:
        return f"language: ours {ours['language']}, theirs {theirs['language']}"
    for a, b in zip(ours["segments"], theirs["segments"], strict=False):
        for name in ("seek", "start", "end", "text", "tokens", "temperature"):
            if a[name] != b[name]:
                return f"segment {a['id']}, {name}: ours {a[name]!r}, theirs {b[name]!r}"
        words = zip(a.get("words", []), b.get("words", []), strict=False)
        for i, (word, other) in enumerate(words):
            for name in ("word", "start", "end"):
                if word[name] != other[name]:
                    mine, their = word[name], other[name]
                    return f"segment {a['id']}, word {i}, {name}: ours {mine}, theirs {their}"
        if len(a.get("words", [])) != len(b.get("words", [])):
            return f"segment {a['id']}: other words"
    if len(ours["segments"]) != len(theirs["segments"]):
        return f"ours {len(ours['segments'])} segments, theirs {len(theirs['segments'])}"
    return None if ours["text"] == theirs["text"] else "text"


def print_speed(paths: Sequence[Path], model: Whisper, other: Any, modes: dict[str, Any]) -> None:
    """Both on the same files, in turn, exact float32."""
    recordings = [load_audio(path) for path in paths]
    names = paths[0].name if len(paths) == 1 else f"{len(paths)} recordings"
    n_threads = torch.get_num_threads()
    print(f"\n{names}, float32, {n_threads} threads, median of {ROUNDS} rounds in turn:")

    def run(call: Callable[..., Any], **choices: Any) -> None:
        for samples in recordings:
            call(samples, **choices)

    ours = partial(transcribe, model)
    theirs = partial(upstream.whisper().transcribe, other, fp16=False)
    for mode, choices in modes.items():
        a, b = in_turn(partial(run, ours, **choices), partial(run, theirs, **choices))
        print(f"{mode:12}asrmask {a:.3f} s, openai-whisper {b:.3f} s: {b / a:.2f} ×", flush=True)


def in_turn(*calls: Callable[[], object]) -> list[float]:
    """Each call's median time in seconds, over rounds in which all take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):
        for call, taken in zip(calls, times, strict=True):
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
    return [statistics.median(taken[1:]) for taken in times]  # the first round warms up
