"""Virtual padding whose bank is trained: keys, values, features and log-counts, by distillation.

The model is frozen. Trained and compared on clips of librispeech-train-unlabelled: those that are
compared are not trained on.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from studies.policies import ClipSet
from studies.training import N_CLIPS, TRAINED_ON, clips_of
from torch import Tensor

from asrmask.checkpoints import load_model
from asrmask.console import progress
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import Errors, difference_interval, total
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import Bank, Design, stored
from asrmask.model.whisper import Whisper, sha256_of_weights
from asrmask.reporting.tables import markdown
from asrmask.training import losses
from asrmask.training.augment import window
from asrmask.training.examples import Batches, Example, rng, usable, versions_of
from asrmask.training.losses import Batch
from asrmask.training.spec import Augmentation, LossWeights, TrainSpec
from asrmask.training.teacher import Teacher

VIRTUAL = Policy("virtual")
PLAIN = Augmentation()
SPEC = TrainSpec(batch_size=6, steps=150, learning_rate=3e-3, augment=Augmentation(cuts=1))
WEIGHTS = LossWeights(features=1, logits=1)
ENGLISH = ("librispeech-test-other", "ljspeech", "spoken-digits", "fleurs-en")
N_COMPARED = 40  # clips, whole and cut


class LearnedBank(Bank):
    """A bank that begins as today's, with parameters that are trained."""

    def __init__(self, bank: Bank):
        self.design = bank.design
        self.groups = [tuple(x.clone() for x in pair) for pair in bank.groups]
        self.cross = bank.cross.clone()
        self.biases = [keys.new_zeros(keys.shape[1]) for keys, _ in self.groups]
        self.cross_bias = self.cross.new_zeros(len(self.cross))

    def parameters(self) -> list[Tensor]:
        pairs = [x for pair in self.groups for x in pair]
        return [*pairs, self.cross, *self.biases, self.cross_bias]


def todays(model: Whisper, stride: int = 16) -> Bank:
    content = {name: tensor.clone() for name, tensor in stored(model).items()}
    return Bank(model, content, Design(stride=stride))


def batch_of(teacher: Teacher, examples: Sequence[Example]) -> Batch:
    """Examples with their targets, unchanged."""
    samples = [example.samples() for example in examples]
    pairs = list(zip(examples, samples, strict=True))
    return Batch(
        [window(s, teacher.model.dims.n_mels, "zero", PLAIN, rng()) for s in samples],
        [teacher.target(example, s) for example, s in pairs],
        VIRTUAL,
    )


def train(
    model: Whisper,
    teacher: Teacher,
    clips: Sequence[Clip],
    durations_s: Mapping[str, float],
    bank: Bank,
) -> Bank:
    """Train a bank on clips, whole and cut."""
    learned = LearnedBank(bank)
    scale = [float(p.abs().mean()) or 1.0 for p in learned.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p.requires_grad_(True)], "lr": SPEC.learning_rate * s}
            for p, s in zip(learned.parameters(), scale, strict=True)
        ],
        weight_decay=0.0,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    versions = [versions_of(c, durations_s[c.id], SPEC.augment.cuts) for c in clips]
    batches = Batches(versions, SPEC.batch_size, SPEC.seed)
    with progress(f"a bank, one key for {bank.design.stride} positions", True) as advance:
        for step in range(SPEC.steps):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / SPEC.steps)
            batch = batch_of(teacher, batches[step])
            below = batch.denominators()
            optimizer.zero_grad(set_to_none=True)
            sums = losses.sums(model, batch, WEIGHTS, learned)
            loss = sum(value / below[name] for name, value in sums.items())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
            optimizer.step()
            advance(step + 1, SPEC.steps, f"step {step + 1}: loss {float(loss):.5f}")
    for parameter in learned.parameters():
        parameter.requires_grad_(False)
    return learned


