"""Stages: one window through both models, compared module by module.

Both have the same modules under the same names, so hooks on them see both forward passes, and
neither is written down a second time. A stage is what one module gives back: a weight that differs
shows first in its own module.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asrmask.audio import FRAMES_PER_POSITION, FRAMES_PER_SECOND, Features
from asrmask.encoding import encode, plan
from asrmask.model import Whisper
from asrmask.policy import N_POSITIONS, POSITIONS_PER_SECOND, Policy
from asrmask.tokenizer import get_tokenizer

TOLERANCE = 1e-4  # of the largest difference in a stage
HUGE = torch.finfo(torch.float32).max  # for what is no number
LEAVES = (nn.Linear, nn.Conv1d, nn.LayerNorm, nn.Embedding)
POSITIONS = {
    f"{part}.blocks.0.attn_ln": f"{part}.positional_embedding" for part in ("encoder", "decoder")
}
See = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Stage:
    """The largest difference of one stage: how large, and where."""

    name: str  # "log-Mel", a module's name, or "logits"
    difference: float
    tolerance: float
    where: str

    @property
    def is_equal(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def excess(self) -> float:
        """The difference in units of its tolerance."""
        return self.difference / self.tolerance

    @property
    def group(self) -> str:
        """The row of a table that it is part of: a layer, or what stands alone.

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
    """The stage that differs most of each group, in the order in which groups come."""
    found: dict[str, Stage] = {}
    for stage in stages:
        known = found.get(stage.group)
        if known is None or stage.excess > known.excess:
            found[stage.group] = stage
    return found


@contextmanager
def watched(model: nn.Module, see: See) -> Iterator[None]:
    """Within it, `see` gets the name and output of every module with weights that is called.

    Also the spectrogram that the encoder is given, and what enters the first layers, where position
    codes have been added. The tensors may be changed in place afterwards.
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
    """Every stage of one window, in order: spectrogram, encoder, cross keys and values, decoder.

    window:    ours, filled as the policy says
    their_mel: (n_mels, 3000), openai-whisper's
    tokens:    of the text that both decoders are told
    start:     the window's first frame in its recording

    Under a policy that hides padding, what is compared is the audio and its margin.
    """
    forced = torch.tensor([tokens], device=model.device)
    ours: dict[str, Tensor] = {}
    with watched(model, lambda name, x: ours.update({name: x.clone()})):
        memory = encode(model, [window], policy)
        x, _ = model.decoder(forced, memory, model.decoder.cache(*forced.shape))
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
    # upstream projects keys and values in the decoder, where they are first used
    return sorted(found, key=lambda stage: _order(stage.name))


def _order(name: str) -> int:
    if _is_memory(name):
        return 1
    return 0 if name.startswith(("log-Mel", "encoder.")) else 2


def tolerance(name: str, theirs: Tensor) -> float:
    """What a stage may differ by; inside the layers values grow large, and rounding with them."""
    if name in {"log-Mel", "encoder.ln_post", "logits"} or _is_memory(name):
        return TOLERANCE
    return TOLERANCE * max(1.0, float(theirs.float().square().mean().sqrt()))


@dataclass(frozen=True)
class Rows:
    """Which rows of a stage are compared.

    n_positions: how many positions, from the audio's first
    audio:       where that is in our window, in positions
    computed:    the first position that our encoder computes
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
        """What a row of a stage is, and how many there are in a second."""
        if name in {"log-Mel", "encoder.conv1"}:
            return "frame", FRAMES_PER_SECOND
        return "position", POSITIONS_PER_SECOND

    def both(self, name: str, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that are compared, (rows, channels) of each."""
        if name == "logits" or (name.startswith("decoder.") and not _is_memory(name)):
            return ours[0], theirs[0]
        each = FRAMES_PER_POSITION if self.unit(name)[0] == "frame" else 1
        is_conv = name in {"log-Mel", "encoder.conv1", "encoder.conv2"}
        before = self.computed
        if is_conv:  # channels first; and they begin a position earlier, beyond the cut
            ours, theirs = ours.transpose(1, 2), theirs.transpose(1, 2)
            before = 0 if name == "log-Mel" else max(self.computed - 1, 0)
        first, n = each * (self.audio - before), each * self.n_positions
        return ours[0, first : first + n], theirs[0, :n]
