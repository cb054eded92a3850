"""Hugging Face transformers' Whisper, with the same weights: the only place that imports it.

The package is optional: pip install 'asrmask[systems]'.
"""

import warnings
from functools import cache
from typing import Any

import torch

from asrmask.checkpoints.hub import DIMENSIONS, renamed
from asrmask.errors import OptionError
from asrmask.model import Whisper
from asrmask.tokenizer import get_tokenizer
from asrmask.torchaudio_import import import_torchaudio


@cache
def transformers() -> Any:
    """The module transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        import_torchaudio()  # it imports torchaudio, which must have been made to work first
        try:
            import transformers
        except ModuleNotFoundError:
            raise OptionError(
                "Hugging Face's Whisper needs the package transformers, got none: "
                "pip install transformers"
            ) from None
        return transformers


def twin(model: Whisper, attention: str = "sdpa") -> Any:
    """transformers' model with the very weights of `model`.

    attention: which of its ways to compute it; "eager" is the plain one
    """
    module = transformers()
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    dims: dict[str, Any] = {
        theirs: getattr(model.dims, ours) for ours, theirs in DIMENSIONS.items()
    }
    special: dict[str, Any] = {
        "bos_token_id": tokenizer.eot,
        "eos_token_id": tokenizer.eot,
        "pad_token_id": tokenizer.eot,
        "decoder_start_token_id": tokenizer.sot,
    }
    width = model.dims.n_text_state
    config = module.WhisperConfig(
        **dims,
        **special,
        attn_implementation=attention,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )
    generation: dict[str, Any] = {
        "no_timestamps_token_id": tokenizer.no_timestamps,
        "is_multilingual": model.is_multilingual,
        "max_length": model.dims.n_text_ctx,
        "max_initial_timestamp_index": 50,
        "begin_suppress_tokens": [tokenizer.blank, tokenizer.eot],
        "suppress_tokens": sorted(
            {
                *(*tokenizer.non_speech_tokens, tokenizer.transcribe, tokenizer.translate),
                *(tokenizer.sot, tokenizer.sot_prev, tokenizer.sot_lm, tokenizer.no_speech),
            }
        ),
        "alignment_heads": [list(pair) for pair in model.alignment_heads],
        "prev_sot_token_id": tokenizer.sot_prev,
    }
    if model.is_multilingual:
        codes = tokenizer.language_tokens
        generation["lang_to_id"] = {f"<|{code}|>": token for code, token in codes.items()}
        generation["task_to_id"] = {
            "transcribe": tokenizer.transcribe,
            "translate": tokenizer.translate,
        }
    with torch.device("meta"):  # shapes only: the weights are there
        other = module.WhisperForConditionalGeneration(config)
    weights = model.state_dict()
    names = [name for name in other.state_dict() if name != "proj_out.weight"]
    theirs = {name: weights[renamed(name)] for name in names}
    theirs["proj_out.weight"] = theirs["model.decoder.embed_tokens.weight"]
    other.load_state_dict(theirs, assign=True)
    other.generation_config = module.GenerationConfig(**special, **generation)
    return other.eval()