@torch.inference_mode()
def distances(
    model: Whisper, teacher: Teacher, examples: Sequence[Example], bank: Bank
) -> list[object]:
    """How far a bank is from full padding: features, divergence, and equal texts."""
    sums, below, n_same = dict.fromkeys(losses.NAMES, 0.0), dict.fromkeys(losses.NAMES, 0.0), 0
    for example in examples:
        batch = batch_of(teacher, [example])
        for name, value in losses.sums(model, batch, WEIGHTS, bank).items():
            sums[name] += float(value)
            below[name] += batch.denominators()[name]
        (target,) = batch.targets
        is_timed = target.n_prompt == 1  # in English models
        options = DecodingOptions(without_timestamps=not is_timed)
        encoded = encode(model, batch.windows, VIRTUAL, bank=bank)
        (result,) = decode_encoded(model, encoded, options)
        n_same += result.tokens == target.tokens[target.n_prompt : -1].tolist()
    error = (sums["features"] / below["features"]) ** 0.5
    divergence = sums["logits"] / below["logits"]
    return [f"{error:.4f}", f"{divergence:.5f}", f"{n_same} of {len(examples)}"]


def word_errors(model: Whisper, clips: ClipSet, bank: Bank | None) -> list[Errors]:
    """Errors of each clip at temperature 0, without fallback; bank: None: full padding."""
    policy = Policy() if bank is None else VIRTUAL
    return [found.errors for found in clips.run(policy, bank)]


def compare(data: Path, targets: Path) -> None:
    """Train a bank, and print how it compares with today's and with full padding."""
    model = load_model("tiny.en", device="cpu")
    sha256 = sha256_of_weights(model.state_dict())
    clips, durations_s, _ = usable(data / TRAINED_ON, SPEC)
    teacher = Teacher(model, sha256, SPEC, targets)
    banks = {"today's": todays(model)}
    begun = time.perf_counter()
    banks["learned"] = train(model, teacher, clips[:N_CLIPS], durations_s, todays(model))
    minutes = (time.perf_counter() - begun) / 60
    others = clips[N_CLIPS:][:N_COMPARED]
    versions = [versions_of(clip, durations_s[clip.id], 1) for clip in others]
    lines = []
    for name, bank in banks.items():
        for kind, i in (("whole", 0), ("cut", 1)):
            examples = [version[i] for version in versions]
            lines.append([name, kind, *distances(model, teacher, examples, bank)])
    columns = ("bank", "clips", "error of features", "divergence, nats", "same tokens")
    print(f"\n### {len(others)} clips that were not trained on, beside full\n")
    print(f"{SPEC.steps} steps of {SPEC.batch_size} clips, {minutes:.1f} minutes\n")
    print(markdown(columns, lines), flush=True)
    print_word_errors(model, data, banks)


def print_word_errors(model: Whisper, data: Path, banks: Mapping[str, Bank]) -> None:
    """Word error rates of all English sets together, beside full padding."""
    options = DecodingOptions(without_timestamps=True, language="en")
    sets = {name: ClipSet(model, clips_of(data, name), options) for name in ENGLISH}
    full = {name: word_errors(model, clips, None) for name, clips in sets.items()}
    blocks = [block for clips in sets.values() for block in clips.blocks]
    lines = []
    for bank_name, bank in banks.items():
        found = {name: word_errors(model, clips, bank) for name, clips in sets.items()}
        ours, theirs = ([e for name in sets for e in part[name]] for part in (found, full))
        low, high = (100 * x for x in difference_interval(ours, theirs, blocks))
        change = 100 * (total(ours).wer - total(theirs).wer)
        each = [f"{100 * total(found[name]).wer:.2f}" for name in sets]
        interval = f"{change:+.2f} ({low:+.2f} … {high:+.2f})"
        lines.append([bank_name, *each, f"{100 * total(ours).wer:.2f}", interval])
    each = [f"{100 * total(full[name]).wer:.2f}" for name in sets]
    every = total(e for errors in full.values() for e in errors)
    lines.append(["full padding", *each, f"{100 * every.wer:.2f}", ""])
    columns = ("bank", *sets, "all", "difference to full, 95 % interval")
    print("\n### WER %, temperature 0, no fallback\n")
    print(markdown(columns, lines))
