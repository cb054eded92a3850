"""Kinds of padding: zero, silence, or noise at a given level."""

from asrmask.errors import OptionError

QUIETEST_DB = -120  # lowest noise level allowed


def noise_level(fill: str) -> float | None:
    """Return the noise level of `fill` in decibels; None for "zero" and "silence"."""
    if fill in {"zero", "silence"}:
        return None
    kind, _, level = fill.partition(":")
    try:
        noise_db = float(level) if kind == "noise" else float("nan")
    except ValueError:
        noise_db = float("nan")
    if not QUIETEST_DB <= noise_db <= 0:
        raise OptionError(
            f"fill must be zero, silence or noise:DB with DB in {QUIETEST_DB}..0, got {fill!r}"
        )
    return noise_db
