"""Kinds of padding: zero, silence, or white noise at a given level."""

from asrmask.errors import OptionError

MIN_NOISE_DB = -120


def noise_level(fill: str) -> float | None:
    """Return the noise level of `fill` in decibels; None for "zero" and "silence"."""
    if fill in {"zero", "silence"}:
        return None
    try:
        noise_db = float(fill.removeprefix("noise:"))
    except ValueError:
        noise_db = float("nan")
    if not (fill.startswith("noise:") and MIN_NOISE_DB <= noise_db <= 0):
        raise OptionError(
            f"fill must be zero, silence or noise:DB with DB in {MIN_NOISE_DB}..0, got {fill!r}"
        )
    return noise_db
