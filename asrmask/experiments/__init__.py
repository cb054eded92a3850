"""Experiments: what the padding does, measured."""
