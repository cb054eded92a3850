"""A model with openai-whisper's methods: what `load_model` returns."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from asrmask.model import Whisper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asrmask.audio import Features
    from asrmask.decoding import DecodingOptions
    from asrmask.tokenizer import Tokenizer
    from asrmask.transcriber import Audio
    from asrmask.transcription import Transcription


class LoadedWhisper(Whisper):
    """Whisper, with the functions that take a model as methods.

    The model itself knows nothing of files and text (model.py).
    """

    def transcribe(
        self, audio: "Audio", *, verbose: bool | None = None, **options: Any
    ) -> "Transcription":
        """See asrmask.transcribe."""
        from asrmask.transcriber import transcribe

        return transcribe(self, audio, verbose=verbose, **options)

    def decode(
        self,
        mel: "Tensor | Features | Sequence[Features]",
        options: "DecodingOptions | None" = None,
        **overrides: Any,
    ) -> Any:
        """See asrmask.decode."""
        from asrmask.decoding import decode

        return decode(self, mel, options, **overrides)

    def detect_language(
        self,
        mel: "Tensor | Features | Sequence[Features]",
        tokenizer: "Tokenizer | None" = None,
    ) -> tuple[Tensor, Any]:
        """See asrmask.detect_language."""
        from asrmask.decoding import detect_language

        return detect_language(self, mel, tokenizer)
