"""Settings of live transcription."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from asrmask.audio.constants import CHUNK_LENGTH
from asrmask.decoding.options import DecodingOptions
from asrmask.errors import OptionError, check_names
from asrmask.live.commitment import Commitment, LocalAgreement, parse
from asrmask.model.policy import Policy

LONGEST_BUFFER_S = CHUNK_LENGTH - 2.0


@dataclass(frozen=True)
class LiveSettings:
    """When to update, what to commit, and where to cut. Times are in seconds."""

    step: float = 0.3  # of audio between two updates
    commit: Commitment | str = field(default_factory=LocalAgreement)
    endpoint: float = 1.2  # of silence that ends an utterance
    buffer: float = 15.0  # of audio in an update, at most; longer utterances are cut at a pause
    threshold: float = 0.5  # probability above which speech begins
    padding: Policy | str = "virtual"  # how much of it is visible
    policy_fallback: bool = True  # decode an unreliable end of an utterance again, with all of it
    condition_on_previous_text: bool = False  # earlier utterances are the prompt
    initial_prompt: str | None = None
    hotwords: str | None = None  # names and terms to add to every prompt

    @property
    def commitment(self) -> Commitment:
        return parse(self.commit) if isinstance(self.commit, str) else self.commit

    @property
    def policy(self) -> Policy:
        return Policy.parse(self.padding)

    def check(self) -> None:
        """Raise OptionError unless every value is valid."""
        limits = {
            "step": (0.05, 10.0),
            "endpoint": (0.1, 10.0),
            "buffer": (2.0, LONGEST_BUFFER_S),
            "threshold": (0.01, 0.99),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise OptionError(f"{name} must be in {low:g}..{high:g}, got {value}")
        if self.policy.fill != "zero":
            raise OptionError(f"live padding must have the fill zero, got {self.policy}")
        _ = self.commitment


def split_live_options(options: Mapping[str, Any]) -> tuple[LiveSettings, DecodingOptions]:
    """Split options into those of the live loop and those of decoding."""
    names = {f.name for f in fields(LiveSettings)}
    decoding = {f.name for f in fields(DecodingOptions)} - {"prompt", "prefix", "sample_len"}
    check_names(options, names | decoding)
    live = {name: value for name, value in options.items() if name in names}
    other = {name: value for name, value in options.items() if name not in names}
    return LiveSettings(**live), replace(DecodingOptions(without_timestamps=True), **other)
