"""The training loop: steps, validation, checkpoints, and what is kept at the end.

A run that is interrupted goes on from its last checkpoint, and gives the same weights as one that
was not: with one thread, bit for bit. Everything that is random follows from the seed and the step.
"""

import contextlib
import copy
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from asrmask.console import ProgressCallback
from asrmask.errors import OptionError, one_line
from asrmask.evaluation.corpus import Clip
from asrmask.files import atomic_write
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import Bank, stored
from asrmask.model.whisper import Whisper, sha256_of_weights
from asrmask.training import losses
from asrmask.training.augment import window
from asrmask.training.examples import Batches, Example, rng, split, versions_of
from asrmask.training.losses import TrainingBatch
from asrmask.training.spec import Augmentation, TrainSpec
from asrmask.training.teacher import Teacher
from asrmask.training.validation import Validation
from asrmask.training.weights import AdapterWeights, AllWeights, Trainable

CHECKPOINT, HISTORY = "checkpoint.pt", "history.json"
SAVE_EVERY_S = 60.0  # a checkpoint is written after a step, if the last one is as old
PLAIN = Augmentation()


@dataclass
class Progress:
    """Where a run is.

    history:   what was measured: an entry for each step, and one for each validation and policy
    best:      texts without end and loss of the best validation; empty: none yet
    best_step: the step that it came after
    n_worse:   validations since then
    """

    step: int
    history: list[dict[str, Any]]
    best: list[float] = field(default_factory=list)
    best_step: int = 0
    n_worse: int = 0
    is_done: bool = False


