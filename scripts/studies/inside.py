"""What padding does inside a model, over many clips: which heads look at it, and what follows.

Each clip is one window, decoded greedily under `full` without timestamps. That text is then given
(teacher forcing) under every policy, so every change comes from the policy. Intervals are 95 %,
Student's t over clips, each clip of equal weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asrmask.audio.constants import N_POSITIONS, POSITIONS_PER_SECOND
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.evaluation.corpus import Clip
from asrmask.inspection.key_labels import KeyLabels, Spans, encoder_key_labels, find_speech
from asrmask.inspection.measure import ForcedText, Measurement, encoder_meter, measure_decoder
from asrmask.inspection.online import Moments, Tally, accumulate
from asrmask.inspection.quantities import KINDS, expected
from asrmask.inspection.recording import combine_recorders
from asrmask.model.encoding import FULL, encode, plan
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.reporting.tables import Table, markdown
from asrmask.tokenizer.tokenizer import get_tokenizer

HIDING = ("full,fill=silence", "mask:encoder", "mask:cross", "mask:both")
N_MOST = 6  # heads in a table
REGIONS = ("padding's first second", "window's last second", "rest of the padding", "the audio")
PARTS = {
    "all of the clip": slice(None),
    "its last second": slice(-POSITIONS_PER_SECOND, None),
    "what is before": slice(None, -POSITIONS_PER_SECOND),
}


def regions(labels: KeyLabels) -> Tensor:
    """Each key's region, as ones and zeros, (K, REGIONS); rows add up to 1. Of one clip."""
    padding = labels.padding[0]
    places = torch.arange(len(padding), device=padding.device)
    first = places[padding].min() if padding.any() else len(padding)
    late = padding & (places >= len(padding) - POSITIONS_PER_SECOND)
    early = padding & ~late & (places < first + POSITIONS_PER_SECOND)
    return torch.stack([early, late, padding & ~late & ~early, labels.audio[0]], dim=-1).float()


@dataclass
class Findings:
    """Means over clips.

    heads:  of every head, under `full`
    values: name → statistics of one number a clip
    pairs:  of each clip: the end token's logit from padding, and what the logit loses under
            mask:cross
    """

    heads: Tally
    values: dict[str, Moments] = field(default_factory=dict)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    table: Table = field(default_factory=lambda: Table({"clip": str, "name": str, "value": float}))
    n_clips: int = 0

    def add(self, clip: str, name: str, value: float) -> None:
        accumulate(self.values, {name: np.array([value])})
        self.table.add(clip=clip, name=name, value=round(float(value), 6))

    def told(self, name: str, form: str = "{:.3f}") -> str:
        """A number's mean and interval."""
        if name not in self.values or not self.values[name].n:
            return "no data"
        moments = self.values[name]
        parts = [form.format(float(x)) for x in (moments.means(), *moments.interval())]
        return f"{parts[0]} ({parts[1]} … {parts[2]})"


def run(model: Whisper, clips: Sequence[Clip], told: Callable[[str], None]) -> Findings:
    """Measure every clip under every policy."""
    found = Findings(Tally(expected(model.dims)))
    for i, clip in enumerate(clips, start=1):
        spectrogram = Spectrogram(clip.recording(), model.dims.n_mels)
        window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
        text = _decoded(model, window)
        full = _measured(model, window, text, find_speech(clip.recording()), clip.id, found)
        own = encode(model, [window]).features[0, : window.n_positions]
        for name in HIDING:
            fill = Policy.parse(name).fill
            filled = spectrogram.window(0, spectrogram.n_frames, fill=fill)
            _compare(model, filled, name, text, own, full, clip.id, found)
        found.n_clips += 1
        told(f"{i} of {len(clips)} clips")
    return found


def _decoded(model: Whisper, window: Features) -> ForcedText:
    """The text of a window under `full`."""
    options = DecodingOptions(language="en", without_timestamps=True)
    (result,) = decode_encoded(model, encode(model, [window]), options)
    tokenizer = get_tokenizer(
        model.is_multilingual, num_languages=model.num_languages, language="en"
    )
    return ForcedText.untimed(tokenizer, result.tokens)


def _measured(
    model: Whisper, window: Features, text: ForcedText, speech: Spans, clip: str, found: Findings
) -> Measurement:
    """A clip with all of its padding: every head, and where in the window attention goes."""
    n = window.n_positions
    labels = encoder_key_labels(plan(FULL, [n]), n, speech)
    split = regions(labels)
    masses: list[Tensor] = []  # of each layer, (REGIONS,)

    def weigh(place: str, quantity: str, tensor: Tensor) -> None:
        if quantity == "weights":
            masses.append((tensor[0, :, :n] @ split).mean(dim=(0, 1)))

    meter = encoder_meter(model, labels)
    encoded = encode(model, [window], FULL, combine_recorders(meter, weigh))
    full = measure_decoder(model, encoded, n, text, speech, meter, keep_weights=True)
    found.heads.add(full.values)
    cross = [torch.from_numpy(w).float() @ regions(full.cross_keys) for w in full.weights.values()]
    shares_of = {
        "positions": split.mean(dim=0),
        "encoder.self": torch.stack(masses).mean(dim=0),
        "decoder.cross": torch.stack([w.mean(dim=(0, 1)) for w in cross]).mean(dim=0),
        "decoder.cross, end": torch.stack([w[:, -1].mean(dim=0) for w in cross]).mean(dim=0),
        "decoder.cross, text": torch.stack([w[:, :-1].mean(dim=(0, 1)) for w in cross]).mean(dim=0),
    }
    for kind, shares in shares_of.items():
        for name, share in zip(REGIONS, shares.tolist(), strict=True):
            found.add(clip, f"{kind}: {name}", share)
        padding = n / N_POSITIONS if kind == "positions" else float(shares[-1])
        found.add(clip, f"{kind}: padding", 1 - padding)
    for i in range(model.dims.n_audio_layer):
        place = f"encoder.{i}.self"
        late = full.profiles[place][0, :n][-POSITIONS_PER_SECOND:]
        found.add(clip, f"{place}: padding", float(full.values[place, "padding"].mean()))
        found.add(clip, f"{place}: padding, last second", float(late.mean()))
    found.add(clip, "full: end logit", full.end_logit)
    found.add(clip, "full: end probability", float(np.exp(full.end_logprob)))
    for name in ("end_padding", "end_audio"):
        found.add(clip, f"full: {name}", full.sum_heads(name))
    return full


