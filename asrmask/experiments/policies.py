"""Padding policies side by side: errors, runaways, fallbacks and time, on single windows."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from asrmask.audio import N_FRAMES, Features, Recording, Spectrogram
from asrmask.corpus import Clip
from asrmask.decoding import DecodingOptions, DecodingResult, decode_memory, runaway
from asrmask.encoding import FULL, encode, plan, with_bank
from asrmask.model import Memory, Whisper
from asrmask.policy import Policy
from asrmask.score import Errors, difference_interval, errors, total
from asrmask.upstream import normalizer
from asrmask.virtual import Bank, Design, build, cache_folder, stored

ROUNDS = 3  # of timing the encoder
N_TIMED = 20  # clips of a set that it is timed on
SHORT_S = 10.0  # a short clip
POLICIES = (
    *("full", "full,fill=silence"),
    *("mask:encoder", "mask:cross", "mask:both", "mask:both,fill=silence"),
    *("trim", "trim,margin=1.28", "trim,margin=1.28,fill=silence", "trim,positions=last"),
    "virtual",
)
TOGETHER = ("librispeech-test-other", "ljspeech")  # read speech, also scored as one set
DESIGNS = (
    Design(),
    Design(stride=1),
    Design(stride=64),
    Design(cross_stride=1),
    Design(cross_stride=16),
    Design(stride=1, cross_stride=1),
)
MARGINS_S = (0.0, 0.32, 0.64, 1.28)


@dataclass(frozen=True)
class Found:
    """One clip's result under a policy."""

    result: DecodingResult
    errors: Errors
    decoder_s: float


class Bench:
    """Clips of one set, and what a model makes of them."""

    def __init__(self, model: Whisper, clips: Sequence[Clip], options: DecodingOptions):
        self.model = model
        self.options = options
        self.clips: list[Clip] = []
        self.spectrograms: list[Spectrogram] = []
        for clip in clips:
            spectrogram = Spectrogram(Recording.open(clip.path), model.dims.n_mels)
            if spectrogram.n_frames <= N_FRAMES:
                self.clips.append(clip)
                self.spectrograms.append(spectrogram)
        self.n_left_out = len(clips) - len(self.clips)
        self.normalisers = {c.language: normalizer(c.language) for c in self.clips}

    def window(self, i: int, policy: Policy) -> Features:
        spectrogram = self.spectrograms[i]
        return spectrogram.window(0, spectrogram.n_frames, fill=policy.fill)

    def is_short(self, i: int) -> bool:
        return self.spectrograms[i].recording.duration_s < SHORT_S

    def decoded(self, i: int, memory: Memory) -> Found:
        clip = self.clips[i]
        options = self.options
        if self.model.is_multilingual:
            options = replace(options, language=clip.language)
        begun = time.perf_counter()
        (result,) = decode_memory(self.model, memory, options)
        taken = time.perf_counter() - begun
        return Found(result, self.score(i, result), taken)

    def score(self, i: int, result: DecodingResult) -> Errors:
        clip = self.clips[i]
        normalise = self.normalisers[clip.language]
        return errors(normalise(clip.text or ""), normalise(result.text))

    def run(self, policy: Policy) -> list[Found]:
        """Every clip, without fallback."""
        found = []
        for i in range(len(self.clips)):
            found.append(self.decoded(i, encode(self.model, [self.window(i, policy)], policy)))
        return found

    def run_with(self, bank: Bank, margin_s: float) -> tuple[list[Found], float]:
        """Every clip with a bank of some design, and the mean error of the clips' own features."""
        policy = Policy("virtual", margin_s)
        found, distances = [], []
        with torch.inference_mode():
            for i in range(len(self.clips)):
                window = self.window(i, policy)
                planned = plan(policy, [policy.visible(window.n_positions)], bank.design)
                memory = with_bank(self.model, bank, window.mel[None], planned)
                real = encode(self.model, [window]).features[0, : window.n_positions]
                own = memory.features[0, : window.n_positions]
                distances.append(float((own - real).norm() / real.norm()))
                found.append(self.decoded(i, memory))
        return found, statistics.mean(distances)

    @torch.inference_mode()
    def bank_ms(self, bank: Bank, margin_s: float) -> float:
        """Milliseconds a clip that encoding takes with that bank: the median of rounds."""
        policy = Policy("virtual", margin_s)
        windows = [self.window(i, policy) for i in range(len(self.clips))]
        times = []
        for _ in range(ROUNDS + 1):
            begun = time.perf_counter()
            for window in windows:
                planned = plan(policy, [policy.visible(window.n_positions)], bank.design)
                with_bank(self.model, bank, window.mel[None], planned)
            times.append(time.perf_counter() - begun)
        return 1000 * statistics.median(times[1:]) / len(windows)

    def encoder_s(self, policies: Sequence[Policy]) -> np.ndarray:
        """Seconds that encoding takes, (policies, clips): medians of rounds in turn.

        Of N_TIMED clips, evenly over the set; the first round warms up.
        """
        chosen = np.linspace(0, len(self.clips) - 1, min(N_TIMED, len(self.clips))).astype(int)
        self.timed = [int(i) for i in chosen]
        times = np.zeros((ROUNDS + 1, len(policies), len(chosen)))
        for r in range(ROUNDS + 1):
            for p, policy in enumerate(policies):
                for c, i in enumerate(self.timed if r else self.timed[:3]):
                    window = self.window(i, policy)
                    begun = time.perf_counter()
                    encode(self.model, [window], policy)
                    times[r, p, c] = time.perf_counter() - begun
        return np.median(times[1:], axis=0)


