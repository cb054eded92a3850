"""Model weights: a reader per file format, official names, download and verification."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asrmask.checkpoints.registry import DEFAULT, available_models
from asrmask.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    import torch

    from asrmask.checkpoints import download
    from asrmask.checkpoints.checkpoint import Checkpoint
    from asrmask.transcription.api import TranscribingWhisper

__all__ = ["available_models", "load_model"]

COMPUTE_TYPES = ("float32", "float16", "bfloat16", "float64", "int8")


def load_model(
    name: str = DEFAULT,
    device: "str | torch.device | None" = None,
    download_root: str | None = None,
    in_memory: bool = False,
    compute_type: str | None = None,
    cpu_threads: int = 0,
    adapter: str | Path | None = None,
    merge_adapter: bool = True,
) -> "TranscribingWhisper":
    """Load a model by official name, or from a file or folder of weights.

    name:          an official name (available_models()), an OpenAI .pt or a whisper.cpp .bin
                   file, or a folder with CTranslate2's model.bin, the hub's model.safetensors,
                   or ONNX files of optimum or transformers.js
    device:        default: the first GPU, else the CPU
    download_root: folder for official files; default: openai-whisper's cache folder
    in_memory:     ignored, for compatibility with openai-whisper: weights are always in memory
    compute_type:  float32 (the default), float16, bfloat16, float64, or on a CPU int8
    cpu_threads:   PyTorch's threads, set for the whole process; 0: unchanged
    adapter:       a file of `asrmask train` that was trained on these weights
    merge_adapter: False: keep it beside the weights, which then stay as they are (not in int8)
    """
    import torch

    from asrmask.checkpoints.checkpoint import build

    compute_type = compute_type or "float32"
    if compute_type not in COMPUTE_TYPES:
        raise OptionError(
            f"compute_type must be one of {', '.join(COMPUTE_TYPES)}, got {compute_type!r}"
        )
    if cpu_threads < 0:
        raise OptionError(f"cpu_threads must be 0 or more, got {cpu_threads}")
    if cpu_threads:
        torch.set_num_threads(cpu_threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:80]
        raise OptionError(f"device must be one of PyTorch's, got {device} ({reason})") from None
    if compute_type == "int8" and device.type != "cpu":
        raise OptionError(f"compute_type int8 is for a CPU, got {device}: float16 is for a GPU")
    if compute_type == "int8" and adapter is not None and not merge_adapter:
        raise OptionError("merge_adapter must be True with compute_type int8, got False")
    path = None if adapter is None else Path(adapter)
    if compute_type == "int8":
        return _load_int8(name, download_root, path)
    _, checkpoint = read(name, download_root)
    if path is None or merge_adapter:
        return build(_merged(checkpoint, path), device, getattr(torch, compute_type))
    from asrmask.checkpoints import adapter as adapters
    from asrmask.model import lora

    beside = adapters.load_onto(checkpoint, path)
    model = build(checkpoint, device, getattr(torch, compute_type))
    lora.attach(model, beside.tensors, beside.scale)
    return model.requires_grad_(False).eval()


def _merged(checkpoint: "Checkpoint", adapter: Path | None) -> "Checkpoint":
    """The checkpoint, with the adapter of a file added to its weights."""
    if adapter is not None:
        from asrmask.checkpoints.adapter import merge

        merge(checkpoint, adapter)
    return checkpoint


def write_merged(name: str, adapter: str, folder: Path, download_root: str | None = None) -> str:
    """Write weights with an adapter in them, for systems that know no adapters; return the path."""
    from asrmask.checkpoints import ctranslate2

    path, checkpoint = read(name, download_root)
    stem = name if name in available_models() else path.stem
    out = folder / f"{stem}+{Path(adapter).stem}"
    ctranslate2.write(out, _merged(checkpoint, Path(adapter)))
    return str(out)


def _load_int8(
    name: str, download_root: str | None, adapter: Path | None = None
) -> "TranscribingWhisper":
    """From the cache folder, or quantized and written there."""
    import torch

    from asrmask.checkpoints import int8_cache
    from asrmask.checkpoints.checkpoint import build
    from asrmask.model import quantization

    official_name = name if name in available_models() else ""
    path = _official_path(name, download_root) if official_name else Path(name)
    entry = int8_cache.entry(path, official_name, adapter)
    model = int8_cache.load(entry) if entry else None
    if model is None:
        path, checkpoint = read(name, download_root)
        model = build(_merged(checkpoint, adapter), torch.device("cpu"), None)
        quantization.quantize(model)
        # as the weights were before they were read, unless they have just been downloaded
        entry = entry or int8_cache.entry(path, official_name, adapter)
        if entry:
            int8_cache.save(entry, model)
    return model


def _official_path(name: str, download_root: str | None) -> Path:
    """Where an official model is, or will be once it is downloaded."""
    from asrmask.checkpoints import registry

    return registry.bundled_folder(name) or registry.cached_file(name, download_root)


def read(name: str, download_root: str | None = None) -> "tuple[Path, Checkpoint]":
    """Read and check a checkpoint by name or path. Also returns the file or folder it is from."""
    from asrmask.checkpoints import download, registry

    if name in available_models():
        path = registry.bundled_folder(name)
        if path is None:
            target = registry.cached_file(name, download_root)
            with _progress_bar(name) as progress:
                path = download.fetch(registry.url(name), target, registry.sha256(name), progress)
        else:
            sha256 = download.sha256_of(path / "model.bin")
            if sha256 != registry.BUNDLED_SHA256:
                raise download.wrong_sha256(path / "model.bin", sha256, registry.BUNDLED_SHA256)
        return path, replace(_read(path), alignment_heads=registry.alignment_heads(name))
    path = Path(name)
    try:
        if path.exists():
            return path, _read(path)
        reason = f"{str(name)!r}"
    except OSError as error:  # the name is too long, or the folder is not accessible
        reason = f"{str(name)[:80]!r} ({error.strerror})"
    raise CheckpointError(
        f"model must be one of {', '.join(available_models())}, or a path, got {reason}"
    )


def _read(path: Path) -> "Checkpoint":
    from asrmask.checkpoints import ctranslate2, ggml, hub, onnx, openai
    from asrmask.checkpoints.checkpoint import check, reading

    if path.is_file():
        checkpoint = ggml.read(path) if ggml.is_ggml(path) else openai.read(path)
    elif (path / "model.bin").exists():
        checkpoint = ctranslate2.read(path)
    elif (path / "config.json").exists():
        checkpoint = onnx.read(path) if onnx.is_onnx(path) else hub.read(path)
    else:
        raise CheckpointError(
            f"{path}: expected a folder with model.bin (CTranslate2) or config.json and "
            f"model.safetensors or ONNX files (the hub), got neither"
        )
    with reading(path, "the weights of a Whisper model"):
        check(checkpoint)
    return checkpoint


@contextmanager
def _progress_bar(name: str) -> "Iterator[download.Progress]":
    """Show a download on standard error if that is a terminal, once bytes arrive."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn

    columns = [*Progress.get_default_columns()[:2], DownloadColumn(), TimeRemainingColumn()]
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, visible=False)
        yield lambda n, total: bar.update(task, completed=n, total=total, visible=True)
