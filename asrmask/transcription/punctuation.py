"""Punctuation to merge with the next or previous word: openai-whisper's defaults."""

PREPEND_PUNCTUATIONS = "\"'“¿([{-"
APPEND_PUNCTUATIONS = "\"'.。,，!！?？:：”)]}、"