class Trainer:
    """One run, in one folder."""

    def __init__(
        self,
        spec: TrainSpec,
        model: Whisper,
        clips: Sequence[Clip],
        durations_s: Mapping[str, float],
        folder: Path,
        targets: Path | None = None,
        command: str = "",
    ):
        """
        model:       before training; it is changed
        durations_s: by clip id
        targets:     folder of the padded model's output; default: in `folder`
        command:     that made the run, for its page
        """
        trained_on, held_out = split(clips, spec.held_out)
        if not trained_on:
            raise OptionError(
                f"clips must be more than held_out, {spec.held_out}, got {len(clips)}"
            )
        self.spec, self.model, self.folder, self.command = spec, model, folder, command
        self.base_sha256 = sha256_of_weights(model.state_dict())
        padded = copy.deepcopy(model).requires_grad_(False)
        self.bank = _bank(padded, spec)
        self.teacher = Teacher(padded, self.base_sha256, spec, targets or folder / "targets")
        versions = [versions_of(c, durations_s[c.id], spec.augment.cuts) for c in trained_on]
        self.batches = Batches(versions, spec.batch_size, spec.seed)
        held = [versions_of(clip, durations_s[clip.id], 0)[0] for clip in held_out]
        held.sort(key=lambda example: example.n_samples)
        self.validation = Validation(spec, held, self.batch)
        self.weights: Trainable = (
            AllWeights(model)
            if spec.train == "everything"
            else AdapterWeights(model, self.base_sha256, spec.adapter, spec.seed)
        )
        parameters = list(self.weights.parameters.values())
        self.optimizer = torch.optim.AdamW(parameters, spec.learning_rate, weight_decay=0.0)
        self.identity = {
            "spec": spec.hash,
            "weights": self.base_sha256,
            "clips": [clip.id for clip in clips],
        }
        self.progress = Progress(0, [])
        self._resume()

    def run(self, advance: ProgressCallback) -> None:
        """Train until the last step, or until validation stops getting better."""
        spec, progress = self.spec, self.progress
        advance(progress.step, spec.steps)
        if not progress.history:
            self._validate()
        last_saved = time.monotonic()
        while progress.step < spec.steps and not progress.is_done:
            entry = self.train_step()
            progress.step += 1
            progress.history.append(entry)
            is_last = progress.step == spec.steps
            if is_last or progress.step % spec.validate_every == 0:
                self._validate()
            if is_last or progress.is_done or time.monotonic() - last_saved > SAVE_EVERY_S:
                self.save()
                last_saved = time.monotonic()
            text = f"step {progress.step}: loss {entry['loss']:.4f}, {self.validation.summary()}"
            advance(progress.step, spec.steps, text, is_last or progress.is_done)
        progress.is_done = True
        self.save()

    def batch(
        self, examples: Sequence[Example], policy: Policy, augment: Augmentation, *key: object
    ) -> TrainingBatch:
        """Examples with their targets, changed as `key` draws."""
        windows, targets = [], []
        for example in examples:
            samples = example.samples()
            targets.append(self.teacher.target(example, samples))
            draw = rng("augment", example.clip.id, example.n_samples, *key)
            windows.append(window(samples, self.model.dims.n_mels, policy.fill, augment, draw))
        return TrainingBatch(windows, targets, policy)

    def train_step(self) -> dict[str, Any]:
        """Change the weights once; return what is recorded of the step."""
        spec, step = self.spec, self.progress.step
        begun = time.perf_counter()
        batches = [self._drawn(step * spec.accumulate + i) for i in range(spec.accumulate)]
        waited_s = time.perf_counter() - begun
        rate = self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.backward(batches)
        parameters = list(self.weights.parameters.values())
        norm = torch.nn.utils.clip_grad_norm_(parameters, spec.clip_norm)
        if not bool(norm.isfinite()):
            raise OptionError(
                f"gradients must be finite, got {norm} in step {step + 1}: a lower learning_rate?"
            )
        self.optimizer.step()
        return {
            "step": step + 1,
            "kind": "train",
            "policies": [str(batch.policy) for batch in batches],
            "loss": sum(getattr(spec.losses, name) * value for name, value in parts.items()),
            **parts,
            "norm": float(norm),
            "rate": rate,
            "waited_s": round(waited_s, 3),
            "seconds": round(time.perf_counter() - begun, 3),
        }

    def backward(self, batches: Sequence[TrainingBatch]) -> dict[str, float]:
        """Add the gradients of accumulated batches; return their mean losses by name."""
        spec = self.spec
        below = {
            name: max(sum(batch.denominators()[name] for batch in batches), 1e-9)
            for name in losses.NAMES
        }
        means = dict.fromkeys(losses.NAMES, 0.0)
        for batch in batches:
            with torch.enable_grad(), self.precision():
                sums = losses.sums(self.model, batch, spec.losses, self.bank)
            parts = [getattr(spec.losses, n) * value / below[n] for n, value in sums.items()]
            torch.stack(parts).sum().backward()
            for name, value in sums.items():
                means[name] += float(value.detach()) / below[name]
        return {name: value for name, value in means.items() if getattr(spec.losses, name)}

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Compute in bfloat16 where the spec and the processor say so."""
        device = self.model.device.type
        is_wanted = self.spec.precision == "bfloat16" or (
            self.spec.precision == "auto" and has_bfloat16(device)
        )
        with torch.autocast(device, torch.bfloat16, enabled=is_wanted):
            yield

    def _drawn(self, index: int) -> TrainingBatch:
        """The batch of that number: its clips, policy and augmentation follow from the seed."""
        spec = self.spec
        i = rng("policy", spec.seed, index).integers(len(spec.policies))
        policy = Policy.parse(spec.policies[i])
        return self.batch(self.batches[index], policy, spec.augment, spec.seed, index)

    def _learning_rate(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / max(self.spec.warmup, 1))
        return (
            self.spec.learning_rate * warmup * (1 + math.cos(math.pi * step / self.spec.steps)) / 2
        )

    def _validate(self) -> None:
        """Measure held-out clips; keep the weights if they are the best so far.

        The best are those with the fewest texts that do not end, then with the lowest loss. The
        loss alone would not do: texts are forced, so it hardly counts that one would not end.
        """
        progress = self.progress
        entries = self.validation.measure(self.model, progress.step, self.bank)
        progress.history += entries
        names = [str(Policy.parse(text)) for text in self.spec.policies]
        found = [entry for entry in entries if entry["policy"] in names]
        keys = ("n_endless", "loss")
        means = [sum(entry[key] for entry in found) / max(len(found), 1) for key in keys]
        if not found or not progress.best or means < progress.best:
            progress.best, progress.best_step, progress.n_worse = means, progress.step, 0
            about = asdict(self.spec) | {"step": progress.step}
            self.weights.save(self.folder / self.weights.file_name, about)
        else:
            progress.n_worse += 1
            progress.is_done = 0 < self.spec.patience <= progress.n_worse

    def save(self) -> None:
        """Write the checkpoint and the history."""
        content = {
            "identity": self.identity,
            "progress": asdict(self.progress),
            "parameters": {n: w.detach() for n, w in self.weights.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        with atomic_write(self.folder / CHECKPOINT, binary=True) as file:
            torch.save(content, file)
        about: dict[str, Any] = {"spec": asdict(self.spec), "progress": asdict(self.progress)}
        about["command"] = self.command
        about["identity"] = self.identity | {"n_clips": len(self.identity["clips"])}
        with atomic_write(self.folder / HISTORY) as file:
            json.dump(about, file, indent=1)

    def _resume(self) -> None:
        """Go on from the folder's checkpoint, if it has one."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        try:
            content = torch.load(path, map_location=self.model.device, weights_only=True)
            identity = content["identity"]
        except Exception as error:  # a damaged file can raise anything
            reason = one_line(error)[:200]
            raise OptionError(f"{path}: expected a checkpoint, got {reason}") from None
        for name, value in self.identity.items():
            if identity.get(name) != value:
                raise OptionError(
                    f"{self.folder}: holds a run with other {name}, expected the same run or an "
                    f"empty folder"
                )
        with torch.no_grad():
            for name, weight in self.weights.parameters.items():
                weight.copy_(content["parameters"][name])
        self.optimizer.load_state_dict(content["optimizer"])
        self.progress = Progress(**content["progress"])
        self.validation.latest = latest_validation(self.progress.history)


def latest_validation(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of the last validation in a history."""
    found = [entry for entry in history if entry["kind"] == "validation"]
    return [entry for entry in found if entry["step"] == found[-1]["step"]]


def has_bfloat16(device: str) -> bool:
    """Whether a device multiplies bfloat16 faster than float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported()
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # of newer PyTorch
    return device == "cpu" and is_supported is not None and bool(is_supported())


def _bank(model: Whisper, spec: TrainSpec) -> Bank | None:
    """The bank of virtual padding before training, if a policy needs one."""
    policies = [*map(Policy.parse, spec.policies), *spec.validation_policies]
    if not any(policy.kind == "virtual" for policy in policies):
        return None
    return Bank(model, {name: tensor.clone() for name, tensor in stored(model).items()})
