"""Decode encoded audio into text: options, search, token filters and quality checks."""

from typing import TYPE_CHECKING

from asrmask.lazy import lazy_exports

if TYPE_CHECKING:
    from asrmask.decoding.language import detect_language as detect_language
    from asrmask.decoding.options import DecodingOptions as DecodingOptions
    from asrmask.decoding.options import DecodingResult as DecodingResult
    from asrmask.decoding.task import decode as decode

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "language": "detect_language",
        "options": "DecodingOptions DecodingResult",
        "task": "decode",
    },
)
