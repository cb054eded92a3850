"""Compare asrmask with openai-whisper on one window, stage by stage.

A stage is the output of one module. Both models have the same modules under the same names, so
forward hooks capture both passes without reimplementing either. A weight that differs shows first
in its own module.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asrmask.audio.constants import FRAMES_PER_POSITION, N_POSITIONS, POSITIONS_PER_SECOND
from asrmask.audio.spectrogram import Features
from asrmask.model.encoding import encode, plan
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import get_tokenizer

Record = dict[str, Any]  # JSON data

TOLERANCE = 1e-4  # for the largest difference in a stage
HUGE = torch.finfo(torch.float32).max  # replaces NaN and infinity
LEAVES = (nn.Linear, nn.Conv1d, nn.LayerNorm, nn.Embedding)
ROWS_PER_POSITION = {"log-Mel": FRAMES_PER_POSITION, "encoder.conv1": FRAMES_PER_POSITION}
INPUT_STAGES = {  # modules whose input is a stage too
    "encoder.conv1": "log-Mel",
    "encoder.blocks.0.attn_ln": "encoder.positional_embedding",
    "decoder.blocks.0.attn_ln": "decoder.positional_embedding",
}


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
    def group(self) -> str:
        """The table row of the stage: its layer, or itself if it is in none.

        >>> Stage("encoder.blocks.2.attn.query", 0.0, 1e-4, "").group
        'encoder.blocks.2'
        >>> Stage("decoder.blocks.0.cross_attn.key", 0.0, 1e-4, "").group
        'decoder.blocks.0 cross keys'
        """
        parts = self.name.split(".")
        if _is_cross(self.name):
            return f"{'.'.join(parts[:3])} cross {parts[-1]}s"
        return ".".join(parts[:3]) if parts[1:2] == ["blocks"] else self.name

    def as_dict(self) -> Record:
        return {**asdict(self), "equal": self.is_equal, "group": self.group}

    def __str__(self) -> str:
        return f"{self.name}, {self.where}: {self.difference:.1e} (tolerance {self.tolerance:.1e})"


def _is_cross(name: str) -> bool:
    """Whether a stage is the keys or values of cross-attention: its rows are audio positions."""
    return name.endswith((".cross_attn.key", ".cross_attn.value"))


def _is_text(name: str) -> bool:
    """Whether the rows of a stage are tokens."""
    return name == "logits" or (name.startswith("decoder.") and not _is_cross(name))


def excess(stage: Record) -> float:
    """Return the difference of a stage in units of its tolerance."""
    return stage["difference"] / stage["tolerance"]


def worst_by_group(stages: Iterable[Record]) -> list[Record]:
    """Return the stage with the largest excess of each group, in the order of the groups."""
    worst: dict[str, Record] = {}
    for stage in stages:
        if excess(stage) > excess(worst.setdefault(stage["group"], stage)):
            worst[stage["group"]] = stage
    return list(worst.values())


@contextmanager
def hook_outputs(model: nn.Module, callback: Callable[[str, Tensor], None]) -> Iterator[None]:
    """While active, call `callback` with the name and output of every module with weights.

    It also gets the inputs of INPUT_STAGES. The tensors may later be changed in place.
    """

    def hook(name: str, _: nn.Module, inputs: Any, output: Tensor) -> None:
        if name in INPUT_STAGES:
            callback(INPUT_STAGES[name], inputs[0])
        callback(name, output)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, LEAVES):
                hooks.enter_context(module.register_forward_hook(partial(hook, name)))
        yield


@torch.inference_mode()
def compare(
    model: Whisper,
    other: Any,
    window: Features,
    their_mel: Tensor,
    tokens: list[int],
    *,
    policy: Policy,
    start_s: float = 0.0,
) -> list[Stage]:
    """Compare every stage of one window: spectrogram, encoder, cross keys and values, decoder.

    window:    asrmask's, padded with the policy's fill
    their_mel: (n_mels, 3000), openai-whisper's
    tokens:    text that both decoders are given (teacher forcing)

    Under a policy that hides padding, only the audio and its margin are compared.
    """
    forced = torch.tensor([tokens], device=model.device)
    ours: dict[str, Tensor] = {}
    # of several outputs of a module the last: those before are of a bank or of a sink
    with hook_outputs(model, lambda name, x: ours.update({name: x.clone()})):
        encoded = encode(model, [window], policy)
        x, _ = model.decoder(forced, encoded, model.decoder.cache(*forced.shape))
    ours["logits"] = model.decoder.logits(x)

    select_rows = _row_selector(policy, window)
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    stages: list[Stage] = []

    def add_stage(name: str, theirs: Tensor) -> None:
        a, b = select_rows(name, ours.pop(name), theirs)
        if torch.equal(a, b):  # the usual case, quickly
            stages.append(Stage(name, 0.0, _tolerance(name, b), ""))
            return
        gaps = (a.float() - b.float()).abs().nan_to_num(nan=HUGE, posinf=HUGE)
        difference, index = gaps.flatten().max(dim=0)
        row, channel = divmod(int(index), gaps.shape[1])
        if name == "logits":
            where = f"token {row}, logit of {tokenizer.decode_with_timestamps([channel])!r}"
        elif _is_text(name):
            where = f"token {row} ({tokenizer.decode_with_timestamps([tokens[row]])!r})"
        else:
            unit = "frame" if name in ROWS_PER_POSITION else "position"
            row_s = row / (POSITIONS_PER_SECOND * ROWS_PER_POSITION.get(name, 1))
            where = f"{unit} {row} ({start_s + row_s:.2f} s)"
        stages.append(Stage(name, float(difference), _tolerance(name, b), where))

    with hook_outputs(other, add_stage):
        features = other.encoder(their_mel[None].to(other.device))
        logits = other.decoder(forced, features)
    add_stage("logits", logits)
    # upstream computes cross keys and values in the decoder, at first use
    return sorted(stages, key=lambda stage: (_is_text(stage.name), _is_cross(stage.name)))


def _tolerance(name: str, theirs: Tensor) -> float:
    """Return the tolerance of a stage; inside layers it grows with the size of the values."""
    if name in {"log-Mel", "encoder.ln_post", "logits"} or _is_cross(name):
        return TOLERANCE
    root_mean_square = theirs.float().norm() / theirs.numel() ** 0.5
    return TOLERANCE * max(1.0, float(root_mean_square))


def _row_selector(
    policy: Policy, window: Features
) -> Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function that selects the rows of a stage to compare: (rows, channels) of each."""
    visible = policy.visible(window.n_positions)
    planned = plan(policy, [visible])
    audio = 0 if planned.first is None else int(planned.first[0])  # its first position, in ours
    computed = planned.positions[0]  # first position that asrmask's encoder computes
    n_positions = N_POSITIONS if policy.kind == "full" and audio == 0 else visible

    def select(name: str, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        if _is_text(name):
            return ours[0], theirs[0]
        first = audio - computed
        if name in {"log-Mel", "encoder.conv1", "encoder.conv2"}:  # (B, channels, rows)
            ours, theirs = ours.transpose(1, 2), theirs.transpose(1, 2)
            first = audio - max(computed - 1, 0)  # one position earlier, for context
        scale = ROWS_PER_POSITION.get(name, 1)
        return ours[0, scale * first :][: scale * n_positions], theirs[0, : scale * n_positions]

    return select
