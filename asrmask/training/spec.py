"""The spec of a training run: what is trained, under which masks, on what, for how long.

A spec is a TOML file; docs/train.md shows one. The policies are those that the model is trained
under. With several, one is drawn for each batch.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asrmask import spec_files
from asrmask.errors import OptionError
from asrmask.model.policy import Policy

LAYERS = ("query", "key", "value", "out", "mlp", "norms", "positions")
PARTS = ("encoder", "decoder")
WHAT = ("adapter", "everything")
PRECISIONS = ("auto", "float32", "bfloat16")


def _check(is_valid: bool, rule: str, got: object) -> None:
    if not is_valid:
        raise OptionError(f"{rule}, got {got}")


@dataclass(frozen=True)
class AdapterShape:
    """What an adapter consists of.

    layers: linear layers that get a low-rank addition; norms and positions are trained directly
    """

    rank: int = 8
    scale: float = 2.0
    layers: tuple[str, ...] = LAYERS[:-1]
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        _check(1 <= self.rank <= 512, "rank must be 1..512", self.rank)
        _check(0 < self.scale < 1000, "scale must be above 0 and below 1000", self.scale)
        for name, known in (("layers", LAYERS), ("parts", PARTS)):
            given = getattr(self, name)
            is_valid = bool(given) and set(given) <= set(known)
            _check(is_valid, f"{name} must be of {', '.join(known)}", list(given))


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses; 0: not computed.

    text:     cross-entropy of the transcript, or of what the padded model writes
    features: relative squared error of the encoder's output at the audio's own positions
    logits:   Kullback-Leibler divergence from the padded model's next token
    """

    text: float = 0.0
    features: float = 1.0
    logits: float = 1.0

    def __post_init__(self) -> None:
        weights = [self.text, self.features, self.logits]
        is_valid = min(weights) >= 0 and 0 < max(weights) < 1e6
        _check(is_valid, "losses must be 0 or more, and one of them above 0", weights)

    @property
    def is_distilling(self) -> bool:
        """Whether the padded model's output is needed."""
        return self.features > 0 or self.logits > 0


@dataclass(frozen=True)
class Augmentation:
    """Changes of the audio, drawn anew for each example from the seed.

    cuts:       each clip also ends early at this many random places, and one version is drawn. Only
                without transcripts, because nobody knows where in the text the audio ends
    time_masks: stretches of up to time_mask_s seconds that are hidden in the spectrogram
    mel_masks:  stretches of up to mel_mask bands, likewise (SpecAugment, arXiv:1904.08779)
    noise_db:   lowest and highest level of white noise in dBFS; empty: none
    silence_s:  up to so much silence is added behind the audio
    """

    cuts: int = 0
    time_masks: int = 0
    time_mask_s: float = 0.4
    mel_masks: int = 0
    mel_mask: int = 12
    noise_db: tuple[float, ...] = ()
    silence_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cuts", "time_masks", "mel_masks", "mel_mask", "time_mask_s", "silence_s"):
            _check(0 <= getattr(self, name) <= 100, f"{name} must be 0..100", getattr(self, name))
        low_high = list(self.noise_db)
        is_valid = not low_high or (len(low_high) == 2 and -120 <= low_high[0] <= low_high[1] <= 0)
        _check(is_valid, "noise_db must be two levels in -120..0, the lower one first", low_high)


@dataclass(frozen=True)
class TrainSpec:
    """The definition of a training run.

    policies:       what the model may see of the padding, as in --padding; one is drawn for each
                    batch. Without full among them, the model with full padding changes too
    validation:     policies that held-out clips are decoded under; default: those, and full
    timestamps:     share of the texts that the padded model writes with timestamps
    batch_size:     clips that pass the model together; a step accumulates `accumulate` batches
    warmup:         steps to the full learning rate, which then falls to 0 as a cosine
    held_out:       clips that are not trained on, to validate
    validate_every: steps
    patience:       validations that are not better before the run ends early; 0: never
    """

    model: str = "tiny.en"
    policies: tuple[str, ...] = ("trim", "trim", "trim", "full")
    validation: tuple[str, ...] = ()
    train: str = "adapter"
    adapter: AdapterShape = AdapterShape()
    losses: LossWeights = LossWeights()
    augment: Augmentation = Augmentation()
    timestamps: float = 0.5
    steps: int = 300
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float = 5e-4
    warmup: int = 20
    clip_norm: float = 1.0
    precision: str = "auto"
    held_out: int = 16
    validate_every: int = 50
    patience: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _check(len(self.policies) > 0, "policies must be one or more", "none")
        for text in (*self.policies, *self.validation):
            Policy.parse(text)
        _check(self.train in WHAT, f"train must be one of {', '.join(WHAT)}", repr(self.train))
        is_valid = self.precision in PRECISIONS
        _check(is_valid, f"precision must be one of {', '.join(PRECISIONS)}", repr(self.precision))
        for name in ("steps", "batch_size", "accumulate", "validate_every"):
            _check(getattr(self, name) >= 1, f"{name} must be 1 or more", getattr(self, name))
        for name in ("warmup", "held_out", "patience", "seed"):
            _check(getattr(self, name) >= 0, f"{name} must be 0 or more", getattr(self, name))
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            _check(0 < value < 1e6, f"{name} must be above 0", value)
        _check(0 <= self.timestamps <= 1, "timestamps must be 0..1", self.timestamps)

    @property
    def validation_policies(self) -> list[Policy]:
        names = self.validation or (*self.policies, "full")
        return list(dict.fromkeys(map(Policy.parse, names)))

    @property
    def hash(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


TABLES = {"adapter": AdapterShape, "losses": LossWeights, "augment": Augmentation}


def read(path: Path) -> TrainSpec:
    """Read and validate the spec in a TOML file."""
    return spec_files.read(path, of)


def of(content: Mapping[str, Any]) -> TrainSpec:
    """Build a spec from a table."""
    table = dict(content)
    for name, kind in TABLES.items():
        if name in table:
            if not isinstance(table[name], Mapping):
                raise OptionError(f"{name} must be a table, [{name}], got something else")
            values = spec_files.validated(kind, table[name], name, numbers=("noise_db",))
            table[name] = kind(**values)
    return TrainSpec(**spec_files.validated(TrainSpec, table, "spec"))
