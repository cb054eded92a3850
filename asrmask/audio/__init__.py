"""Audio loading, log-Mel spectrograms and voice activity detection."""

from typing import TYPE_CHECKING

from asrmask.lazy import lazy_exports

if TYPE_CHECKING:
    from asrmask.audio.constants import CHUNK_LENGTH as CHUNK_LENGTH
    from asrmask.audio.constants import FRAMES_PER_SECOND as FRAMES_PER_SECOND
    from asrmask.audio.constants import HOP_LENGTH as HOP_LENGTH
    from asrmask.audio.constants import N_FFT as N_FFT
    from asrmask.audio.constants import N_FRAMES as N_FRAMES
    from asrmask.audio.constants import N_SAMPLES as N_SAMPLES
    from asrmask.audio.constants import SAMPLE_RATE as SAMPLE_RATE
    from asrmask.audio.recording import Recording as Recording
    from asrmask.audio.recording import load_audio as load_audio
    from asrmask.audio.spectrogram import Features as Features
    from asrmask.audio.spectrogram import Spectrogram as Spectrogram
    from asrmask.audio.spectrogram import log_mel_spectrogram as log_mel_spectrogram
    from asrmask.audio.spectrogram import mel_filters as mel_filters
    from asrmask.audio.spectrogram import pad_or_trim as pad_or_trim
    from asrmask.audio.vad import VadOptions as VadOptions

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "constants": "SAMPLE_RATE N_FFT HOP_LENGTH CHUNK_LENGTH N_SAMPLES N_FRAMES "
        "FRAMES_PER_SECOND",
        "recording": "Recording load_audio",
        "spectrogram": "Features Spectrogram log_mel_spectrogram mel_filters pad_or_trim",
        "vad": "VadOptions",
    },
)
