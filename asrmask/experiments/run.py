"""Running an ablation: every cell over every clip, to records.

What cells share is done once: a clip's audio and spectrogram, the encoder's output for all ways of
decoding it, the result under `full` for all fallbacks. Clips are decoded in batches, which are the
same whenever and however often the run is interrupted, so the records are too.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import asrmask
from asrmask import masks
from asrmask.attention import Recorder
from asrmask.audio import N_FRAMES, SAMPLE_RATE, Features, Recording, Spectrogram
from asrmask.checkpoints import load_model
from asrmask.corpus import Clip
from asrmask.decoding import DecodingOptions, DecodingResult, decode_memory, runaway
from asrmask.encoding import encode
from asrmask.errors import OptionError
from asrmask.experiments.records import Records
from asrmask.experiments.spec import Cell, Spec, Trailing
from asrmask.files import replacing
from asrmask.instruments.ground import Ground, Spans, spoken
from asrmask.instruments.measure import Text, measure, measured
from asrmask.instruments.quantities import nested
from asrmask.model import Memory, Whisper, hash_weights
from asrmask.policy import N_POSITIONS, Policy
from asrmask.score import errors
from asrmask.tokenizer import Tokenizer, get_tokenizer
from asrmask.upstream import normalizer

NOTHING_S = 5.0  # of silence and of noise, in which nothing is said
NOTHING_DB = -40.0


@dataclass(frozen=True)
class Sound:
    """A clip as the run hears it."""

    id: str
    load: Callable[[], np.ndarray]  # its samples, at most 30 s
    seconds: float
    text: str | None  # what is said; None: not scored
    language: str
    speaker: str | None = None
    kind: str = "speech"  # or "half minute", "nothing"
    path: str | None = None  # of its file, if it is one


def controls(sounds: Sequence[Sound], seed: int) -> list[Sound]:
    """Clips for controls: one of 30 s, where every mask is a no-op, and two without speech."""
    language = sounds[0].language
    n_whole, n_nothing = 30 * SAMPLE_RATE, int(NOTHING_S * SAMPLE_RATE)

    def whole() -> np.ndarray:
        parts: list[np.ndarray] = []
        n = 0
        while n < n_whole:
            parts.append(sounds[len(parts) % len(sounds)].load())
            n += len(parts[-1])
        return np.concatenate(parts)[:n_whole]

    def nothing(level_db: float) -> Callable[[], np.ndarray]:
        return lambda: _noise(np.random.default_rng(seed), n_nothing, level_db)

    return [
        Sound("control: 30 s", whole, 30.0, None, language, kind="half minute"),
        *(
            Sound(f"control: {name}", nothing(level), NOTHING_S, "", language, kind="nothing")
            for name, level in (("silence", -90.0), ("noise", NOTHING_DB))
        ),
    ]


def _noise(rng: np.random.Generator, n: int, level_db: float) -> np.ndarray:
    return rng.standard_normal(n, np.float32) * np.float32(10 ** (level_db / 20))


def with_trailing(sound: Sound, trailing: Trailing, seed: int) -> np.ndarray:
    """The clip's samples, with what the cell adds to their end."""
    samples = sound.load()
    if not trailing.seconds:
        return samples
    n = round(trailing.seconds * SAMPLE_RATE)
    if trailing.noise_db is None:
        return np.pad(samples, (0, n))
    return np.concatenate([samples, _noise(_rng(sound, seed), n, trailing.noise_db)])


