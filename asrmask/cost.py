"""What a window costs: operations (additions and multiplications) from the model's shapes."""

from asrmask.encoding import Plan
from asrmask.model import ModelDimensions


def encoder_operations(dims: ModelDimensions, plan: Plan) -> int:
    """Of one window: convolutions, layers, and the cross keys and values of what was encoded."""
    d = dims.n_audio_state
    n = plan.positions[1] - plan.positions[0]
    convolutions = 2 * (2 * n * 3 * dims.n_mels * d) + 2 * n * 3 * d * d
    n_keys = n if plan.virtual is None else plan.virtual.mask.shape[-1]
    dense = 24 * n * d * d  # four projections, and four times the width and back
    attention = 4 * d * n * n_keys
    cross = 4 * n * d * d * dims.n_text_layer
    return convolutions + dims.n_audio_layer * (dense + attention) + cross


def token_operations(dims: ModelDimensions, plan: Plan) -> int:
    """Of cross-attention for one token of text: what a token pays for the audio's length."""
    n_keys = plan.positions[1] - plan.positions[0]
    if plan.virtual is not None:
        n_keys += plan.virtual.cross_mask.shape[-1]
    return 4 * n_keys * dims.n_text_state * dims.n_text_layer
