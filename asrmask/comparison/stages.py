"""Compare asrmask with openai-whisper on one window, stage by stage.

A stage is the output of one module. Both models have the same modules under the same names, so
forward hooks capture both passes without reimplementing either. A weight that differs shows first
in its own module.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asrmask.audio.constants import (
    FRAMES_PER_POSITION,
    FRAMES_PER_SECOND,
    N_POSITIONS,
    POSITIONS_PER_SECOND,
)
from asrmask.audio.spectrogram import Features
from asrmask.model.encoding import encode, plan
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import get_tokenizer

TOLERANCE = 1e-4  # for the largest difference in a stage
HUGE = torch.finfo(torch.float32).max  # replaces NaN and infinity
LEAVES = (nn.Linear, nn.Conv1d, nn.LayerNorm, nn.Embedding)
POSITIONS = {
    f"{part}.blocks.0.attn_ln": f"{part}.positional_embedding" for part in ("encoder", "decoder")
}
See = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Stage:
    """The largest difference in one stage, and where it is."""

    name: str  # "log-Mel", a module's name, or "logits"
    difference: float
    tolerance: float
    where: str

    @property
    def is_equal(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def excess(self) -> float:
        """The difference in units of the tolerance."""
        return self.difference / self.tolerance

    @property
    def group(self) -> str:
        """The table row of the stage: its layer, or itself if it is in none.

        >>> Stage("encoder.blocks.2.attn.query", 0.0, 1e-4, "").group
        'encoder.blocks.2'
        >>> Stage("decoder.blocks.0.cross_attn.key", 0.0, 1e-4, "").group
        'decoder.blocks.0 cross keys'
        """
        parts = self.name.split(".")
        if _is_memory(self.name):
            return f"{'.'.join(parts[:3])} cross {parts[-1]}s"
        return ".".join(parts[:3]) if parts[1:2] == ["blocks"] else self.name

    def __str__(self) -> str:
        return f"{self.name}, {self.where}: {self.difference:.1e} (tolerance {self.tolerance:.1e})"


def _is_memory(name: str) -> bool:
    return name.endswith((".cross_attn.key", ".cross_attn.value"))


def worst(stages: Iterable[Stage]) -> dict[str, Stage]:
    """Return the stage with the largest excess of each group, in the order of the groups."""
    found: dict[str, Stage] = {}
    for stage in stages:
        known = found.get(stage.group)
        if known is None or stage.excess > known.excess:
            found[stage.group] = stage
    return found


@contextmanager
def watched(model: nn.Module, see: See) -> Iterator[None]:
    """While active, call `see` with the name and output of every module with weights.

    `see` also gets the encoder's input spectrogram, and the input of the first layers, after the
    positional embedding is added. The tensors may later be changed in place.
    """

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def call(_: nn.Module, inputs: Any, output: Tensor) -> None:
            if name in POSITIONS:
                see(POSITIONS[name], inputs[0])
            see(name, output)

        return call

    encoder = model.get_submodule("encoder")
    handles = [encoder.register_forward_pre_hook(lambda _, inputs: see("log-Mel", inputs[0]))]
    for name, module in model.named_modules():
        if isinstance(module, LEAVES):
            handles.append(module.register_forward_hook(hook(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def compare(
    model: Whisper,
    other: Any,
    window: Features,
    their_mel: Tensor,
    tokens: list[int],
    *,
    policy: Policy,
    start: int = 0,
) -> list[Stage]:
    """Compare every stage of one window: spectrogram, encoder, cross keys and values, decoder.

    window:    asrmask's, padded with the policy's fill
    their_mel: (n_mels, 3000), openai-whisper's
    tokens:    text that both decoders are given (teacher forcing)
    start:     first frame of the window in its recording

    Under a policy that hides padding, only the audio and its margin are compared.
    """
    forced = torch.tensor([tokens], device=model.device)
    ours: dict[str, Tensor] = {}
    with watched(model, lambda name, x: ours.update({name: x.clone()})):
        encoded = encode(model, [window], policy)
        x, _ = model.decoder(forced, encoded, model.decoder.cache(*forced.shape))
    ours["logits"] = model.decoder.logits(x)

    rows = Rows.of(policy, window)
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    found: list[Stage] = []

    def see(name: str, theirs: Tensor) -> None:
        a, b = rows.both(name, ours.pop(name), theirs)
        gaps = (a.float() - b.float()).abs().nan_to_num(nan=HUGE, posinf=HUGE)
        difference, index = gaps.flatten().max(dim=0)
        place, channel = divmod(int(index), gaps.shape[1])
        if name.startswith("decoder.") and not _is_memory(name):
            where = f"token {place} ({tokenizer.decode_with_timestamps([tokens[place]])!r})"
        elif name == "logits":
            where = f"token {place}, logit of {tokenizer.decode_with_timestamps([channel])!r}"
        else:
            unit, rate = rows.unit(name)
            where = f"{unit} {place} ({start / FRAMES_PER_SECOND + place / rate:.2f} s)"
        found.append(
            Stage(name, float(difference), tolerance(name, b), where if difference else "")
        )

    with watched(other, see):
        features = other.encoder(their_mel[None].to(other.device))
        logits = other.decoder(forced, features)
    see("logits", logits)
    # upstream computes cross keys and values in the decoder, at first use
    return sorted(found, key=lambda stage: _order(stage.name))


def _order(name: str) -> int:
    if _is_memory(name):
        return 1
    return 0 if name.startswith(("log-Mel", "encoder.")) else 2


def tolerance(name: str, theirs: Tensor) -> float:
    """Return the tolerance of a stage; inside layers it grows with the size of the values."""
    if name in {"log-Mel", "encoder.ln_post", "logits"} or _is_memory(name):
        return TOLERANCE
    return TOLERANCE * max(1.0, float(theirs.float().square().mean().sqrt()))


@dataclass(frozen=True)
class Rows:
    """The rows of a stage that are compared.

    n_positions: positions to compare, from the first of the audio
    audio:       where the audio starts in asrmask's window, in positions
    computed:    first position that asrmask's encoder computes
    """

    n_positions: int
    audio: int
    computed: int

    @classmethod
    def of(cls, policy: Policy, window: Features) -> "Rows":
        visible = policy.visible(window.n_positions)
        planned = plan(policy, [visible])
        audio = 0 if planned.first is None else int(planned.first[0])
        whole = policy.kind == "full" and audio == 0
        return cls(N_POSITIONS if whole else visible, audio, planned.positions[0])

    def unit(self, name: str) -> tuple[str, int]:
        """Return what a row of a stage is, and the number of rows per second."""
        if name in {"log-Mel", "encoder.conv1"}:
            return "frame", FRAMES_PER_SECOND
        return "position", POSITIONS_PER_SECOND

    def both(self, name: str, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Select the rows to compare: (rows, channels) of each."""
        if name == "logits" or (name.startswith("decoder.") and not _is_memory(name)):
            return ours[0], theirs[0]
        each = FRAMES_PER_POSITION if self.unit(name)[0] == "frame" else 1
        is_conv = name in {"log-Mel", "encoder.conv1", "encoder.conv2"}
        before = self.computed
        if is_conv:  # channels first; convolutions start one position earlier, for context
            ours, theirs = ours.transpose(1, 2), theirs.transpose(1, 2)
            before = 0 if name == "log-Mel" else max(self.computed - 1, 0)
        first, n = each * (self.audio - before), each * self.n_positions
        return ours[0, first : first + n], theirs[0, :n]
