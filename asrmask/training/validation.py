"""Held-out clips during training: losses and word error rate under each policy."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.evaluation.score import errors, total
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import Bank
from asrmask.model.whisper import Whisper
from asrmask.systems.upstream import normalizer
from asrmask.tokenizer.tokenizer import get_tokenizer
from asrmask.training import losses
from asrmask.training.examples import Example
from asrmask.training.losses import TrainingBatch
from asrmask.training.spec import Augmentation, TrainSpec

PLAIN = Augmentation()


class Validation:
    """Held-out clips, whole and unchanged.

    Texts are compared with the transcripts, or where there are none, with what the padded model
    wrote before training.
    """

    def __init__(
        self, spec: TrainSpec, examples: Sequence[Example], make_batch: Callable[..., TrainingBatch]
    ):
        self.spec, self.examples, self.make_batch = spec, examples, make_batch
        self.latest: list[dict[str, Any]] = []

    @cached_property
    def _groups(self) -> list[Sequence[Example]]:
        """Batches of one language each."""
        size = self.spec.batch_size
        languages = dict.fromkeys(example.clip.language for example in self.examples)
        alike = [[e for e in self.examples if e.clip.language == code] for code in languages]
        return [group[i : i + size] for group in alike for i in range(0, len(group), size)]

    @torch.inference_mode()
    def measure(self, model: Whisper, step: int, bank: Bank | None) -> list[dict[str, Any]]:
        """An entry of the history for each policy."""
        policies = self.spec.validation_policies if self.examples else []
        self.latest = [self._measure(model, step, policy, bank) for policy in policies]
        return self.latest

    def _measure(
        self, model: Whisper, step: int, policy: Policy, bank: Bank | None
    ) -> dict[str, Any]:
        sums = dict.fromkeys(losses.NAMES, 0.0)
        below = dict.fromkeys(losses.NAMES, 1e-9)
        found, n_endless = [], 0
        for group in self._groups:
            batch = self.make_batch(group, policy, PLAIN)
            for name, value in losses.sums(model, batch, self.spec.losses, bank).items():
                sums[name] += float(value)
                below[name] += batch.denominators()[name]
            language = group[0].clip.language
            options = DecodingOptions(language=language, without_timestamps=True)
            encoded = encode(model, batch.windows, policy, bank=bank)
            results = decode_encoded(model, encoded, options)
            n_endless += sum(not result.ended for result in results)
            normal = normalizer(language)
            expected = self._texts(model, group, batch)
            for text, result in zip(expected, results, strict=True):
                found.append(errors(normal(text), normal(result.text)))
        used = [name for name in losses.NAMES if getattr(self.spec.losses, name)]
        means = {name: sums[name] / below[name] for name in used}
        return {
            "step": step,
            "kind": "validation",
            "policy": str(policy),
            "loss": sum(getattr(self.spec.losses, name) * means[name] for name in used),
            **means,
            "wer": total(found).wer,
            "n_endless": n_endless,
        }

    def _texts(self, model: Whisper, group: Sequence[Example], batch: TrainingBatch) -> list[str]:
        tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
        written = [target.tokens[target.n_prompt :].tolist() for target in batch.targets]
        plain = [tokenizer.decode(t for t in tokens if t < tokenizer.eot) for tokens in written]
        return [e.clip.text or text for e, text in zip(group, plain, strict=True)]

    def summary(self) -> str:
        """The latest word error rates, in words."""
        rates = [f"{100 * entry['wer']:.1f} % {entry['policy']}" for entry in self.latest]
        return f"WER {', '.join(rates)}" if rates else "nothing held out"
