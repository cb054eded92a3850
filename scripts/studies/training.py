"""Adapters trained under padding masks: training, evaluation and tables."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from asrmask.audio.constants import N_FRAMES
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features, Spectrogram, white_noise
from asrmask.checkpoints import load_model
from asrmask.console import progress, say
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.evaluation import corpus
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import Errors, difference_interval, errors, total
from asrmask.files import atomic_write
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper, sha256_of_weights
from asrmask.reporting.tables import markdown
from asrmask.systems.upstream import normalizer
from asrmask.training import losses, report
from asrmask.training.examples import usable
from asrmask.training.losses import TrainingBatch
from asrmask.training.spec import AdapterShape, Augmentation, LossWeights, TrainSpec
from asrmask.training.teacher import Target
from asrmask.training.trainer import Trainer
from asrmask.training.weights import AdapterWeights

TRAINED_ON = "librispeech-train-unlabelled"
SETS = ("librispeech-test-other", "ljspeech", "fleurs-en")
N_CLIPS = 120  # that are trained on or held out
STEPS = 120
BATCH_SIZE = 6  # also of evaluation
BASE = "none"  # no adapter
LAST = "last.safetensors"
ROUNDS = 7  # of timing; one more before them warms up
N_WORDS = 30  # tokens of the texts that are timed
CELLS = {  # name → policy that the adapter is trained under
    "trim": "trim",
    "control": "full",
    "mask:encoder": "mask:encoder",
    "mask:cross": "mask:cross",
}
EVALUATED = {  # name → policies that it is evaluated under
    BASE: ("full", "trim"),
    "trim": ("trim", "full"),
    "control": ("trim",),
    "mask:encoder": ("mask:encoder", "full"),
    "mask:cross": ("mask:cross", "full"),
}
# the most important first
RUNS = [
    ("trim", 0),
    (BASE, 0),
    ("control", 0),
    *(("trim", seed) for seed in (1, 2)),
    *(("control", seed) for seed in (1, 2)),
    ("mask:encoder", 0),
    ("mask:cross", 0),
]
COLUMNS = ("adapter", "policy", "seeds", "WER %", "sub", "del", "ins", "no end")
COLUMNS += ("difference to full without adapter, 95 % interval",)


@dataclass(frozen=True)
class Decoded:
    """One clip: word errors, and whether its text ended."""

    errors: Errors
    ended: bool


class Study:
    """Adapters of one model, in one folder."""

    def __init__(self, model: str, data: Path, work: Path, steps: int):
        self.model, self.data, self.work, self.steps = model, data, work, steps

    def spec(self, name: str, seed: int) -> TrainSpec:
        """SpecAugment is for the control too, which would have nothing to learn without it."""
        return TrainSpec(
            model=self.model,
            policies=(*[CELLS[name]] * 3, "full"),  # so that full stays what it is
            validation=tuple(dict.fromkeys((CELLS[name], "full"))),
            steps=self.steps,
            batch_size=BATCH_SIZE,
            learning_rate=5e-4,
            warmup=10,
            held_out=8,
            validate_every=self.steps // 3,
            augment=Augmentation(cuts=1, time_masks=1, mel_masks=1),
            seed=seed,
        )

    def train(self, name: str, seed: int) -> None:
        """Train an adapter; what is evaluated are its weights after the last step."""
        folder = self._folder(name, seed)
        if name == BASE or (folder / LAST).exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        spec = self.spec(name, seed)
        clips, durations_s, _ = usable(self.data / TRAINED_ON, spec)
        clips = clips[:N_CLIPS]
        model = load_model(self.model, device="cpu")
        trainer = Trainer(spec, model, clips, durations_s, folder, self.work / "targets")
        with progress(f"{name}, seed {seed}", has_lines=True) as advance:
            trainer.run(advance)
        trainer.weights.save(folder / LAST, asdict(spec))
        report.write(folder)

    def evaluate(self, name: str, seed: int) -> None:
        """Decode every set under the cell's policies, where that is not done yet."""
        todo = [
            (policy, data_set)
            for policy in EVALUATED[name]
            for data_set in SETS
            if not self._results(name, seed, policy, data_set).exists()
        ]
        if not todo:
            return
        adapter = None if name == BASE else self._folder(name, seed) / LAST
        model = load_model(self.model, device="cpu", adapter=adapter)
        for policy, data_set in todo:
            found = [[*astuple(d.errors), d.ended] for d in self._decode(model, policy, data_set)]
            path = self._results(name, seed, policy, data_set)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                json.dump(found, file)
            counts = total(Errors(*row[:4]) for row in found)
            say(f"{name}, seed {seed}, {policy} on {data_set}: {counts}")

    def _decode(self, model: Whisper, policy: str, data_set: str) -> list[Decoded]:
        """Every clip of a set, greedily, at temperature 0, without timestamps and fallback."""
        clips = clips_of(self.data, data_set)
        spectrograms = [Spectrogram(Recording.open(c.path), model.dims.n_mels) for c in clips]
        order = sorted(range(len(clips)), key=lambda i: spectrograms[i].n_frames)
        found: dict[int, Decoded] = {}
        for start in range(0, len(order), BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            windows = [
                spectrograms[i].window(0, min(spectrograms[i].n_frames, N_FRAMES), fill="zero")
                for i in chosen
            ]
            language = clips[0].language
            options = DecodingOptions(language=language, without_timestamps=True)
            results = decode_encoded(model, encode(model, windows, Policy.parse(policy)), options)
            normal = normalizer(language)
            for i, result in zip(chosen, results, strict=True):
                counts = errors(normal(clips[i].text or ""), normal(result.text))
                found[i] = Decoded(counts, result.ended)
        return [found[i] for i in range(len(clips))]

    def _folder(self, name: str, seed: int) -> Path:
        return self.work / Path(self.model).name / f"{name.replace(':', '-')}-{seed}"

    def _results(self, name: str, seed: int, policy: str, data_set: str) -> Path:
        folder = self._folder(name, seed) / "results"
        return folder / f"{data_set} {policy.replace(':', '-')}.json"

    def _read(self, name: str, seed: int, policy: str, data_set: str) -> list[Decoded] | None:
        path = self._results(name, seed, policy, data_set)
        if not path.exists():
            return None
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [Decoded(Errors(*row[:4]), row[4]) for row in rows]

    @cached_property
    def _blocks(self) -> dict[str, list[str]]:
        """What the bootstrap draws: speakers, or clips where no speaker is known."""
        return {
            name: [clip.speaker or clip.id for clip in clips_of(self.data, name)] for name in SETS
        }

    def print_tables(self) -> None:
        for data_set in SETS:
            lines = self._lines(data_set)
            if lines:
                n_clips = len(self._blocks[data_set])
                print(f"\n### {data_set}, {n_clips} clips\n\n{markdown(COLUMNS, lines)}")
        lines = []
        for name in CELLS:
            minutes = [
                self._minutes(name, seed)
                for seed in range(3)
                if (self._folder(name, seed) / LAST).exists()
            ]
            if minutes:
                lines.append([name, len(minutes), f"{statistics.mean(minutes):.1f}"])
        if lines:
            print(f"\n### Training, {self.steps} steps of {BATCH_SIZE} clips\n")
            print(markdown(("adapter", "seeds", "minutes of steps, each"), lines))

    def _minutes(self, name: str, seed: int) -> float:
        """The time of all steps, without that for audio and the padded model's output."""
        about = json.loads((self._folder(name, seed) / "history.json").read_text(encoding="utf-8"))
        steps = [entry for entry in about["progress"]["history"] if entry["kind"] == "train"]
        return sum(entry["seconds"] - entry["waited_s"] for entry in steps) / 60

    def _lines(self, data_set: str) -> list[list[object]]:
        """A row for each adapter and policy; errors are those of all seeds together."""
        full = self._read(BASE, 0, "full", data_set)
        lines: list[list[object]] = []
        for name, policies in EVALUATED.items() if full else ():
            for policy in policies:
                runs = [self._read(name, seed, policy, data_set) for seed in range(3)]
                mine = [found for found in runs if found is not None]
                if not mine:
                    continue
                ours = [d.errors for found in mine for d in found]
                theirs = [d.errors for d in full or []] * len(mine)
                blocks = self._blocks[data_set] * len(mine)
                low, high = (100 * x for x in difference_interval(ours, theirs, blocks))
                counts = total(ours)
                change = 100 * (counts.wer - total(theirs).wer)
                each = [f"{100 * total(d.errors for d in found).wer:.2f}" for found in mine]
                lines.append(
                    [
                        *(name, policy, len(mine), " ".join(each)),
                        *(counts.substitutions, counts.deletions, counts.insertions),
                        sum(not d.ended for found in mine for d in found),
                        f"{change:+.2f} ({low:+.2f} … {high:+.2f})",
                    ]
                )
        return lines


def clips_of(data: Path, name: str) -> list[Clip]:
    """The clips of a set; fleurs-en are the English ones of fleurs."""
    if not name.startswith("fleurs-"):
        return corpus.read(data / name)
    folder, _, language = name.partition("-")
    return [clip for clip in corpus.read(data / folder) if clip.language == language]


def print_cost(model_name: str) -> None:
    """The time of a training step, beside forward and backward of the bare model."""
    adapted, bare = (load_model(model_name, device="cpu") for _ in range(2))
    bare.requires_grad_(True)
    windows = [noise_window(bare.dims.n_mels, seconds) for seconds in np.linspace(7, 8, 8)]
    equal = [noise_window(bare.dims.n_mels, 8.0) for _ in windows]
    targets = [_noise_target(bare, window) for window in windows]
    sha256 = sha256_of_weights(bare.state_dict())
    weights = AdapterWeights(adapted, sha256, AdapterShape(), seed=0)
    optimizer = torch.optim.AdamW(list(weights.parameters.values()))
    text, everything = LossWeights(text=1, features=0, logits=0), LossWeights()

    def backward(model: Whisper, clips: Sequence[Features], losses_of: LossWeights) -> None:
        batch = TrainingBatch(clips, targets, Policy("trim"))
        found = losses.sums(model, batch, losses_of)
        sum(value / batch.denominators()[name] for name, value in found.items()).backward()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        backward(adapted, windows, everything)
        torch.nn.utils.clip_grad_norm_(list(weights.parameters.values()), 1.0)
        optimizer.step()

    timed = {
        "forward and backward of all weights, clips of 8 s, no mask": lambda: backward(
            bare, equal, text
        ),
        "the same, clips of 7 to 8 s, masked": lambda: backward(bare, windows, text),
        "a step of an adapter, masked, all losses": step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS + 1):
        for name, function in timed.items():
            bare.zero_grad(set_to_none=True)
            begun = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    first = next(iter(medians.values()))
    lines = [[name, f"{1000 * s:.0f}", f"{100 * s / first:.0f}"] for name, s in medians.items()]
    print(f"\n### 8 clips, float32, {torch.get_num_threads()} thread\n")
    print(markdown(("what", "ms", "% of the first"), lines))


def noise_window(n_mels: int, seconds: float) -> Features:
    """A window with that much noise in it."""
    samples = white_noise(np.random.default_rng(0), round(16_000 * seconds), -20)
    spectrogram = Spectrogram(Recording.of(samples), n_mels)
    return spectrogram.window(0, spectrogram.n_frames, fill="zero")


def _noise_target(model: Whisper, window: Features) -> Target:
    """A target of 25 words, random but of the usual sizes."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50_000, (N_WORDS,), generator=draw)
    likeliest = torch.randint(0, 50_000, (N_WORDS - 2, 64), generator=draw).int()
    features = torch.randn(window.n_positions, model.dims.n_audio_state, generator=draw)
    return Target(tokens, 2, features.half(), likeliest, torch.full((N_WORDS - 2, 64), -8.0))
