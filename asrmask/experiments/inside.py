"""What padding does inside a model, over many clips: which heads look at it, and what follows.

Each clip is one window, decoded greedily under `full` without timestamps. That text is then given
(teacher forcing) under every policy, so that whatever changes is the policy's doing. Intervals are
95 %, Student's t over clips, each clip of equal weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asrmask.audio import Features, Recording, Spectrogram
from asrmask.corpus import Clip
from asrmask.decoding import DecodingOptions, decode_memory
from asrmask.encoding import FULL, encode, plan
from asrmask.instruments.aggregate import mean
from asrmask.instruments.ground import Ground, of_encoder, spoken
from asrmask.instruments.measure import Measurement, Text, measured, read
from asrmask.instruments.online import Moments, Tally
from asrmask.instruments.quantities import KINDS, expected
from asrmask.instruments.recording import both
from asrmask.instruments.tables import HEADS, Table, markdown
from asrmask.model import Whisper
from asrmask.policy import N_POSITIONS, POSITIONS_PER_SECOND, Policy
from asrmask.tokenizer import get_tokenizer

HIDING = ("full,fill=silence", "mask:encoder", "mask:cross", "mask:both")
N_MOST = 6  # heads in a table
REGIONS = ("padding's first second", "window's last second", "rest of the padding", "the audio")


def regions(ground: Ground) -> Tensor:
    """Each key's region, as ones and zeros, (K, REGIONS): they add up to 1. Of one clip."""
    padding = ground.padding[0]
    places = torch.arange(len(padding), device=padding.device)
    first = places[padding].min() if padding.any() else len(padding)
    late = padding & (places >= len(padding) - POSITIONS_PER_SECOND)
    early = padding & ~late & (places < first + POSITIONS_PER_SECOND)
    return torch.stack([early, late, padding & ~late & ~early, ground.audio[0]], dim=-1).float()


@dataclass
class Findings:
    """Means over clips, as they come by.

    heads:  of every head, under `full`
    values: a name → statistics of one number a clip
    """

    heads: Tally
    values: dict[str, Moments] = field(default_factory=dict)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    table: Table = field(default_factory=lambda: Table({"clip": str, "name": str, "value": float}))
    n_clips: int = 0

    def add(self, clip: str, name: str, value: float) -> None:
        mine = Moments.of(np.array([value]))
        self.values[name] = self.values[name] + mine if name in self.values else mine
        self.table.add(clip=clip, name=name, value=round(float(value), 6))

    def told(self, name: str, form: str = "{:.3f}") -> str:
        """A number's mean and interval."""
        if name not in self.values or not self.values[name].n:
            return "no data"
        moments = self.values[name]
        low, high = moments.interval()
        parts = [form.format(float(x)) for x in (moments.means(), low, high)]
        return f"{parts[0]} ({parts[1]} … {parts[2]})"


