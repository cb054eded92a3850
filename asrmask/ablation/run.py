"""Run an ablation: every cell on every clip, one record each.

Clips are decoded in batches. The batches stay the same when a run is interrupted and resumed, so
the records do too.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import asrmask
from asrmask.ablation.batch import Batch, shared
from asrmask.ablation.clips import AblationClip, batches, controls
from asrmask.ablation.records import Records
from asrmask.ablation.spec import Cell, Spec
from asrmask.checkpoints import load_model
from asrmask.errors import OptionError
from asrmask.files import atomic_write
from asrmask.model.whisper import hash_weights


def versions() -> dict[str, str]:
    return {
        "asrmask": asrmask.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
    }


# called with: records done, records in total, what was done last, whether its cell is complete
Advance = Callable[[int, int, str, bool], None]


def run(
    spec: Spec,
    sounds: Sequence[AblationClip],
    folder: Path,
    left_out: dict[str, str],
    n_available: int,
    advance: Advance,
    command: str,
    model_dir: str | None = None,
) -> None:
    """Compute every record that is not in the folder yet.

    n_available: clips in the data set, including those not in `sounds`
    """
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
        "n_available": n_available,
        "command": command,
        "n_records": n_all,
    }
    _claim(folder / "run.json", about)
    records = Records(folder / "records.jsonl")
    advance(len(records.done), n_all, "", False)
    numbers: dict[Cell, int] = {}  # 1, 2, … in the order in which cells are run
    try:
        for name in spec.models:
            mine = [cell for cell in cells if cell.model == name]
            firsts = list(dict.fromkeys(map(shared, mine)))
            mine.sort(key=lambda cell: firsts.index(shared(cell)))
            numbers |= {cell: i for i, cell in enumerate(mine, start=len(numbers) + 1)}
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
                    wanted = [sound for sound in everything if applies(cell, sound)]
                    n_done = sum((str(cell), sound.id) in records.done for sound in wanted)
                    told = f"cell {numbers[cell]} of {len(cells)}, {cell}: "
                    told += f"{n_done} of {len(wanted)} clips"
                    advance(len(records.done), n_all, told, n_done == len(wanted))
    finally:
        records.close()


def applies(cell: Cell, sound: AblationClip) -> bool:
    """Whether a cell is run on a clip: control clips skip trailing audio and fallback."""
    return sound.kind == "speech" or (not cell.trailing.seconds and not cell.decoding.fallback)


def _is_done(records: Records, cell: Cell, sounds: Sequence[AblationClip]) -> bool:
    return all((str(cell), s.id) in records.done or not applies(cell, s) for s in sounds)


def _claim(path: Path, about: dict[str, Any]) -> None:
    """Write run.json, or check that the run in this folder is the same one."""
    if path.exists():
        begun = json.loads(path.read_text(encoding="utf-8"))
        for name in ("spec_hash", "clips", "versions"):
            if begun.get(name) != json.loads(json.dumps(about[name])):
                raise OptionError(
                    f"{path.parent}: holds a run with other {name.replace('_', ' ')}, "
                    f"expected the same run or an empty folder"
                )
        return
    with atomic_write(path) as file:
        json.dump(about, file, indent=1, ensure_ascii=False)
