"""Decode encoded audio into text: options, search, token filters and quality checks."""

from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.decoding.task import decode, detect_language

__all__ = ["DecodingOptions", "DecodingResult", "decode", "detect_language"]