class Inside:
    """A model, and what was found in it so far."""

    def __init__(self, model: Whisper):
        self.model = model
        self.found = Findings(Tally(expected(model.dims)))
        self.tokenizer = get_tokenizer(
            model.is_multilingual, num_languages=model.num_languages, language="en"
        )

    def listen(self, clip: Clip) -> None:
        """Measure a clip under every policy."""
        model, found = self.model, self.found
        recording = clip.recording()
        spectrogram = Spectrogram(recording, model.dims.n_mels)
        n_frames = spectrogram.n_frames
        window = spectrogram.window(0, n_frames, fill="zero")
        options = DecodingOptions(language="en", without_timestamps=True)
        plain = encode(model, [window])
        (result,) = decode_memory(model, plain, options)
        tokenizer = self.tokenizer
        text = Text(
            (*tokenizer.sot_sequence, tokenizer.no_timestamps),
            tuple(result.tokens),
            tokenizer.eot,
            tokenizer.timestamp_begin,
        )
        full = self._full(clip, recording, window, text)
        own = plain.features[0, : window.n_positions]
        for name in HIDING:
            policy = Policy.parse(name)
            filled = window
            if policy.fill != window.fill:
                filled = spectrogram.window(0, n_frames, fill=policy.fill)
            memory = encode(model, [filled], policy)
            meter, reading = read(model, memory, window.n_positions, text)
            assert meter.end is not None
            logit = float(meter.end[0])
            found.add(clip.id, f"{name}: end logit", logit)
            found.add(clip.id, f"{name}: end probability", float(np.exp(reading.end_logprob)))
            found.add(clip.id, f"{name}: end logit minus full's", logit - full.end_logit)
            found.add(
                clip.id,
                f"{name}: end probability minus full's",
                float(np.exp(reading.end_logprob) - np.exp(full.end_logprob)),
            )
            moved = memory.features[0, : window.n_positions] - own
            for part, rows in PARTS.items():
                if len(own[rows]):
                    change = float(moved[rows].norm() / own[rows].norm())
                    found.add(clip.id, f"{name}: features, {part}", change)
            if name == "mask:cross":
                direct = sum(_sums(full, "end_padding"))
                found.pairs.append((direct, full.end_logit - logit))
        found.n_clips += 1

    def _full(self, clip: Clip, recording: Recording, window: Features, text: Text) -> Measurement:
        """A clip with all of its padding, with every instrument."""
        model, found = self.model, self.found
        n = window.n_positions
        speech = spoken(recording)
        ground = of_encoder(plan(FULL, [n]), [n], [speech])
        split = regions(ground)
        masses: list[Tensor] = []  # (REGIONS,) a layer

        def weigh(place: str, quantity: str, tensor: Tensor) -> None:
            if quantity == "weights":
                mass = (tensor[:, :, :n] @ split).transpose(1, 2)  # (1, n, H, REGIONS)
                masses.append(mean(mass, torch.ones(1, n, dtype=torch.bool))[0].mean(dim=0))

        full = measured(
            model,
            lambda record: encode(model, [window], FULL, both(record, weigh)),
            ground,
            n,
            text,
            speech=speech,
            keep_weights=True,
        )
        found.heads.add(full.values)
        cross = [torch.from_numpy(w).float() @ regions(full.ground) for w in full.weights.values()]
        for kind, layers in (
            ("encoder.self", masses),
            ("decoder.cross", [w.mean(dim=(0, 1)) for w in cross]),
            ("decoder.cross, end", [w[:, -1].mean(dim=0) for w in cross]),
            ("decoder.cross, text", [w[:, :-1].mean(dim=(0, 1)) for w in cross]),
        ):
            shares = torch.stack(layers).mean(dim=0)
            for name, share in zip(REGIONS, shares.tolist(), strict=True):
                found.add(clip.id, f"{kind}: {name}", share)
            found.add(clip.id, f"{kind}: padding", float(1 - shares[-1]))
        for name, share in zip(REGIONS, split.mean(dim=0).tolist(), strict=True):
            found.add(clip.id, f"positions: {name}", share)
        found.add(clip.id, "positions: padding", 1 - n / N_POSITIONS)
        for i in range(model.dims.n_audio_layer):
            share = float(full.values[f"encoder.{i}.self", "padding"].mean())
            found.add(clip.id, f"encoder.{i}.self: padding", share)
            profile = full.profiles[f"encoder.{i}.self"][0, :n]  # (n, H)
            found.add(clip.id, f"encoder.{i}.self: padding, last second", _late(profile))
        found.add(clip.id, "full: end logit", full.end_logit)
        found.add(clip.id, "full: end probability", float(np.exp(full.end_logprob)))
        for name in ("end_padding", "end_audio"):
            found.add(clip.id, f"full: {name}", sum(_sums(full, name)))
        return full


PARTS = {
    "all of the clip": slice(None),
    "its last second": slice(-POSITIONS_PER_SECOND, None),
    "what is before": slice(None, -POSITIONS_PER_SECOND),
}


def _late(profile: np.ndarray) -> float:
    return float(profile[-POSITIONS_PER_SECOND:].mean())


def _sums(full: Measurement, name: str) -> list[float]:
    """A share of the end token's logit, layer by layer, over heads."""
    return [float(v.sum()) for (_, quantity), v in full.values.items() if quantity == name]


def head_rows(tally: Tally, quantity: str, kind: str) -> list[tuple[str, int, float, float, float]]:
    """Every head of a kind: place, head, mean, low, high; the highest mean first."""
    part, what = kind.split(".")
    rows: list[tuple[str, int, float, float, float]] = []
    for (place, name), moments in tally.moments.items():
        if name == quantity and place.startswith(part) and place.endswith(what):
            bounds = zip(moments.means(), *moments.interval(), strict=True)
            for head, (at, low, high) in enumerate(bounds):
                rows.append((place, head, float(at), float(low), float(high)))
    return sorted(rows, key=lambda row: -row[2])


