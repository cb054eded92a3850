"""Run Hugging Face transformers' Whisper on asrmask's weights. Only this module imports it.

The package is optional: pip install 'asrmask[systems]'.
"""

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from asrmask.audio.constants import N_SAMPLES, SAMPLE_RATE
from asrmask.audio.torchaudio_import import import_torchaudio
from asrmask.checkpoints import load_model
from asrmask.checkpoints.hub import DIMENSIONS, renamed
from asrmask.extras import require
from asrmask.model.whisper import Whisper
from asrmask.systems import DecodingSettings, System, SystemTranscript, TimedText
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer


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
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
    special["decoder_start_token_id"] = tokenizer.sot
    dims = {theirs: getattr(model.dims, ours) for ours, theirs in DIMENSIONS.items()}
    dims["encoder_ffn_dim"] = dims["decoder_ffn_dim"] = 4 * model.dims.n_text_state
    config = module.WhisperConfig(**dims, **special, attn_implementation=attention)
    with torch.device("meta"):  # shapes only: the weights are shared
        other = module.WhisperForConditionalGeneration(config)
    weights = model.state_dict()
    names = [name for name in other.state_dict() if name != "proj_out.weight"]
    theirs = {name: weights[renamed(name)] for name in names}
    theirs["proj_out.weight"] = theirs["model.decoder.embed_tokens.weight"]
    other.load_state_dict(theirs, assign=True)
    options = _generation_options(model, tokenizer)
    other.generation_config = module.GenerationConfig(**special, **options)
    return other.eval()


def _generation_options(model: Whisper, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of a GenerationConfig, with openai-whisper's values."""
    suppressed = {
        *(*tokenizer.non_speech_tokens, tokenizer.transcribe, tokenizer.translate),
        *(tokenizer.sot, tokenizer.sot_prev, tokenizer.sot_lm, tokenizer.no_speech),
    }
    options: dict[str, Any] = {
        "no_timestamps_token_id": tokenizer.no_timestamps,
        "is_multilingual": model.is_multilingual,
        "max_length": model.dims.n_text_ctx,
        "max_initial_timestamp_index": 50,
        "begin_suppress_tokens": [tokenizer.blank, tokenizer.eot],
        "suppress_tokens": sorted(suppressed),
    }
    if model.is_multilingual:
        codes = tokenizer.language_tokens
        options["lang_to_id"] = {f"<|{code}|>": token for code, token in codes.items()}
        tasks = {"transcribe": tokenizer.transcribe, "translate": tokenizer.translate}
        options["task_to_id"] = tasks
    return options


class Transformers(System):
    def __init__(self, options: dict[str, str], weights: str, threads: int, model_dir: str | None):
        transformers().logging.set_verbosity_error()
        ours = load_model(weights, "cpu", model_dir, cpu_threads=threads)
        self.model = twin(ours)
        self.tokenizer = get_tokenizer(ours.is_multilingual, num_languages=ours.num_languages)
        self.extract = transformers().WhisperFeatureExtractor(feature_size=ours.dims.n_mels)

    def watch(self) -> None:
        super().watch()
        self.timer.watch(self, "extract", "spectrogram")
        self.timer.watch(self.model.model.encoder, "forward", "encoder")
        self.timer.watch(self.model.model.decoder, "forward", "decoder")

    @torch.inference_mode()
    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        samples = self.load_audio(path)
        padding = "longest" if len(samples) > N_SAMPLES else "max_length"
        options: dict[str, Any] = {"truncation": False, "return_attention_mask": True}
        inputs = self.extract(
            samples, sampling_rate=SAMPLE_RATE, return_tensors="pt", padding=padding, **options
        )
        options = {"return_timestamps": True, "return_segments": True}
        if self.model.generation_config.is_multilingual:
            options |= {"language": decoding.language, "task": decoding.task}
        output = self.model.generate(**inputs, num_beams=decoding.beam_size or 1, **options)
        eot = self.tokenizer.eot
        segments = []
        for segment in output["segments"][0]:
            text = self.tokenizer.decode(t for t in segment["tokens"].tolist() if t < eot)
            segments.append(TimedText(float(segment["start"]), float(segment["end"]), text))
        text = "".join(segment.text for segment in segments)
        return SystemTranscript(text, segments, None, decoding.language)
