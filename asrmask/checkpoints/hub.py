"""Folders as the Hugging Face hub has them: config.json and model.safetensors, whole or sharded."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from asrmask.checkpoints.checkpoint import Checkpoint, heads_from
from asrmask.errors import CheckpointError
from asrmask.model import ModelDimensions

# config.json's names for the ten dimensions
DIMENSIONS = {
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions",
    "n_text_state": "d_model",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}

# the hub's part of a name → openai-whisper's, longest first
RENAMED = [
    ("self_attn_layer_norm", "attn_ln"),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder_attn", "cross_attn"),
    ("self_attn", "attn"),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("embed_tokens", "token_embedding"),
    ("embed_positions.weight", "positional_embedding"),
    ("layers.", "blocks."),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
]


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a hub folder."""
    config = _json(folder / "config.json")
    if config.get("model_type") != "whisper":
        raise CheckpointError(
            f"{folder}: model_type must be whisper, got {config.get('model_type')!r}"
        )
    missing = sorted({theirs for theirs in DIMENSIONS.values() if theirs not in config})
    if missing:
        raise CheckpointError(f"{folder / 'config.json'}: expected {', '.join(missing)}, got none")
    dims = ModelDimensions.of({ours: config[theirs] for ours, theirs in DIMENSIONS.items()})
    weights = {
        renamed(name): tensor
        for name, tensor in _tensors(folder).items()
        if name != "proj_out.weight"  # the embedding again
    }
    generation = folder / "generation_config.json"
    heads = _json(generation).get("alignment_heads") if generation.exists() else None
    return Checkpoint(dims, weights, heads_from(heads, generation))


def renamed(name: str) -> str:
    """openai-whisper's name of a hub weight.

    >>> renamed("model.decoder.layers.1.encoder_attn.k_proj.weight")
    'decoder.blocks.1.cross_attn.key.weight'
    """
    name = name.removeprefix("model.")
    for theirs, ours in RENAMED:
        name = name.replace(theirs, ours)
    return name


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}, expected a JSON file") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        shards = _json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"{index}: expected a weight_map, got {shards!r}")
        files = sorted(set(shards.values()))
    tensors: dict[str, Tensor] = {}
    for file in files:
        if Path(file).name != file:  # an index must not lead out of its folder
            raise CheckpointError(f"{index}: expected file names, got {file!r}")
        try:
            tensors |= load_file(folder / file)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{folder / file}: {reason}, expected safetensors") from None
        except SafetensorError as error:
            raise CheckpointError(f"{folder / file}: damaged safetensors ({error})") from None
    return tensors
