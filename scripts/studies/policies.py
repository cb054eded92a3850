"""Padding policies side by side on single windows: errors, runaways, fallbacks and time."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from asrmask.audio.constants import N_FRAMES
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.decoding.quality import runaway_reason
from asrmask.decoding.task import decode_encoded
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import Errors, difference_interval, errors, total
from asrmask.model.encoding import FULL, encode
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import Bank, Design, build, cache_folder, stored
from asrmask.model.whisper import Whisper
from asrmask.reporting.tables import markdown
from asrmask.systems.upstream import normalizer

ROUNDS = 3  # timing rounds; one more before them warms up
N_TIMED = 20  # clips of a set that are timed
SHORT_S = 10.0
POLICIES = (
    *("full", "full,fill=silence"),
    *("mask:encoder", "mask:cross", "mask:both", "mask:both,fill=silence"),
    *("trim", "trim,margin=1.28", "trim,margin=1.28,fill=silence", "trim,positions=last"),
    "virtual",
)
TOGETHER = ("librispeech-test-other", "ljspeech")  # read speech, also scored as one set
DESIGNS = (
    Design(),
    *(Design(stride=stride) for stride in (1, 64)),
    *(Design(n_tail=n_tail) for n_tail in (10, 50, 375)),
)
OTHER_MARGINS_S = (0.0, 0.32, 1.28)  # beside the default, 0.64
COLUMNS = (
    *("policy", "fallback", "WER %", "sub", "del", "ins", "no end", "decoded again", "as full"),
    "difference to full, 95 % interval",
)


@dataclass(frozen=True)
class Decoded:
    """One clip under a policy."""

    result: DecodingResult
    errors: Errors
    decoder_s: float


@dataclass(frozen=True)
class Row:
    """All clips of a set under one policy."""

    policy: Policy
    bare: list[Decoded]  # without fallback
    safe: list[Decoded]  # with it
    n_again: int  # clips decoded again


class ClipSet:
    """The clips of one set that fit into a window, and a model to decode them with."""

    def __init__(self, model: Whisper, clips: Sequence[Clip], options: DecodingOptions):
        self.model = model
        self.options = options
        found = [Spectrogram(Recording.open(clip.path), model.dims.n_mels) for clip in clips]
        self.spectrograms = [s for s in found if s.n_frames <= N_FRAMES]
        self.clips = [c for c, s in zip(clips, found, strict=True) if s.n_frames <= N_FRAMES]
        # speakers, or clips where no speaker is known: what the bootstrap draws
        self.blocks = [clip.speaker or str(clip.path) for clip in self.clips]

    def windows(self, policy: Policy) -> list[Features]:
        return [s.window(0, s.n_frames, fill=policy.fill) for s in self.spectrograms]

    def run(self, policy: Policy, bank: Bank | None = None) -> list[Decoded]:
        """Decode every clip, without fallback."""
        found = []
        for clip, window in zip(self.clips, self.windows(policy), strict=True):
            encoded = encode(self.model, [window], policy, bank=bank)
            options = self.options
            if self.model.is_multilingual:
                options = replace(options, language=clip.language)
            begun = time.perf_counter()
            (result,) = decode_encoded(self.model, encoded, options)
            taken = time.perf_counter() - begun
            normal = normalizer(clip.language)
            counts = errors(normal(clip.text or ""), normal(result.text))
            found.append(Decoded(result, counts, taken))
        return found

    def feature_error(self, bank: Bank, policy: Policy) -> float:
        """Mean relative error of the clips' own features with that bank."""
        found = []
        for window in self.windows(policy):
            own = slice(window.n_positions)
            real = encode(self.model, [window]).features[0, own]
            near = encode(self.model, [window], policy, bank=bank).features[0, own]
            found.append(float((near - real).norm() / real.norm()))
        return statistics.mean(found)

    @property
    def timed(self) -> list[int]:
        """The clips that are timed: N_TIMED of them, evenly over the set."""
        n = len(self.clips)
        return [int(i) for i in np.linspace(0, n - 1, min(N_TIMED, n))]

    def encoder_s(self, runs: Sequence[tuple[Policy, Bank | None]]) -> np.ndarray:
        """Seconds of encoding, (runs, timed clips): medians over rounds, runs in turn."""
        times = np.zeros((ROUNDS + 1, len(runs), len(self.timed)))
        for r in range(ROUNDS + 1):
            for p, (policy, bank) in enumerate(runs):
                windows = self.windows(policy)
                for c, i in enumerate(self.timed):
                    begun = time.perf_counter()
                    encode(self.model, [windows[i]], policy, bank=bank)
                    times[r, p, c] = time.perf_counter() - begun
        return np.median(times[1:], axis=0)


def rows_of(clips: ClipSet, policies: Sequence[Policy]) -> list[Row]:
    """Each policy over a set. The fallback takes runaways from `full` with the same fill."""
    full: dict[str, list[Decoded]] = {}
    rows = []
    for policy in policies:
        if policy.fill not in full:
            full[policy.fill] = clips.run(policy.fallback)
        again = full[policy.fill]
        bare = again if policy == policy.fallback else clips.run(policy)
        ran = [
            policy.kind != "full" and runaway_reason(found.result, window.n_positions) is not None
            for found, window in zip(bare, clips.windows(policy), strict=True)
        ]
        safe = [b if lost else a for a, b, lost in zip(bare, again, ran, strict=True)]
        rows.append(Row(policy, bare, safe, sum(ran)))
    return rows


