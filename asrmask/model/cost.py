"""Cost of a window in operations (additions and multiplications), from the model's shapes."""

from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoding import Plan


def encoder_operations(dims: ModelDimensions, plan: Plan) -> int:
    """Operations to encode one window: convolutions, layers, keys and values for the decoder."""
    d = dims.n_audio_state
    n = plan.n_computed
    convolutions = 2 * (2 * n * 3 * dims.n_mels * d) + 2 * n * 3 * d * d
    n_keys = n if plan.virtual is None else plan.virtual.mask.shape[-1]
    dense = 24 * n * d * d  # four projections and the feed-forward layers
    attention = 4 * d * n * n_keys
    layers = dims.n_audio_layer * (dense + attention)
    return convolutions + layers + keys_values_operations(dims, plan)


def keys_values_operations(dims: ModelDimensions, plan: Plan) -> int:
    """Operations for the decoder's keys and values of one window."""
    return 4 * plan.n_computed * dims.n_audio_state**2 * dims.n_text_layer


def token_operations(dims: ModelDimensions, plan: Plan) -> int:
    """Operations of cross-attention per decoded token, which grow with the audio's length."""
    n_keys = plan.n_computed if plan.virtual is None else plan.virtual.cross_mask.shape[-1]
    return 4 * n_keys * dims.n_text_state * dims.n_text_layer
