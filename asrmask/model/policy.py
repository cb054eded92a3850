"""Padding policy: how much of a window's padding the model may attend to.

One value serves as the variable of an experiment, the speed setting of a transcription and the
label of a result. Its text form is the kind, followed by the options that differ from the defaults:
"full", "mask:both,margin=0.16", "trim,margin=1.28,fill=silence,positions=last".

| kind         | encoder's self-attention         | cross-attention                    |
|--------------|----------------------------------|------------------------------------|
| full         | all 30 s, as upstream            | all 30 s, as upstream              |
| mask:encoder | audio and margin                 | all 30 s                           |
| mask:cross   | all 30 s                         | audio and margin                   |
| mask:both    | audio and margin                 | audio and margin                   |
| trim         | as mask:both, rest not computed  | as mask:both, rest not computed    |
| virtual      | audio, margin, and precomputed keys that approximate the rest         |

With a sink, "audio and margin" is audio, margin and the last seconds of the window.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from asrmask.audio.constants import CHUNK_LENGTH, N_POSITIONS, POSITIONS_PER_SECOND
from asrmask.audio.fill import noise_level
from asrmask.errors import OptionError

LENGTH_MULTIPLE = 32  # positions

Kind = Literal["full", "mask:encoder", "mask:cross", "mask:both", "trim", "virtual"]
KINDS: tuple[Kind, ...] = ("full", "mask:encoder", "mask:cross", "mask:both", "trim", "virtual")
OPTIONS = ("margin", "fill", "positions", "sink")
POSITIONS = ("first", "last")
VIRTUAL_MARGIN_S = 0.64  # closest to full for its cost, by `scripts/policies sweep`
ALLOWED = (
    f"{', '.join(KINDS)}, then ,margin=0..{CHUNK_LENGTH} (seconds) "
    f",fill=zero|silence|noise:DB ,positions=first|last ,sink=0..{CHUNK_LENGTH} (seconds)"
)


@dataclass(frozen=True)
class Policy:
    """How much of a window's padding the model may attend to. Default: all of it, as upstream.

    margin:    seconds of padding after the audio that stay visible; default 0, for virtual 0.64
    fill:      content of the padding (see audio/fill.py): "zero", "silence", or "noise:DB"
    positions: which of the 1500 positional embeddings the audio and its margin get: the "first",
               as upstream, with the padding after it, or the "last", with the padding before it
    sink:      seconds of padding at the window's end that stay visible too
    """

    kind: Kind = "full"
    margin: float | None = None
    fill: str = "zero"
    positions: str = "first"
    sink: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"padding must be one of {ALLOWED}, got {self.kind!r}")
        noise_level(self.fill)
        if self.positions not in POSITIONS:
            raise OptionError(f"positions must be first or last, got {self.positions!r}")
        usual = VIRTUAL_MARGIN_S if self.kind == "virtual" else 0.0
        margin = usual if self.margin is None else self.margin
        object.__setattr__(self, "margin", _seconds("margin", margin))
        object.__setattr__(self, "sink", _seconds("sink", self.sink))
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
        if self.sink and (self.kind in {"full", "virtual"} or self.positions == "last"):
            raise OptionError(
                f"sink is for {', '.join(KINDS[1:-1])} with positions=first, got sink={self.sink} "
                f"with {self.kind},positions={self.positions}"
            )

    @classmethod
    def parse(cls, text: "str | Policy") -> "Policy":
        """Parse a policy from its text form; a Policy is returned as it is.

        >>> Policy.parse("trim,margin=0.16,fill=silence")
        Policy(kind='trim', margin=0.16, fill='silence', positions='first', sink=0.0)
        """
        if isinstance(text, Policy):
            return text
        kind, *parts = (part.strip() for part in text.split(","))
        given: dict[str, str | float] = {}
        for part in parts:
            name, sep, value = part.partition("=")
            if not sep or name not in OPTIONS or name in given:
                raise OptionError(f"padding must be one of {ALLOWED}, got {part!r} in {text!r}")
            given[name] = _number(value) if name in {"margin", "sink"} else value
        return cls(kind, **given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The shortest text form: options with default values are left out.

        >>> str(Policy("mask:both", margin=1.0, positions="last"))
        'mask:both,margin=1,positions=last'
        """
        usual = Policy(self.kind)
        parts: list[str] = [self.kind]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != getattr(usual, field.name):
                parts.append(f"{field.name}={str(value).removesuffix('.0')}")
        return ",".join(parts)

    @property
    def fallback(self) -> "Policy":
        """The policy to retry with when decoding runs away: everything visible, the same fill."""
        return Policy(fill=self.fill)

    def with_fill(self, fill: str) -> "Policy":
        return replace(self, fill=fill)

    @property
    def sink_positions(self) -> int:
        """Positions at the window's end that stay visible, whatever they hold."""
        return round(self.sink * POSITIONS_PER_SECOND)

    def visible(self, n_positions: int) -> int:
        """Positions of audio and margin for a clip of n_positions: 1..1500.

        With virtual padding they are rounded up to a multiple of 32, so that libraries that cache
        code and memory for each tensor shape see few shapes.
        """
        margin = round((self.margin or 0.0) * POSITIONS_PER_SECOND)
        n = max(n_positions + margin, 1)
        if self.kind == "virtual":
            n = -(-n // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        return min(n, N_POSITIONS)

    def padding_s(self, n_positions: int) -> tuple[float, float]:
        """Seconds of padding that the encoder computes, and skips, for a clip of n_positions."""
        is_cut = self.kind in {"trim", "virtual"}
        shown = min(self.visible(n_positions) + self.sink_positions, N_POSITIONS)
        avoided = N_POSITIONS - shown if is_cut else 0
        computed = N_POSITIONS - n_positions - avoided
        return computed / POSITIONS_PER_SECOND, avoided / POSITIONS_PER_SECOND


def _number(text: str) -> str | float:
    """The number that a text is, or the text, which `_seconds` refuses."""
    try:
        return float(text)
    except ValueError:
        return text


def _seconds(name: str, value: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= CHUNK_LENGTH:
        raise OptionError(f"{name} must be 0..{CHUNK_LENGTH} seconds, got {value!r}")
    return float(value)
