"""Whisper speech-to-text with every attention mask in the open."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name → where it lives; imported when first used, so that `import asrmask` is quick
_HOMES = {
    "AsrmaskError": "asrmask.errors",
    "AudioError": "asrmask.errors",
    "AudioWarning": "asrmask.errors",
    "CheckpointError": "asrmask.errors",
    "DecodingOptions": "asrmask.decode",
    "DecodingResult": "asrmask.decode",
    "Features": "asrmask.audio",
    "ModelDimensions": "asrmask.model",
    "OptionError": "asrmask.errors",
    "Recording": "asrmask.audio",
    "Segment": "asrmask.transcription",
    "Settings": "asrmask.transcribe",
    "Spectrogram": "asrmask.audio",
    "Transcription": "asrmask.transcription",
    "Whisper": "asrmask.model",
    "Word": "asrmask.transcription",
    "available_models": "asrmask.checkpoints",
    "decode": "asrmask.decode",
    "detect_language": "asrmask.decode",
    "load_audio": "asrmask.audio",
    "load_model": "asrmask.checkpoints",
    "log_mel_spectrogram": "asrmask.audio",
    "pad_or_trim": "asrmask.audio",
    "stream": "asrmask.transcribe",
    "transcribe": "asrmask.transcribe",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'asrmask' has no attribute {name!r}")
    module = import_module(_HOMES[name])
    # `decode` and `transcribe` are also the names of their modules: the functions win
    for public, home in _HOMES.items():
        if home == module.__name__:
            globals()[public] = getattr(module, public)
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