def _compare(
    model: Whisper,
    window: Features,
    name: str,
    text: ForcedText,
    own: Tensor,
    full: Measurement,
    clip: str,
    found: Findings,
) -> None:
    """A clip under another policy: the end token, and the clip's own features."""
    encoded = encode(model, [window], Policy.parse(name))
    hidden = measure_decoder(model, encoded, window.n_positions, text)
    logit, probability = hidden.end_logit, float(np.exp(hidden.end_logprob))
    found.add(clip, f"{name}: end logit", logit)
    found.add(clip, f"{name}: end probability", probability)
    found.add(clip, f"{name}: end logit minus full's", logit - full.end_logit)
    before = float(np.exp(full.end_logprob))
    found.add(clip, f"{name}: end probability minus full's", probability - before)
    moved = encoded.features[0, : window.n_positions] - own
    for part, rows in PARTS.items():
        if len(own[rows]):
            change = float(moved[rows].norm() / own[rows].norm())
            found.add(clip, f"{name}: features, {part}", change)
    if name == "mask:cross":
        found.pairs.append((full.sum_heads("end_padding"), full.end_logit - logit))


def report(found: Findings) -> str:
    """The findings as tables."""
    first = f"{found.n_clips} clips; padding is {found.told('positions: padding')} of a window."
    kinds = ("encoder.self", "decoder.cross")
    parts = [*(_heads(found, kind) for kind in kinds), _where(found), _end(found), _features(found)]
    return "\n\n".join([first, *parts])


def _heads(found: Findings, kind: str) -> str:
    rows = found.heads.ranked(kind, "padding")
    n_half, n_tenth = (sum(row.low > share for row in rows) for share in (0.5, 0.1))
    most = [
        [f"{row.place} {row.head}", f"{row.mean:.3f} ({row.low:.3f} … {row.high:.3f})"]
        for row in rows[:N_MOST]
    ]
    return (
        f"### {KINDS[kind].capitalize()}: attention on padding, by head\n\n"
        f"Mean over {len(rows)} heads {found.told(f'{kind}: padding')}. Above 0.5, with its "
        f"interval: {n_half} heads; above 0.1: {n_tenth}.\n\n"
        + markdown(["head", "attention on padding"], most)
    )


def _where(found: Findings) -> str:
    kinds = ("positions", "encoder.self", "decoder.cross, text", "decoder.cross, end")
    header = ["region", "share of positions", "encoder", "decoder, text", "decoder, end token"]
    rows = [
        [name, *(found.told(f"{kind}: {name}") for kind in kinds)] for name in ("padding", *REGIONS)
    ]
    places = [name for name in found.values if name.endswith(".self: padding")]
    layers = [
        [name.split(":")[0], found.told(name), found.told(f"{name}, last second")]
        for name in places
        if name != "encoder.self: padding"
    ]
    return (
        f"### Where in the window attention goes\n\n{markdown(header, rows)}\n\n"
        "### Encoder, layer by layer\n\n"
        + markdown(["layer", "attention on padding", "from the clip's last second"], layers)
    )


def _end(found: Findings) -> str:
    direct, drop = np.array(found.pairs).T
    agreement = f"{np.corrcoef(direct, drop)[0, 1]:.2f}" if len(direct) > 2 else "no data"
    heads = [
        [f"{row.place} {row.head}", f"{row.mean:+.2f} ({row.low:+.2f} … {row.high:+.2f})"]
        for row in found.heads.ranked("decoder.cross", "end_padding")[:N_MOST]
    ]
    columns = {
        "end logit": "{:.2f}",
        "end probability": "{:.3f}",
        "end logit minus full's": "{:+.2f}",
        "end probability minus full's": "{:+.3f}",
    }
    rows = [
        [name, *(found.told(f"{name}: {column}", form) for column, form in columns.items())]
        for name in ("full", *HIDING)
    ]
    return (
        "### The end token, where the text is complete\n\n"
        f"From cross-attention along the direct path: {found.told('full: end_padding', '{:+.2f}')} "
        f"of its logit by attention on padding, {found.told('full: end_audio', '{:+.2f}')} by "
        f"attention on the audio. What the logit loses when the padding is hidden from "
        f"cross-attention, correlated with the former over clips: {agreement}.\n\n"
        f"{markdown(['head', 'end-token logit from padding'], heads)}\n\n"
        + markdown(["policy", *(name.removeprefix("end ") for name in columns)], rows)
    )


def _features(found: Findings) -> str:
    rows = [
        [name, *(found.told(f"{name}: features, {part}") for part in PARTS)]
        for name in HIDING
        if name != "mask:cross"
    ]
    title = "### The clip's own features: relative change against full"
    return f"{title}\n\n{markdown(['policy', *PARTS], rows)}"
