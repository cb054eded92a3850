"""Policy: what the model may see of the padding, as one value.

It is the axis of an experiment, the speed setting of a transcription, and the label of a result.
As text it is a kind and what differs from the defaults: "full", "mask:both,margin=0.16",
"trim,margin=1.28,fill=silence,positions=last".

| kind         | encoder's self-attention         | cross-attention                    |
|--------------|----------------------------------|------------------------------------|
| full         | all 30 s, as upstream            | all 30 s, as upstream              |
| mask:encoder | audio and margin                 | all 30 s                           |
| mask:cross   | all 30 s                         | audio and margin                   |
| mask:both    | audio and margin                 | audio and margin                   |
| trim         | the same, the rest not computed  | the same, the rest not computed    |
| virtual      | audio, margin, and a bank that stands for the rest, which is not computed |
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from asrmask.errors import OptionError

WINDOW_S = 30  # seconds that the model hears at a time
POSITIONS_PER_SECOND = 50  # of the encoder
GRAIN = 32  # positions
N_POSITIONS = WINDOW_S * POSITIONS_PER_SECOND  # 1,500 in a window
QUIETEST_DB = -120  # of the noise that padding may be filled with

Kind = Literal["full", "mask:encoder", "mask:cross", "mask:both", "trim", "virtual"]
KINDS: tuple[Kind, ...] = ("full", "mask:encoder", "mask:cross", "mask:both", "trim", "virtual")
POSITIONS = ("first", "last")
VIRTUAL_MARGIN_S = 0.64  # where virtual comes closest to full for its cost: scripts/policies sweep
ALLOWED = (
    f"{', '.join(KINDS)}, then ,margin=0..{WINDOW_S} (seconds) "
    f",fill=zero|silence|noise:DB ,positions=first|last"
)


def noise_level(fill: str) -> float | None:
    """The level of a fill that is noise, in decibels; None for the others that are allowed."""
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


@dataclass(frozen=True)
class Policy:
    """What the model may see of a window's padding. The default is upstream's: all of it.

    margin:    seconds of padding after the audio that stay visible; default 0, for virtual 0.64
    fill:      what the padding holds (see audio.py): "zero", "silence", or "noise:DB"
    positions: which of the 1500 position codes the audio (and its margin) has: the "first", as
               upstream, with the padding after it, or the "last", with the padding before it
    """

    kind: Kind = "full"
    margin: float | None = None
    fill: str = "zero"
    positions: str = "first"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"padding must be one of {ALLOWED}, got {self.kind!r}")
        noise_level(self.fill)
        if self.positions not in POSITIONS:
            raise OptionError(f"positions must be first or last, got {self.positions!r}")
        is_number = isinstance(self.margin, (int, float)) and not isinstance(self.margin, bool)
        if self.margin is not None and not (is_number and 0 <= self.margin <= WINDOW_S):
            raise OptionError(f"margin must be 0..{WINDOW_S} seconds, got {self.margin}")
        if self.kind == "full" and self.margin:
            raise OptionError(
                f"margin is for {', '.join(KINDS[1:])}, got {self.margin} with full, which shows "
                f"all of the padding"
            )
        if self.kind == "virtual" and (self.fill, self.positions) != ("zero", "first"):
            raise OptionError(
                f"virtual padding must be fill=zero,positions=first, "
                f"got fill={self.fill},positions={self.positions}"
            )
        usual = VIRTUAL_MARGIN_S if self.kind == "virtual" else 0.0
        object.__setattr__(self, "margin", usual if self.margin is None else float(self.margin))

    @classmethod
    def parse(cls, text: "str | Policy") -> "Policy":
        """The policy that a text names.

        >>> Policy.parse("trim,margin=0.16,fill=silence")
        Policy(kind='trim', margin=0.16, fill='silence', positions='first')
        """
        if isinstance(text, Policy):
            return text
        kind, *parts = (part.strip() for part in text.split(","))
        given: dict[str, str] = {}
        for part in parts:
            name, sep, value = part.partition("=")
            if not sep or name not in {"margin", "fill", "positions"} or name in given:
                raise OptionError(f"padding must be one of {ALLOWED}, got {part!r} in {text!r}")
            given[name] = value
        margin = given.pop("margin", None)
        try:
            seconds = None if margin is None else float(margin)
        except ValueError:
            raise OptionError(f"margin must be 0..{WINDOW_S} seconds, got {margin!r}") from None
        return cls(kind, seconds, **given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The shortest text that names it.

        >>> str(Policy("mask:both", margin=1.0, positions="last"))
        'mask:both,margin=1,positions=last'
        """
        usual = Policy(self.kind)
        parts: list[str] = [self.kind]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != getattr(usual, field.name):
                shown = str(value).removesuffix(".0") if field.name == "margin" else value
                parts.append(f"{field.name}={shown}")
        return ",".join(parts)

    @property
    def fallback(self) -> "Policy":
        """What is decoded instead where this one runs away: everything visible, the same fill."""
        return Policy(fill=self.fill)

    def with_fill(self, fill: str) -> "Policy":
        return replace(self, fill=fill)

    def visible(self, n_positions: int) -> int:
        """How many positions of a clip of n_positions are audio or margin: 1..1500.

        With virtual padding the margin ends at a multiple of 32: code and memory that libraries
        keep for every shape of a tensor are then kept for few.
        """
        margin = round((self.margin or 0.0) * POSITIONS_PER_SECOND)
        n = max(n_positions + margin, 1)
        if self.kind == "virtual":
            n = -(-n // GRAIN) * GRAIN
        return min(n, N_POSITIONS)

    def padding_s(self, n_positions: int) -> tuple[float, float]:
        """Seconds of padding that the encoder computes for such a window, and that it avoids."""
        is_cut = self.kind in {"trim", "virtual"}
        avoided = N_POSITIONS - self.visible(n_positions) if is_cut else 0
        computed = N_POSITIONS - n_positions - avoided
        return computed / POSITIONS_PER_SECOND, avoided / POSITIONS_PER_SECOND
