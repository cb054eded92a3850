"""Run an ablation: every cell on every clip, one record each.

Clips are decoded in batches. The batches stay the same when a run is interrupted and resumed, so
the records do too.
"""

import json
import platform
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import asrmask
from asrmask.ablation.batch import Batch
from asrmask.ablation.clips import AblationClip, batches, controls
from asrmask.ablation.records import Records
from asrmask.ablation.spec import Cell, Spec
from asrmask.checkpoints import load_model
from asrmask.console import ProgressCallback
from asrmask.errors import OptionError
from asrmask.files import atomic_write
from asrmask.model.whisper import sha256_of_weights


def versions() -> dict[str, str]:
    return {
        "asrmask": asrmask.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
    }


def run(
    spec: Spec,
    clips: Sequence[AblationClip],
    folder: Path,
    about: dict[str, Any],
    advance: ProgressCallback,
    model_dir: str | None = None,
) -> None:
    """Compute every record that is not in the folder yet.

    about: more entries of run.json: "left_out" (clip → problem), "n_available" (clips in the data
           set) and "command"
    """
    clips = [*clips, *controls(clips, spec.seed)]
    cells = spec.cells()
    clips_of = {cell: [clip for clip in clips if applies(cell, clip)] for cell in cells}
    n_records = sum(map(len, clips_of.values()))
    _claim(folder / "run.json", _describe(spec, clips) | about | {"n_records": n_records})
    # cells that share an encoder output follow each other
    first = {cell.encoder_cell: i for i, cell in reversed(list(enumerate(cells)))}
    cells.sort(key=lambda cell: (spec.models.index(cell.model), first[cell.encoder_cell]))
    with closing(Records(folder / "records.jsonl")) as records:
        advance(len(records.done), n_records)

        def is_done(cell: Cell, clip: AblationClip) -> bool:
            return (str(cell), clip.id) in records.done

        for name in spec.models:
            mine = [cell for cell in cells if cell.model == name]
            if all(is_done(cell, clip) for cell in mine for clip in clips_of[cell]):
                continue
            model = load_model(name, download_root=model_dir, adapter=spec.adapter or None)
            sha256 = sha256_of_weights(model.state_dict())
            shared = {"spec": spec.hash, **versions(), "weights_sha256": sha256}
            for members in batches(clips, spec.batch_size):
                batch = Batch(model, members, spec)
                for cell in mine:
                    todo = [c for c in members if applies(cell, c) and not is_done(cell, c)]
                    if not todo:
                        continue
                    records.append(
                        [
                            _record(cell, clip, shared | scores)
                            for clip, scores in zip(members, batch.records(cell), strict=True)
                            if clip in todo
                        ]
                    )
                    n_done = sum(is_done(cell, clip) for clip in clips_of[cell])
                    n_all = len(clips_of[cell])
                    status = f"cell {cells.index(cell) + 1} of {len(cells)}, {cell}: "
                    status += f"{n_done} of {n_all} clips"
                    advance(len(records.done), n_records, status, n_done == n_all)


def applies(cell: Cell, clip: AblationClip) -> bool:
    """Whether a cell is run on a clip: control clips skip trailing audio and fallback."""
    return clip.kind == "speech" or (not cell.trailing.seconds and not cell.decoding.fallback)


def _record(cell: Cell, clip: AblationClip, values: dict[str, Any]) -> dict[str, Any]:
    names = {"cell": str(cell), "clip": clip.id}
    return {**names, **cell.as_record(), "seconds": round(clip.seconds, 3), **values}


def _describe(spec: Spec, clips: Sequence[AblationClip]) -> dict[str, Any]:
    """Return what run.json says about the spec, the versions and the clips."""
    names = ("text", "language", "speaker", "kind", "path")
    return {
        "spec": asdict(spec),
        "spec_hash": spec.hash,
        "versions": versions(),
        "clips": {
            clip.id: {
                "seconds": round(clip.seconds, 3),
                **{name: getattr(clip, name) for name in names},
            }
            for clip in clips
        },
    }


def _claim(path: Path, about: dict[str, Any]) -> None:
    """Write run.json, or check that the run in this folder is the same one."""
    if path.exists():
        existing = json.loads(path.read_text(encoding="utf-8"))
        for name in ("spec_hash", "clips", "versions"):
            if existing.get(name) != json.loads(json.dumps(about[name])):
                raise OptionError(
                    f"{path.parent}: holds a run with other {name.replace('_', ' ')}, "
                    f"expected the same run or an empty folder"
                )
        return
    with atomic_write(path) as file:
        json.dump(about, file, indent=1, ensure_ascii=False)
