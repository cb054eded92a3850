"""Whisper's tokenizer: vocabulary, special tokens, languages."""

from typing import TYPE_CHECKING

from asrmask.lazy import lazy_exports

if TYPE_CHECKING:
    from asrmask.tokenizer.languages import LANGUAGES as LANGUAGES
    from asrmask.tokenizer.languages import TO_LANGUAGE_CODE as TO_LANGUAGE_CODE
    from asrmask.tokenizer.tokenizer import Tokenizer as Tokenizer
    from asrmask.tokenizer.tokenizer import get_tokenizer as get_tokenizer

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "languages": "LANGUAGES TO_LANGUAGE_CODE",
        "tokenizer": "Tokenizer get_tokenizer",
    },
)
