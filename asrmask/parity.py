"""The parity report: asrmask beside openai-whisper on many clips, printed as it goes."""

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asrmask import upstream
from asrmask.audio import load_audio
from asrmask.checkpoints import load_model
from asrmask.errors import AsrmaskError, AudioError
from asrmask.model import Whisper
from asrmask.score import Errors, errors
from asrmask.transcriber import transcribe

TOLERANCE = 1e-4  # of log-Mel, encoder output and logits
NEAR = 1e-3  # a choice between logits that close may fall either way
ROUNDS = 7

__all__ = ["AsrmaskError", "Clip", "clips", "report"]


@dataclass(frozen=True)
class Clip:
    path: Path
    text: str | None = None  # what is said, if known


def clips(files: Sequence[Path], shared: Path) -> list[Clip]:
    """The files given, or jfk.flac and the LibriSpeech clips in the folder of shared speech."""
    if files:
        return [Clip(path) for path in files]
    if not shared.is_dir():
        raise AudioError(f"no shared speech at {shared}, expected it or files to compare")
    return [Clip(shared / "jfk.flac"), *from_manifest(shared / "librispeech-test-other")]


def from_manifest(folder: Path) -> list[Clip]:
    with (folder / "manifest.tsv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        return [Clip(folder / row["path"], row["text"]) for row in rows]


def report(chosen: Sequence[Clip], model_name: str, *, speed: bool) -> bool:
    """Compare clip by clip, print, and say whether everything is within tolerance."""
    model = load_model(model_name, device="cpu")
    other = upstream.twin(model)
    normalise = upstream.normalizer("en")
    worst = upstream.Stages(0.0, 0.0, 0.0)
    n_same = dict.fromkeys(upstream.MODES, 0)
    near = far = 0
    scores: dict[tuple[str, str], Errors] = {}
    print(f"{'clip':24}{'log-Mel':>10}{'encoder':>10}{'logits':>10}  tokens")
    for clip in chosen:
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
    stages_ok = max(_values(worst)) <= TOLERANCE
    print(
        f"\nlargest difference: log-Mel {worst.log_mel:.1e}, encoder {worst.encoder:.1e}, "
        f"logits {worst.logits:.1e} (tolerance {TOLERANCE:.0e})"
    )
    for mode, n in n_same.items():
        print(f"{mode:15} tokens equal on {n} of {len(chosen)} clips")
        for who in ("ours", "theirs"):
            if (mode, who) in scores:
                print(f"{'':15} {who:7}{scores[mode, who]}")
    if near or far:
        print(f"{near} choices differ within {NEAR:.0e} of each other, {far} by more")
    if speed:
        _print_speed(model, other, chosen[0].path)
    print("\nparity: " + ("yes" if stages_ok and not far else "NO"))
    return stages_ok and not far


def _values(stages: upstream.Stages) -> tuple[float, float, float]:
    return stages.log_mel, stages.encoder, stages.logits


def _print_speed(model: Whisper, other: object, path: Path) -> None:
    """Both on one file, in turn, exact float32."""
    samples = load_audio(path)
    n_threads = torch.get_num_threads()
    print(f"\n{path.name}, float32, {n_threads} threads, median of {ROUNDS} rounds in turn:")
    modes: dict[str, dict[str, Any]] = {"greedy": {}, "beam 5": {"beam_size": 5}}
    theirs_too = partial(upstream.whisper().transcribe, other, samples, fp16=False)
    for name, choices in modes.items():
        ours, theirs = in_turn(
            partial(transcribe, model, samples, temperature=0.0, **choices),
            partial(theirs_too, temperature=0.0, **choices),
        )
        print(f"{name:8}asrmask {ours:.3f} s, openai-whisper {theirs:.3f} s: {theirs / ours:.2f} ×")


def in_turn(*calls: Callable[[], object]) -> list[float]:
    """Each call's median time in seconds, over rounds in which all take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):
        for call, taken in zip(calls, times, strict=True):
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
    return [statistics.median(taken[1:]) for taken in times]  # the first round warms up
