"""Transcribe recordings of any length: window loop, batching, word timestamps, writers."""
