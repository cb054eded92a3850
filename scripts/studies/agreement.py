"""How near to `full` policies and banks of cross-attention come, on speech without transcripts."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from studies.policies import ClipSet
from torch import Tensor

from asrmask.audio.spectrogram import Features
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.decoding.quality import runaway_reason, stops_early
from asrmask.decoding.task import decode_encoded
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import Errors, errors, total
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import FULL, encode, plan
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import Bank, Design, Layout, VirtualPadding, stored
from asrmask.model.whisper import Whisper
from asrmask.reporting.tables import markdown
from asrmask.systems.upstream import normalizer

TRIMMED = ("trim,margin=1.28,sink=0.5", "trim,margin=0.64,sink=0.5")
BANKS = {  # what cross-attention sees of the bank; the encoder's part is that of `virtual`
    "virtual": Design(),
    "virtual, cross: one in 32, last 25": Design(stride=32),
    "virtual, cross: last 25": None,
}
COLUMNS = (
    *("policy", "same texts", "words that differ %", "no end", "decoded again", "then differ %"),
    *("computed", "encoder's keys", "cross keys", "encoder ms"),
)


@dataclass(frozen=True)
class Read:
    """One clip under one policy."""

    result: DecodingResult
    is_wrong: bool  # as the fallback judges it: it would be decoded again under `full`
    encoder_s: float
    sizes: tuple[int, int, int]  # computed positions, keys of the encoder, keys of cross-attention


class Reader:
    """A model and its bank, which read clips under policies and with other banks."""

    def __init__(self, model: Whisper):
        self.model = model
        kept = stored(model)
        designs = {Design(), *filter(None, BANKS.values())}
        self.banks = {design: Bank(model, kept, design) for design in designs}
        self.options = DecodingOptions(without_timestamps=True, language="en")

    def read(self, name: str, window: Features) -> Read:
        policy = Policy("virtual") if name in BANKS else Policy.parse(name)
        planned = plan(policy, [policy.visible(window.n_positions)])
        begun = time.perf_counter()
        encoded = encode(self.model, [window], policy, bank=self.banks[Design()])
        encoder_s = time.perf_counter() - begun
        if planned.virtual is not None:
            encoded = self.with_bank(encoded.features, BANKS[name])
        n = planned.n_computed
        n_keys = n if planned.virtual is None else planned.virtual.mask.shape[-1]
        n_cross = encoded.layers[0][0].keys.shape[2]
        (result,) = decode_encoded(self.model, encoded, self.options)
        wrong = runaway_reason(result, window.n_positions) or stops_early(result.text, window)
        is_wrong = policy.kind != "full" and bool(wrong)
        return Read(result, is_wrong, encoder_s, (n, n_keys, n_cross))

    @torch.inference_mode()
    def with_bank(self, features: Tensor, design: Design | None) -> CrossAttentionCache:
        """Features (1, n_own, D) and a bank of that design; None: its last positions alone."""
        n_own = features.shape[1]
        used = design or Design()
        layout = Layout(torch.tensor([n_own]), used)
        joined = VirtualPadding(self.banks[used], layout).extend_features(features)
        shown = torch.ones(joined.shape[1], dtype=torch.bool)
        shown[n_own : len(shown) - used.n_tail] = design is not None
        mask = layout.cross_mask[..., shown]
        return self.model.decoder.cross_attention_cache(joined[:, shown], mask)


def compare(model: Whisper, clips: Sequence[Clip], names: Sequence[str]) -> None:
    """Print how far the texts of each policy are from those with `full`; clips are read in turn."""
    reader = Reader(model)
    windows = ClipSet(model, clips, reader.options).windows(FULL)
    names = ["full", *BANKS, *names]
    rows = [[reader.read(name, window) for name in names] for window in windows]
    by_name = dict(zip(names, zip(*rows, strict=True), strict=True))
    lines = list(map(partial(_line, by_name["full"]), by_name.items()))
    print(f"\n### {len(windows)} clips\n\n{markdown(COLUMNS, lines)}", flush=True)


def _line(full: Sequence[Read], named: tuple[str, Sequence[Read]]) -> list[object]:
    name, found = named
    kept = [a if b.is_wrong else b for a, b in zip(full, found, strict=True)]
    bare, safe = (f"{100 * total(_differences(full, x)).wer:.2f}" for x in (found, kept))
    n_same = sum(a.result.tokens == b.result.tokens for a, b in zip(full, found, strict=True))
    sizes = (sum(sizes) / len(found) for sizes in zip(*(f.sizes for f in found), strict=True))
    return [
        *(name, n_same, bare, sum(not f.result.ended for f in found)),
        *(sum(f.is_wrong for f in found), safe),
        *(f"{size:.0f}" for size in sizes),
        f"{1000 * statistics.median(f.encoder_s for f in found):.0f}",
    ]


def _differences(full: Sequence[Read], found: Sequence[Read]) -> Iterator[Errors]:
    normal = normalizer("en")
    for a, b in zip(full, found, strict=True):
        yield errors(normal(a.result.text), normal(b.result.text))
