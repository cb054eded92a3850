"""Whisper's tokenizer: vocabulary, special tokens, languages."""

from asrmask.tokenizer.languages import LANGUAGES, TO_LANGUAGE_CODE
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer

__all__ = ["LANGUAGES", "TO_LANGUAGE_CODE", "Tokenizer", "get_tokenizer"]