def _rng(sound: Sound, seed: int) -> np.random.Generator:
    """Random numbers of a clip's own, the same in every run."""
    digest = hashlib.sha256(f"{seed} {sound.id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


@dataclass(frozen=True)
class Scored:
    """The clips of a batch under one condition, without fallback."""

    records: list[dict[str, Any]]
    runaways: list[str | None]
    encoder_s: float
    decoder_s: float


class Batch:
    """Some clips under one model: everything that its cells share."""

    def __init__(self, model: Whisper, sounds: Sequence[Sound], spec: Spec):
        self.model = model
        self.sounds = sounds
        self.spec = spec
        self.tokenizer: Tokenizer = get_tokenizer(
            model.is_multilingual,
            num_languages=model.num_languages,
            language=sounds[0].language,
        )
        self._spectrograms: dict[Trailing, list[Spectrogram]] = {}
        self._speech: dict[Trailing, list[Spans]] = {}
        self._encoded: tuple[object, Memory, float] | None = None  # the last one only: they are big
        self._scored: dict[Cell, Scored] = {}

    def windows(self, trailing: Trailing, fill: str) -> list[Features]:
        if trailing not in self._spectrograms:
            self._spectrograms[trailing] = [
                Spectrogram(
                    Recording.of(with_trailing(sound, trailing, self.spec.seed)),
                    self.model.dims.n_mels,
                )
                for sound in self.sounds
            ]
        found = []
        for spectrogram in self._spectrograms[trailing]:
            n_frames = min(spectrogram.n_frames, N_FRAMES)
            found.append(spectrogram.window(0, n_frames, fill=fill))
        return found

    def memory(self, cell: Cell) -> tuple[Memory, float]:
        """The encoder's output for a cell, and the seconds that it took."""
        key = shared(cell)
        if self._encoded is None or self._encoded[0] != key:
            self._encoded = None
            windows = self.windows(cell.trailing, cell.policy.fill)
            begun = time.perf_counter()
            if cell.control == "none":
                memory = encode(self.model, windows, cell.policy)
            else:
                memory = self._masked(windows, self._mask(windows, self.sounds, cell.control))
            self._encoded = key, memory, time.perf_counter() - begun
        return self._encoded[1], self._encoded[2]

    def _mask(
        self, windows: Sequence[Features], sounds: Sequence[Sound], control: str
    ) -> Tensor | None:
        """A mask that is not about padding.

        random:    as many positions hidden as mask:both hides, but anywhere
        all-valid: none hidden, by a mask that says so
        """
        visible = torch.ones(len(windows), N_POSITIONS, dtype=torch.bool)
        if control == "random":
            for i, (window, sound) in enumerate(zip(windows, sounds, strict=True)):
                n_hidden = N_POSITIONS - max(window.n_positions, 1)
                hidden = _rng(sound, self.spec.seed).choice(N_POSITIONS, n_hidden, replace=False)
                visible[i, hidden] = False
        return masks.checked(visible[:, None, None].to(self.model.device))

    @torch.inference_mode()
    def _masked(
        self, windows: Sequence[Features], mask: Tensor | None, record: Recorder | None = None
    ) -> Memory:
        """The memory of windows with a mask in encoder and decoder."""
        mel = torch.stack([window.mel for window in windows])
        return self.model.decoder.remember(self.model.encode(mel, mask, record), mask)

    def heads(self, cell: Cell, i: int, tokens: Sequence[int]) -> dict[str, Any]:
        """What the instruments say of clip i in a cell, with that text: see quantities.nested."""
        windows = self.windows(cell.trailing, cell.policy.fill)
        if cell.trailing not in self._speech:
            self._speech[cell.trailing] = [
                spoken(spectrogram.recording) for spectrogram in self._spectrograms[cell.trailing]
            ]
        window, speech = windows[i], self._speech[cell.trailing][i]
        tokenizer = self.tokenizer
        text = Text(
            (*tokenizer.sot_sequence, tokenizer.no_timestamps),
            tuple(t for t in tokens if t < tokenizer.eot),
            tokenizer.eot,
            tokenizer.timestamp_begin,
        )
        if cell.control == "none":
            found = measure(self.model, window, cell.policy, text, speech=speech)
        else:
            mask = self._mask([window], [self.sounds[i]], cell.control)
            n = window.n_positions
            found = measured(
                self.model,
                lambda record: self._masked([window], mask, record),
                Ground.of([n], N_POSITIONS, mask=mask, speech=[speech]),
                n,
                text,
                speech=speech,
            )
        return nested(found.values)

    def scored(self, cell: Cell) -> Scored:
        """What the clips are heard as in a cell, without fallback."""
        cell = replace(cell, decoding=cell.decoding.bare)
        if cell not in self._scored:
            memory, encoder_s = self.memory(cell)
            options = DecodingOptions(
                language=self.sounds[0].language,
                beam_size=cell.decoding.beam_size,
                without_timestamps=not cell.decoding.timestamps,
            )
            begun = time.perf_counter()
            results = decode_memory(self.model, memory, options)
            decoder_s = time.perf_counter() - begun
            found, lost = [], []
            windows = self.windows(cell.trailing, cell.policy.fill)
            for i, (sound, result) in enumerate(zip(self.sounds, results, strict=True)):
                mine = memory.select([i])
                scores = self._scores(sound, result, mine)
                if self.spec.inspect:
                    scores["heads"] = self.heads(cell, i, result.tokens)
                found.append(scores)
                lost.append(runaway(result, windows[i].n_positions))
            n = len(results)
            self._scored[cell] = Scored(found, lost, encoder_s / n, decoder_s / n)
        return self._scored[cell]

    def records(self, cell: Cell) -> list[dict[str, Any]]:
        """A record of each clip in a cell."""
        mine = self.scored(cell)
        full = replace(cell, policy=cell.policy.fallback, control="none")
        hides = cell.policy.kind != "full"
        found = []
        for i, record in enumerate(mine.records):
            lost = mine.runaways[i] if hides else None
            encoder_s, decoder_s = mine.encoder_s, mine.decoder_s
            again = lost is not None and cell.decoding.fallback
            if again:
                other = self.scored(full)
                record = other.records[i]
                encoder_s, decoder_s = encoder_s + other.encoder_s, decoder_s + other.decoder_s
            found.append(
                {
                    **record,
                    "runaway": lost,
                    "fallback": again,
                    "encoder_s": round(encoder_s, 4),
                    "decoder_s": round(decoder_s, 4),
                }
            )
        return found

    def _scores(self, sound: Sound, result: DecodingResult, memory: Memory) -> dict[str, Any]:
        normalise = normalizer(sound.language)
        said, heard = normalise(sound.text or ""), normalise(result.text)
        counts = None
        if sound.text is not None:
            found = errors(said, heard)
            counts = [found.substitutions, found.deletions, found.insertions, found.n_words]
        logprobs, ranks = self._end(memory, result.tokens)
        forced: dict[str, Any] = {"reference_logprobs": None, "reference_end_logprob": None}
        if sound.text:
            text = sound.text.strip()
            if text.isupper():  # as LibriSpeech has it, and no model writes
                text = text.capitalize()
            tokens = self.tokenizer.encode(" " + text)
            *words, end = self._forced(memory, [*tokens, self.tokenizer.eot])[1]
            forced = {
                "reference_logprobs": [round(x, 4) for x in words],
                "reference_end_logprob": round(end, 4),
            }
        return {
            "text": result.text,
            "tokens": result.tokens,
            "errors": counts,
            "avg_logprob": round(result.avg_logprob, 5),
            "no_speech_prob": round(result.no_speech_prob, 6),
            "compression_ratio": round(result.compression_ratio, 4),
            "ended": result.ended,
            "end_logprobs": logprobs,
            "end_ranks": ranks,
            **forced,
        }

    @torch.inference_mode()
    def _forced(self, memory: Memory, tokens: list[int]) -> tuple[Tensor, list[float]]:
        """Log-probabilities at each step of a text that is given: of all tokens, and of its own."""
        opening = [*self.tokenizer.sot_sequence, self.tokenizer.no_timestamps]
        room = self.model.dims.n_text_ctx - len(opening)
        tokens = tokens[:room]
        row = torch.tensor([[*opening, *tokens[:-1]]], device=self.model.device)
        x, _ = self.model.decoder(row, memory, self.model.decoder.cache(*row.shape))
        steps = self.model.decoder.logits(x[0, len(opening) - 1 :]).log_softmax(dim=-1)
        own = steps.gather(1, torch.tensor(tokens, device=self.model.device)[:, None])[:, 0]
        return steps, own.tolist()

    def _end(self, memory: Memory, tokens: list[int]) -> tuple[list[float], list[int]]:
        """The end token's log-probability and rank (0: the likeliest) at each step of a text.

        Timestamps are left out: the text alone is followed, as if decoded without them.
        """
        eot = self.tokenizer.eot
        steps, _ = self._forced(memory, [*(t for t in tokens if t < eot), eot])
        end = steps[:, eot]
        ranks = (steps > end[:, None]).sum(dim=-1)
        return [round(x, 4) for x in end.tolist()], ranks.tolist()


def shared(cell: Cell) -> tuple[str, Policy, Trailing, str]:
    """What cells that use the same output of the encoder have in common."""
    return cell.model, cell.policy, cell.trailing, cell.control


def batches(sounds: Sequence[Sound], size: int) -> list[list[Sound]]:
    """Clips of one language and similar length together."""
    order = sorted(sounds, key=lambda s: (s.kind, s.language, s.seconds, s.id))
    found: list[list[Sound]] = []
    for sound in order:
        last = found[-1] if found else None
        alike = last and (last[0].kind, last[0].language) == (sound.kind, sound.language)
        if last is None or not alike or len(last) == size:
            found.append([sound])
        else:
            last.append(sound)
    return found


def versions() -> dict[str, str]:
    return {
        "asrmask": asrmask.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
    }


Advance = Callable[[int, int, str], None]  # records there are, records to be, and what is done


def run(
    spec: Spec,
    sounds: Sequence[Sound],
    folder: Path,
    left_out: dict[str, str],
    advance: Advance,
    command: str,
    model_dir: str | None = None,
) -> None:
    """Every record that is not in the folder yet."""
    cells = spec.cells()
    everything = [*sounds, *controls(sounds, spec.seed)]
    n_all = sum(1 for cell in cells for sound in everything if applies(cell, sound))
    about = {
        "spec": spec.as_dict(),
        "spec_hash": spec.hash,
        "versions": versions(),
        "clips": {
            s.id: {
                "seconds": round(s.seconds, 3),
                "text": s.text,
                "language": s.language,
                "speaker": s.speaker,
                "kind": s.kind,
                "path": s.path,
            }
            for s in everything
        },
        "left_out": left_out,
        "command": command,
        "n_records": n_all,
    }
    _claim(folder / "run.json", about)
    records = Records(folder / "records.jsonl")
    try:
        for name in spec.models:
            mine = [cell for cell in cells if cell.model == name]
            firsts = list(dict.fromkeys(map(shared, mine)))
            mine.sort(key=lambda cell: firsts.index(shared(cell)))
            todo = batches(everything, spec.batch_size)
            if all(_is_done(records, cell, batch) for cell in mine for batch in todo):
                continue
            model = load_model(name, download_root=model_dir)
            digest = hashlib.sha256()
            hash_weights(model, digest)
            for members in todo:
                batch = Batch(model, members, spec)
                for cell in mine:
                    if _is_done(records, cell, members):
                        continue
                    found = [
                        {
                            "cell": str(cell),
                            "clip": sound.id,
                            "spec": spec.hash,
                            **versions(),
                            "weights_sha256": digest.hexdigest(),
                            "model": cell.model,
                            "policy": str(cell.policy),
                            "decoding": str(cell.decoding),
                            "trailing": str(cell.trailing),
                            "control": cell.control,
                            "seconds": round(sound.seconds, 3),
                            **record,
                        }
                        for sound, record in zip(members, batch.records(cell), strict=True)
                        if (str(cell), sound.id) not in records.done and applies(cell, sound)
                    ]
                    records.append(found)
                    advance(len(records.done), n_all, str(cell))
    finally:
        records.close()


def applies(cell: Cell, sound: Sound) -> bool:
    """Whether a cell is run on a clip: the controls have no use for added silence."""
    return sound.kind == "speech" or (not cell.trailing.seconds and not cell.decoding.fallback)


def _is_done(records: Records, cell: Cell, sounds: Sequence[Sound]) -> bool:
    return all((str(cell), s.id) in records.done or not applies(cell, s) for s in sounds)


def _claim(path: Path, about: dict[str, Any]) -> None:
    """Write what the run is, or find that it is the one that was begun here."""
    if path.exists():
        begun = json.loads(path.read_text(encoding="utf-8"))
        for name in ("spec_hash", "clips", "versions"):
            if begun.get(name) != json.loads(json.dumps(about[name])):
                raise OptionError(
                    f"{path.parent}: holds a run with other {name.replace('_', ' ')}, "
                    f"expected the same run or an empty folder"
                )
        return
    with replacing(path) as file:
        json.dump(about, file, indent=1, ensure_ascii=False)


def sound_of(clip: Clip, seconds: float) -> Sound:
    """A clip as it is heard: its first 30 s."""

    def load() -> np.ndarray:
        recording = clip.recording()
        return recording.read(0, min(recording.n_samples, 30 * SAMPLE_RATE))

    seconds = min(seconds, 30.0)
    path = str(clip.path.resolve()) if clip.data is None else None
    return Sound(clip.id, load, seconds, clip.text, clip.language, clip.speaker, path=path)
