"""Whisper speech-to-text with every attention mask in the open."""

from typing import TYPE_CHECKING

from asrmask.lazy import lazy_exports

if TYPE_CHECKING:
    from asrmask.audio.recording import Recording as Recording
    from asrmask.audio.recording import load_audio as load_audio
    from asrmask.audio.spectrogram import Features as Features
    from asrmask.audio.spectrogram import Spectrogram as Spectrogram
    from asrmask.audio.spectrogram import log_mel_spectrogram as log_mel_spectrogram
    from asrmask.audio.spectrogram import pad_or_trim as pad_or_trim
    from asrmask.audio.vad import VadOptions as VadOptions
    from asrmask.checkpoints import available_models as available_models
    from asrmask.checkpoints import load_model as load_model
    from asrmask.decoding.options import DecodingOptions as DecodingOptions
    from asrmask.decoding.options import DecodingResult as DecodingResult
    from asrmask.decoding.task import decode as decode
    from asrmask.decoding.task import detect_language as detect_language
    from asrmask.errors import AsrmaskError as AsrmaskError
    from asrmask.errors import AudioError as AudioError
    from asrmask.errors import AudioWarning as AudioWarning
    from asrmask.errors import CheckpointError as CheckpointError
    from asrmask.errors import OptionError as OptionError
    from asrmask.live.api import LiveTranscriber as LiveTranscriber
    from asrmask.live.api import listen as listen
    from asrmask.model.dimensions import ModelDimensions as ModelDimensions
    from asrmask.model.policy import Policy as Policy
    from asrmask.model.whisper import Whisper as Whisper
    from asrmask.transcription.api import stream as stream
    from asrmask.transcription.api import transcribe as transcribe
    from asrmask.transcription.api import transcribe_all as transcribe_all
    from asrmask.transcription.presets import Preset as Preset
    from asrmask.transcription.result import Segment as Segment
    from asrmask.transcription.result import Transcription as Transcription
    from asrmask.transcription.result import Word as Word
    from asrmask.transcription.settings import Settings as Settings

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "audio.recording": "Recording load_audio",
        "audio.spectrogram": "Features Spectrogram log_mel_spectrogram pad_or_trim",
        "audio.vad": "VadOptions",
        "checkpoints": "available_models load_model",
        "decoding.options": "DecodingOptions DecodingResult",
        "decoding.task": "decode detect_language",
        "errors": "AsrmaskError AudioError AudioWarning CheckpointError OptionError",
        "live.api": "LiveTranscriber listen",
        "model.dimensions": "ModelDimensions",
        "model.policy": "Policy",
        "model.whisper": "Whisper",
        "transcription.result": "Segment Transcription Word",
        "transcription.settings": "Settings",
        "transcription.api": "stream transcribe transcribe_all",
        "transcription.presets": "Preset",
    },
)
