"""Whisper speech-to-text with every attention mask in the open."""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

# public name → where it lives; imported when first used, so that `import asrmask` is quick
_HOMES = {
    "AsrmaskError": "asrmask.errors",
    "AudioError": "asrmask.errors",
    "AudioWarning": "asrmask.errors",
    "CheckpointError": "asrmask.errors",
    "DecodingOptions": "asrmask.decoding",
    "DecodingResult": "asrmask.decoding",
    "Features": "asrmask.audio",
    "ModelDimensions": "asrmask.model",
    "OptionError": "asrmask.errors",
    "Policy": "asrmask.policy",
    "Recording": "asrmask.audio",
    "Segment": "asrmask.transcription",
    "Settings": "asrmask.settings",
    "Spectrogram": "asrmask.audio",
    "Transcription": "asrmask.transcription",
    "VadOptions": "asrmask.vad",
    "Whisper": "asrmask.model",
    "Word": "asrmask.transcription",
    "available_models": "asrmask.checkpoints",
    "decode": "asrmask.decoding",
    "detect_language": "asrmask.decoding",
    "load_audio": "asrmask.audio",
    "load_model": "asrmask.checkpoints",
    "log_mel_spectrogram": "asrmask.audio",
    "pad_or_trim": "asrmask.audio",
    "stream": "asrmask.transcriber",
    "transcribe": "asrmask.transcriber",
    "transcribe_all": "asrmask.batches",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'asrmask' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # found at once the next time
    return value


def __dir__() -> list[str]:
    return __all__
