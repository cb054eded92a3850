"""Data sets of transcribed speech, word error rate, and word alignment of two texts."""