@dataclass(frozen=True)
class Row:
    """All clips of a set under one policy."""

    policy: Policy
    bare: list[Found]
    safe: list[Found]  # with the fallback
    n_again: int


def rows_of(bench: Bench, policies: Sequence[Policy]) -> list[Row]:
    """Each policy over the set; what runs away is taken from `full` with the same fill."""
    full: dict[str, list[Found]] = {}
    rows = []
    for policy in policies:
        if policy.fill not in full:
            full[policy.fill] = bench.run(policy.fallback)
        bare = full[policy.fill] if policy == policy.fallback else bench.run(policy)
        windows = [bench.window(i, policy) for i in range(len(bench.clips))]
        ran = [
            policy.kind != "full" and runaway(found.result, window.n_positions) is not None
            for found, window in zip(bare, windows, strict=True)
        ]
        safe = [
            again if lost else found
            for found, again, lost in zip(bare, full[policy.fill], ran, strict=True)
        ]
        rows.append(Row(policy, bare, safe, sum(ran)))
    return rows


def blocks_of(clips: Sequence[Clip]) -> list[str]:
    """What the bootstrap draws: speakers, or clips where none is known."""
    return [clip.speaker or str(clip.path) for clip in clips]


def print_errors(title: str, rows: Sequence[Row], blocks: Sequence[str]) -> None:
    """WER of each policy, bare and with fallback, and how far it is from the first one's."""
    print(f"\n### {title}\n")
    print(
        "| policy | fallback | WER % | sub | del | ins | no end | decoded again | as full |", end=""
    )
    print(" difference to full, 95 % interval |\n|---|---|---|---|---|---|---|---|---|---|")
    full = rows[0].bare
    for row in rows:
        for name, found in (("no", row.bare), ("yes", row.safe)):
            if name == "yes" and row.policy.kind == "full":
                continue
            sum_of = total(f.errors for f in found)
            n_lost = sum(not f.result.ended for f in found)
            pairs = zip(found, full, strict=True)
            n_same = sum(a.result.tokens == b.result.tokens for a, b in pairs)
            mine, theirs = [f.errors for f in found], [f.errors for f in full]
            low, high = difference_interval(mine, theirs, blocks)
            difference = 100 * (sum_of.wer - total(theirs).wer)
            print(
                f"| {row.policy} | {name} | {100 * sum_of.wer:.2f} | {sum_of.substitutions} | "
                f"{sum_of.deletions} | {sum_of.insertions} | {n_lost} | "
                f"{row.n_again if name == 'yes' else ''} | {n_same} of {len(found)} | "
                f"{difference:+.2f} ({100 * low:+.2f} … {100 * high:+.2f}) |",
                flush=True,
            )


