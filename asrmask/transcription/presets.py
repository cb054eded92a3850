"""Presets: named sets of options, shared by the command line and Python."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asrmask.errors import OptionError


@dataclass(frozen=True)
class Preset:
    """A set of options.

    compute_type: for load_model
    batch_size:   windows decoded together
    options:      for transcribe
    """

    compute_type: str | None = None
    batch_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> dict[str, Any]:
        """The command-line flags that it sets."""
        return {
            "compute_type": self.compute_type,
            "batch_size": self.batch_size,
            **self.options,
            "temperature_increment_on_fallback": None,  # no temperature fallback
        }


# the fastest options that keep the word error rate; docs/fast.md lists the gain of each
FAST = Preset(
    compute_type="int8",
    batch_size=16,
    options={
        "padding": "virtual",
        "cut_at_pauses": True,
        "condition_on_previous_text": False,
        "without_timestamps": True,
        "beam_size": None,
        "temperature": 0.0,
    },
)
PRESETS = {"fast": FAST}


def get_preset(preset: "str | Preset | None") -> Preset:
    """Return the preset of a name; None: the empty preset."""
    if preset is None or isinstance(preset, Preset):
        return preset or Preset()
    if preset not in PRESETS:
        raise OptionError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset]
