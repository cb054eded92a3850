"""Shared parts of all reports: page template, style, plots, tables."""