def print_times(benches: dict[str, Bench], rows: dict[str, list[Row]]) -> None:
    """How many times as fast as full the encoder and the decoder are, set by set."""
    policies = [row.policy for row in next(iter(rows.values()))]
    print(f"\n### Time of full ÷ time of the policy, {torch.get_num_threads()} threads\n")
    columns = [f"{name}: {part}" for name in benches for part in ("encoder", "decoder")]
    print("| policy | " + " | ".join([f"encoder, clips under {SHORT_S:.0f} s", *columns]) + " |")
    print("|---" * (len(columns) + 2) + "|")
    encoder = {name: bench.encoder_s(policies) for name, bench in benches.items()}
    cells = []
    short = sum(
        times[:, [bench.is_short(i) for i in bench.timed]].sum(axis=1)
        for times, bench in zip(encoder.values(), benches.values(), strict=True)
    )
    cells.append([f"{short[0] / taken:.2f}" for taken in short])
    for name in benches:
        decoder = [sum(f.decoder_s for f in row.bare) for row in rows[name]]
        for times in (encoder[name].sum(axis=1), decoder):
            cells.append([f"{times[0] / taken:.2f}" for taken in times])
    for policy, *ratios in zip(policies, *cells, strict=True):
        print(f"| {policy} | " + " | ".join(ratios) + " |", flush=True)


def compare(benches: dict[str, Bench], names: Sequence[str] = POLICIES) -> None:
    """The whole report: errors set by set and of all read speech together, and times."""
    policies = [Policy.parse(name) for name in names]
    rows: dict[str, list[Row]] = {}
    for name, bench in benches.items():
        if bench.n_left_out:
            print(f"\n{name}: {bench.n_left_out} clips longer than a window left out")
        rows[name] = rows_of(bench, policies)
        print_errors(f"{name}, {len(bench.clips)} clips", rows[name], blocks_of(bench.clips))
    together = [name for name in benches if name in TOGETHER]
    if len(together) > 1:
        joined = [
            Row(
                row.policy,
                [f for name in together for f in rows[name][i].bare],
                [f for name in together for f in rows[name][i].safe],
                sum(rows[name][i].n_again for name in together),
            )
            for i, row in enumerate(rows[together[0]])
        ]
        blocks = [block for name in together for block in blocks_of(benches[name].clips)]
        print_errors(" and ".join(together), joined, blocks)
    print_times(benches, rows)


def sweep(bench: Bench) -> None:
    """Virtual padding in other designs: how near to full, for which cost."""
    full = bench.run(FULL)
    model = bench.model
    policy = Policy("virtual")
    tried = [(design, float(policy.margin or 0)) for design in DESIGNS]
    tried += [(Design(), margin) for margin in MARGINS_S if margin != policy.margin]
    print(f"\n### Designs of virtual padding, {len(bench.clips)} clips\n")
    print("| stride | cross stride | margin s | as full | WER % | features' error | ms |")
    print("|---|---|---|---|---|---|---|")
    kept = stored(model)
    for design, margin in tried:
        bank = Bank(model, kept, design)
        found, distance = bench.run_with(bank, margin)
        n_same = sum(a.result.tokens == b.result.tokens for a, b in zip(found, full, strict=True))
        ms = bench.bank_ms(bank, margin)
        wer = 100 * total(f.errors for f in found).wer
        print(
            f"| {design.stride} | {design.cross_stride} | {margin} | "
            f"{n_same} | {wer:.2f} | {distance:.3f} | {ms:.1f} |",
            flush=True,
        )


def print_bank(model: Whisper) -> None:
    """What a bank takes: bytes on disk, and seconds to build and to read."""
    begun = time.perf_counter()
    made = build(model)
    built = time.perf_counter()
    n_bytes = sum(tensor.nbytes for tensor in made.values())
    stored(model)
    read = time.perf_counter()
    stored(model)
    print(
        f"bank: {n_bytes / 2**20:.1f} MiB in {cache_folder()}, built in {built - begun:.2f} s, "
        f"read in {time.perf_counter() - read:.2f} s"
    )