def n_same(some: Sequence[Decoded], others: Sequence[Decoded]) -> int:
    return sum(a.result.tokens == b.result.tokens for a, b in zip(some, others, strict=True))


def print_errors(title: str, rows: Sequence[Row], blocks: Sequence[str]) -> None:
    """WER of each policy, without and with fallback, and how far it is from the first one's."""
    full = rows[0].bare
    theirs = [f.errors for f in full]
    lines = []
    for row in rows:
        for name, found in (("no", row.bare), ("yes", row.safe)):
            if name == "yes" and row.policy.kind == "full":
                continue
            mine = [f.errors for f in found]
            counts = total(mine)
            low, high = (100 * x for x in difference_interval(mine, theirs, blocks))
            difference = 100 * (counts.wer - total(theirs).wer)
            lines.append(
                [
                    *(row.policy, name, f"{100 * counts.wer:.2f}"),
                    *(counts.substitutions, counts.deletions, counts.insertions),
                    sum(not f.result.ended for f in found),
                    row.n_again if name == "yes" else "",
                    f"{n_same(found, full)} of {len(found)}",
                    f"{difference:+.2f} ({low:+.2f} … {high:+.2f})",
                ]
            )
    print(f"\n### {title}\n\n{markdown(COLUMNS, lines)}", flush=True)


def print_times(sets: dict[str, ClipSet], rows: dict[str, list[Row]]) -> None:
    """How many times as fast as `full` encoder and decoder are, set by set."""
    policies = [row.policy for row in next(iter(rows.values()))]
    taken = {f"encoder, clips under {SHORT_S:.0f} s": np.zeros(len(policies))}
    for name, clips in sets.items():
        encoder = clips.encoder_s([(policy, None) for policy in policies])
        is_short = [clips.spectrograms[i].recording.duration_s < SHORT_S for i in clips.timed]
        taken[next(iter(taken))] += encoder[:, is_short].sum(axis=1)
        taken[f"{name}: encoder"] = encoder.sum(axis=1)
        decoder = [sum(f.decoder_s for f in row.bare) for row in rows[name]]
        taken[f"{name}: decoder"] = np.array(decoder)
    ratios = [[f"{x:.2f}" for x in times[0] / times] for times in taken.values()]
    print(f"\n### Time of full ÷ time of the policy, {torch.get_num_threads()} threads\n")
    print(markdown(["policy", *taken], list(zip(policies, *ratios, strict=True))), flush=True)


def compare(sets: dict[str, ClipSet], names: Sequence[str] = POLICIES) -> None:
    """The whole report: errors set by set and of all read speech together, and times."""
    policies = [Policy.parse(name) for name in names]
    rows: dict[str, list[Row]] = {}
    for name, clips in sets.items():
        rows[name] = rows_of(clips, policies)
        print_errors(f"{name}, {len(clips.clips)} clips", rows[name], clips.blocks)
    together = [name for name in sets if name in TOGETHER]
    if len(together) > 1:
        joined = [
            Row(
                policy,
                [f for name in together for f in rows[name][i].bare],
                [f for name in together for f in rows[name][i].safe],
                sum(rows[name][i].n_again for name in together),
            )
            for i, policy in enumerate(policies)
        ]
        blocks = [block for name in together for block in sets[name].blocks]
        print_errors(" and ".join(together), joined, blocks)
    print_times(sets, rows)


def sweep(clips: ClipSet) -> None:
    """Virtual padding in other designs: how near to `full`, and at what cost."""
    full = clips.run(FULL)
    kept = stored(clips.model)
    tried = [(design, Policy("virtual")) for design in DESIGNS]
    tried += [(Design(), Policy("virtual", margin)) for margin in OTHER_MARGINS_S]
    lines = []
    for design, policy in tried:
        bank = Bank(clips.model, kept, design)
        found = clips.run(policy, bank)
        wer = total(f.errors for f in found).wer
        ms = 1000 * clips.encoder_s([(policy, bank)]).mean()
        lines.append(
            [
                *(design.stride, design.n_tail, policy.margin, n_same(found, full)),
                *(f"{100 * wer:.2f}", f"{clips.feature_error(bank, policy):.3f}", f"{ms:.1f}"),
            ]
        )
    columns = ["stride", "tail", "margin s", "as full", "WER %", "features' error", "encoder ms"]
    print(f"\n### Designs of virtual padding, {len(full)} clips\n\n{markdown(columns, lines)}")


def print_bank(model: Whisper) -> None:
    """What a bank takes: bytes on disk, and seconds to build and to read."""
    begun = time.perf_counter()
    made = build(model)
    built_s = time.perf_counter() - begun
    n_bytes = sum(tensor.nbytes for tensor in made.values())
    stored(model)
    begun = time.perf_counter()
    stored(model)
    print(
        f"bank: {n_bytes / 2**20:.1f} MiB in {cache_folder()}, built in {built_s:.2f} s, "
        f"read in {time.perf_counter() - begun:.2f} s"
    )
