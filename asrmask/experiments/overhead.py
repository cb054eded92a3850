"""What recording costs: encoding before it existed, with it off, and with it on.

An older copy of the package is imported beside this one, and both are given the same weights in the
same memory and the same half minute of audio, in turn, in one process: whatever else the machine
does falls on all of them alike.
"""

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asrmask.audio import N_FRAMES, N_SAMPLES, Features, Recording, Spectrogram
from asrmask.corpus import Clip
from asrmask.encoding import FULL, encode
from asrmask.instruments.measure import Text, measure
from asrmask.instruments.tables import markdown
from asrmask.model import Whisper
from asrmask.tokenizer import get_tokenizer

ROUNDS = 150  # of encoding with recording off
ROUNDS_ON = 6
N_DRAWS = 2000
PACKAGE = __name__.partition(".")[0]


@contextmanager
def another(folder: Path) -> Iterator[None]:
    """While this lasts, the package is imported from that folder; what is imported stays usable."""

    def mine() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == PACKAGE]

    kept = {name: sys.modules.pop(name) for name in mine()}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in mine():
            del sys.modules[name]
        sys.modules.update(kept)


def copied(model: Whisper, folder: Path) -> tuple[Any, ModuleType]:
    """The model in another copy of the package, with the same weights, and that copy's encoding."""
    with another(folder):
        encoding = importlib.import_module(f"{PACKAGE}.encoding")
        theirs = importlib.import_module(f"{PACKAGE}.model")
    assert Path(str(encoding.__file__)).is_relative_to(folder), encoding.__file__
    twin = theirs.Whisper(theirs.ModelDimensions(**model.dims.as_dict()))
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.eval(), encoding


def half_minute(model: Whisper, clips: Sequence[Clip]) -> Features:
    """A window without padding: as much audio as there can be."""
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < N_SAMPLES:
        recording = clips[len(parts) % len(clips)].recording()
        parts.append(recording.read(0, recording.n_samples))
    samples = np.concatenate(parts)[:N_SAMPLES]
    return Spectrogram(Recording.of(samples), model.dims.n_mels).window(0, N_FRAMES, fill="zero")


def in_turn(works: Sequence[Callable[[], object]], rounds: int) -> np.ndarray:
    """Seconds of each, (works, rounds); every other round in the opposite order; one warms up."""
    times = np.zeros((len(works), rounds + 1))
    for r in range(rounds + 1):
        order = range(len(works)) if r % 2 else reversed(range(len(works)))
        for i in order:
            begun = time.perf_counter()
            works[i]()
            times[i, r] = time.perf_counter() - begun
    return times[:, 1:]


def ratio(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """The median of a ÷ b, round by round, with its 95 % interval: bootstrap over rounds."""
    ratios = a / b
    draws = np.random.default_rng(0).integers(len(a), size=(N_DRAWS, len(a)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


class Listed(TorchDispatchMode):
    """Keeps the name of every operation that PyTorch runs, with the shapes that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
        self.names.append(f"{func} {shapes}")
        return func(*args, **(kwargs or {}))


def operations(model: Whisper, clips: Sequence[Clip], folder: Path) -> str:
    """Whether encoding runs the same operations as before recording: no clock is needed."""
    mel = half_minute(model, clips).mel[None]
    twin, encoding = copied(model, folder)
    found = []
    for work in (lambda: encoding.encode(twin, mel), lambda: encode(model, mel)):
        with Listed() as listed:
            work()
        found.append(listed.names)
    same = "the same, in the same order" if found[0] == found[1] else "not the same"
    return f"operations of the encoder: {len(found[0])} before, {len(found[1])} with it off: {same}"


@torch.inference_mode()
def report(model: Whisper, clips: Sequence[Clip], folder: Path) -> str:
    """The times, as tables."""
    window = half_minute(model, clips)
    mel = window.mel[None]
    twin, encoding = copied(model, folder)
    same = torch.equal(encode(model, mel).features, encoding.encode(twin, mel).features)
    off = in_turn([lambda: encoding.encode(twin, mel), lambda: encode(model, mel)], ROUNDS)
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    opening = (*tokenizer.sot_sequence, tokenizer.no_timestamps)
    tokens = tuple(tokenizer.encode(" " + " ".join(clip.text or "" for clip in clips))[:100])
    text = Text(opening, tokens, tokenizer.eot, tokenizer.timestamp_begin)
    row = text.row(model.dims.n_text_ctx)

    def plain() -> None:
        memory = encode(model, [window])
        x, _ = model.decoder(row, memory, model.decoder.cache(*row.shape))
        model.decoder.logits(x[:, -1])

    on = in_turn(
        [
            lambda: measure(model, window, FULL, text),
            plain,
            lambda: encode(model, [window], FULL, lambda place, quantity, tensor: None),
            lambda: encode(model, [window]),
        ],
        ROUNDS_ON,
    )
    rows = [
        ("encoder, recording off ÷ before there was any", off[1], off[0], ROUNDS),
        ("encoder, recorded and thrown away ÷ off", on[2], on[3], ROUNDS_ON),
        (f"encoder and {len(tokens)} tokens, every head measured ÷ off", on[0], on[1], ROUNDS_ON),
    ]
    lines = []
    for name, a, b, n in rows:
        at, low, high = ratio(a, b)
        ms = [f"{1000 * statistics.median(x):.1f}" for x in (a, b)]
        lines.append([name, *ms, f"{at:.4f} ({low:.4f} … {high:.4f})", n])
    table = markdown(["30 s of audio", "ms", "ms", "ratio (95 % interval)", "rounds"], lines)
    equal = "equal" if same else "not equal"
    return f"{table}\n\nFeatures before and after: {equal}, bit for bit."
