"""Read Hugging Face hub folders: config.json and model.safetensors, single or sharded."""

from pathlib import Path

from torch import Tensor

from asrmask.checkpoints.checkpoint import Checkpoint, json_object, read_alignment_heads, reading
from asrmask.errors import CheckpointError, brief
from asrmask.model.dimensions import ModelDimensions

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

# part of a hub name → openai-whisper's, longest first
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
    """Read a checkpoint from a hub folder."""
    dims = dimensions(folder)
    weights = {
        renamed(name): tensor
        for name, tensor in _tensors(folder).items()
        if name != "proj_out.weight"  # tied to the token embedding
    }
    heads = read_alignment_heads(folder / "generation_config.json", dims)
    return Checkpoint(dims, weights, heads)


def dimensions(folder: Path) -> ModelDimensions:
    """Read the dimensions from a hub folder's config.json."""
    with reading(folder / "config.json", "JSON"):
        config = json_object(folder / "config.json")
        if (kind := config.get("model_type")) != "whisper":
            raise CheckpointError(f"model_type must be whisper, got {brief(kind)}")
        return ModelDimensions.of({ours: config[theirs] for ours, theirs in DIMENSIONS.items()})


def renamed(name: str) -> str:
    """Return openai-whisper's name of a hub weight.

    >>> renamed("model.decoder.layers.1.encoder_attn.k_proj.weight")
    'decoder.blocks.1.cross_attn.key.weight'
    """
    name = name.removeprefix("model.")
    for theirs, ours in RENAMED:
        name = name.replace(theirs, ours)
    return name


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        with reading(index, "JSON"):
            shards = json_object(index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise CheckpointError(f"expected a weight_map, got {brief(shards)}")
            for file in shards.values():  # an index must not refer to files outside its folder
                if not isinstance(file, str) or Path(file).name != file or file == "..":
                    raise CheckpointError(
                        f"expected names of files in its folder, got {brief(file)}"
                    )
            files = set(shards.values())
    tensors: dict[str, Tensor] = {}
    for path in (folder / file for file in sorted(files)):
        with reading(path, "safetensors"):
            if not path.is_file():
                raise CheckpointError("expected a file of weights, got none")
            tensors |= load_file(path)
    return tensors