def heads_table(tally: Tally) -> Table:
    """Every head and quantity, with intervals."""
    table = Table(dict(HEADS))
    for (place, quantity), moments in tally.moments.items():
        part, layer, what = place.split(".")
        low, high = moments.interval()
        for head, value in enumerate(moments.means()):
            table.add(
                attention=f"{part}.{what}",
                layer=int(layer),
                head=head,
                quantity=quantity,
                clips=int(moments.n[head]),
                mean=round(float(value), 5),
                low=round(float(low[head]), 5),
                high=round(float(high[head]), 5),
            )
    return table


def report(found: Findings) -> str:
    """The findings as tables."""
    parts = [f"{found.n_clips} clips; padding is {found.told('positions: padding')} of a window."]
    for kind in ("encoder.self", "decoder.cross"):
        rows = head_rows(found.heads, "padding", kind)
        n_half = sum(low > 0.5 for *_, low, _ in rows)
        n_tenth = sum(low > 0.1 for *_, low, _ in rows)
        parts.append(
            f"### {KINDS[kind].capitalize()}: attention on padding, by head\n\n"
            f"Mean over {len(rows)} heads {found.told(f'{kind}: padding')}. Above 0.5, with its "
            f"interval: {n_half} heads; above 0.1: {n_tenth}.\n\n"
            + markdown(
                ["head", "attention on padding"],
                [[f"{p} {h}", f"{m:.3f} ({a:.3f} … {b:.3f})"] for p, h, m, a, b in rows[:N_MOST]],
            )
        )
    kinds = ("positions", "encoder.self", "decoder.cross, text", "decoder.cross, end")
    heads = ["region", "share of positions", "encoder", "decoder, text", "decoder, end token"]
    parts.append(
        "### Where in the window attention goes\n\n"
        + markdown(
            heads,
            [
                [name, *(found.told(f"{kind}: {name}") for kind in kinds)]
                for name in ("padding", *REGIONS)
            ],
        )
    )
    layers = [name for name in found.values if name.endswith(".self: padding")]
    layers = [name for name in layers if name.count(".") == 2]
    parts.append(
        "### Encoder, layer by layer\n\n"
        + markdown(
            ["layer", "attention on padding", "from the clip's last second"],
            [
                [name.split(":")[0], found.told(name), found.told(f"{name}, last second")]
                for name in layers
            ],
        )
    )
    direct, drop = np.array(found.pairs).T
    agreement = f"{np.corrcoef(direct, drop)[0, 1]:.2f}" if len(direct) > 2 else "no data"
    rows = head_rows(found.heads, "end_padding", "decoder.cross")
    shares = [[f"{p} {h}", f"{m:+.2f} ({a:+.2f} … {b:+.2f})"] for p, h, m, a, b in rows[:N_MOST]]
    parts.append(
        "### The end token, where the text is complete\n\n"
        f"From cross-attention along the direct path: {found.told('full: end_padding', '{:+.2f}')} "
        f"of its logit by attention on padding, {found.told('full: end_audio', '{:+.2f}')} by "
        f"attention on the audio. What the logit loses when the padding is hidden from "
        f"cross-attention, correlated with the former over clips: {agreement}.\n\n"
        + markdown(["head", "end-token logit from padding"], shares)
        + "\n\n"
        + markdown(
            ["policy", "logit", "probability", "logit minus full's", "probability minus full's"],
            [
                [
                    name,
                    found.told(f"{name}: end logit", "{:.2f}"),
                    found.told(f"{name}: end probability"),
                    found.told(f"{name}: end logit minus full's", "{:+.2f}"),
                    found.told(f"{name}: end probability minus full's", "{:+.3f}"),
                ]
                for name in ("full", *HIDING)
            ],
        )
    )
    parts.append(
        "### The clip's own features: relative change against full\n\n"
        + markdown(
            ["policy", *PARTS],
            [
                [name, *(found.told(f"{name}: features, {part}") for part in PARTS)]
                for name in HIDING
                if name != "mask:cross"
            ],
        )
    )
    return "\n\n".join(parts)


def run(model: Whisper, clips: Sequence[Clip], told: Callable[[str], None]) -> Findings:
    """Every clip."""
    inside = Inside(model)
    for i, clip in enumerate(clips, start=1):
        inside.listen(clip)
        told(f"{i} of {len(clips)} clips")
    return inside.found
