"""Build Hugging Face transformers' Whisper from asrmask's weights.

Only this module imports the package, which is optional: pip install 'asrmask[systems]'.
"""

import warnings
from functools import cache
from typing import Any

import torch

from asrmask.audio.torchaudio_import import import_torchaudio
from asrmask.checkpoints.hub import DIMENSIONS, renamed
from asrmask.extras import require
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import get_tokenizer


@cache
def transformers() -> Any:
    """Import and return the module transformers."""
    require("transformers' Whisper", "transformers", install="asrmask[transformers]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from packages that it imports
        import_torchaudio()  # transformers imports torchaudio, which may need a fix first
        import transformers

        return transformers


def twin(model: Whisper, attention: str = "sdpa") -> Any:
    """Return transformers' Whisper sharing the weights of `model`.

    attention: its attn_implementation; "eager" spells the softmax out
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
    with torch.device("meta"):  # shapes only: the weights are shared
        other = module.WhisperForConditionalGeneration(config)
    weights = model.state_dict()
    names = [name for name in other.state_dict() if name != "proj_out.weight"]
    theirs = {name: weights[renamed(name)] for name in names}
    theirs["proj_out.weight"] = theirs["model.decoder.embed_tokens.weight"]
    other.load_state_dict(theirs, assign=True)
    other.generation_config = module.GenerationConfig(**special, **generation)
    return other.eval()
