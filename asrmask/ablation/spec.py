"""The spec of an ablation: its cells (conditions) and its primary comparison.

A spec is a TOML file; docs/ablation.md shows one. A *grid* stands for all combinations of its
lists, without those that have no meaning (a margin or sink of `full`, virtual padding that is not
zero). The 2 × 2 of encoder and cross mask, `trim` and the controls are in every ablation.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from asrmask import spec_files
from asrmask.audio.fill import noise_level
from asrmask.errors import OptionError, brief
from asrmask.model.policy import KINDS, Policy

CONTROLS = ("random", "all-valid")  # masks in place of the policy's own
BASIC = ("full", "mask:encoder", "mask:cross", "mask:both", "trim")  # in every ablation
MOST_TRAILING_S = 25.0
NUMBERS = ("margins", "sinks")  # lists of a grid that hold numbers


@dataclass(frozen=True)
class Decoding:
    """Decoding settings: "greedy" or "beam=5", then ",timestamps" and ",fallback"."""

    beam_size: int | None = None
    timestamps: bool = False
    fallback: bool = False  # decode runaways again under full

    @classmethod
    def parse(cls, text: str) -> "Decoding":
        """
        >>> Decoding.parse("beam=5,fallback")
        Decoding(beam_size=5, timestamps=False, fallback=True)
        """
        search, *more = (part.strip() for part in text.split(","))
        kind, _, size = search.partition("=")
        is_beam = kind == "beam" and size.isdecimal() and 1 <= int(size) <= 32
        is_valid = (search == "greedy" or is_beam) and len(more) == len(set(more))
        if not is_valid or not set(more) <= {"timestamps", "fallback"}:
            raise OptionError(
                f"decoding must be greedy or beam=1..32, then ,timestamps ,fallback, got {text!r}"
            )
        return cls(int(size) if size else None, "timestamps" in more, "fallback" in more)

    def __str__(self) -> str:
        parts = ["greedy" if self.beam_size is None else f"beam={self.beam_size}"]
        parts += ["timestamps"] * self.timestamps + ["fallback"] * self.fallback
        return ",".join(parts)

    @property
    def without_fallback(self) -> "Decoding":
        return replace(self, fallback=False)


@dataclass(frozen=True)
class Trailing:
    """Audio added at the end of a clip: "none", "silence=5" or "noise=5@-40" (seconds, dB)."""

    seconds: float = 0.0
    noise_db: float | None = None  # None: silence

    @classmethod
    def parse(cls, text: str) -> "Trailing":
        """
        >>> Trailing.parse("noise=2.5@-40")
        Trailing(seconds=2.5, noise_db=-40.0)
        """
        if text == "none":
            return cls()
        kind, _, value = text.partition("=")
        amount, _, level = value.partition("@")
        try:
            seconds = float(amount)
            noise_db = noise_level(f"noise:{level}") if kind == "noise" else None
        except (ValueError, OptionError):
            seconds, noise_db = 0.0, None
        if kind not in {"silence", "noise"} or not 0 < seconds <= MOST_TRAILING_S:
            raise OptionError(
                f"trailing must be none, silence=SECONDS or noise=SECONDS@DB with up to "
                f"{MOST_TRAILING_S:g} s and DB in -120..0, got {text!r}"
            )
        return cls(seconds, noise_db)

    def __str__(self) -> str:
        if not self.seconds:
            return "none"
        if self.noise_db is None:
            return f"silence={self.seconds:g}"
        return f"noise={self.seconds:g}@{self.noise_db:g}"


@dataclass(frozen=True)
class Cell:
    """One condition of the experiment."""

    model: str
    policy: Policy
    decoding: Decoding = Decoding()
    trailing: Trailing = Trailing()
    control: str = "none"  # or one of CONTROLS

    @property
    def policy_name(self) -> str:
        return str(self.policy) if self.control == "none" else f"mask:{self.control}"

    def __str__(self) -> str:
        """Return the name in records and tables: model, policy, and what is not the default."""
        parts = [self.model, self.policy_name]
        parts += [str(self.decoding)] if self.decoding != Decoding() else []
        parts += [f"+ {self.trailing}"] if self.trailing.seconds else []
        return " ".join(parts)

    def as_record(self) -> dict[str, str]:
        """Return the fields as text, for a record."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    @property
    def reference(self) -> "Cell":
        """The cell to compare with: everything visible, no fallback, all else equal."""
        return Cell(self.model, Policy(), self.decoding.without_fallback, self.trailing)

    @property
    def encoder_cell(self) -> "Cell":
        """The cell with default decoding: the same for cells that share an encoder output."""
        return replace(self, decoding=Decoding())


@dataclass(frozen=True)
class Grid:
    """Lists of settings; the cells are all combinations."""

    policies: tuple[str, ...] = ("full",)
    margins: tuple[float, ...] | None = None  # None: each policy's default
    fills: tuple[str, ...] = ("zero",)
    positions: tuple[str, ...] = ("first",)
    decoding: tuple[str, ...] = ("greedy",)
    trailing: tuple[str, ...] = ("none",)
    sinks: tuple[float, ...] = (0.0,)

    def cells(self, model: str) -> list[Cell]:
        cells = []
        for kind, margin, fill, positions, decoding, trailing, sink in product(
            self.policies,
            self.margins or (None,),
            self.fills,
            self.positions,
            map(Decoding.parse, self.decoding),
            map(Trailing.parse, self.trailing),
            self.sinks,
        ):
            if kind not in KINDS:
                raise OptionError(f"policies must be of {', '.join(KINDS)}, got {kind!r}")
            if kind == "virtual" and (fill, positions) != ("zero", "first"):
                continue
            if sink and (kind in {"full", "virtual"} or positions == "last"):
                continue
            policy = Policy(kind, None if kind == "full" else margin, fill, positions, sink)
            cells.append(Cell(model, policy, decoding, trailing))
        return cells


@dataclass(frozen=True)
class Spec:
    """The definition of an ablation.

    adapter: file of `asrmask train` that the models are loaded with; "": none
    """

    name: str = "custom"
    question: str = "What does Whisper do when its padding is hidden?"
    primary: tuple[str, str] = ("mask:both", "full")
    alpha: float = 0.05
    models: tuple[str, ...] = ("tiny.en",)
    adapter: str = ""
    grid: tuple[Grid, ...] = ()
    seed: int = 0
    batch_size: int = 8
    most_clips: int | None = None
    inspect: bool = False  # also record attention measurements of every head

    def __post_init__(self) -> None:
        if len(self.primary) != 2:
            raise OptionError(f"primary must be two policies, got {list(self.primary)}")
        if not 0 < self.alpha < 1:
            raise OptionError(f"alpha must be between 0 and 1, got {self.alpha}")
        if not self.models:
            raise OptionError("models must be one or more, got none")
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be 1 or more, got {self.batch_size}")
        if self.most_clips is not None and self.most_clips < 1:
            raise OptionError(f"most_clips must be 1 or more, got {self.most_clips}")
        cells = self.cells()  # raises OptionError if a grid is wrong
        for text in self.primary:
            if Cell(self.models[0], Policy.parse(text)) not in cells:
                raise OptionError(f"primary must be of the cells, got {text!r}, which is none")

    def cells(self) -> list[Cell]:
        """Return every cell once, the basic policies and the controls first."""
        cells: list[Cell] = []
        for model in self.models:
            cells += Grid(BASIC).cells(model)
            cells += [Cell(model, Policy("mask:both"), control=name) for name in CONTROLS]
            for grid in self.grid:
                cells += grid.cells(model)
        # the references that cells are compared with must be run too
        return list(dict.fromkeys([*cells, *(cell.reference for cell in cells)]))

    @property
    def hash(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


MARGINS_S = (0.0, 0.16, 0.64, 1.28, 2.56, 6.0)
PRESETS = {
    "quick": Spec(
        name="quick",
        grid=(Grid(("trim", "virtual"), (0.0, 1.28)), Grid(("virtual",))),
        most_clips=5,
    ),
    "standard": Spec(
        name="standard",
        grid=(
            Grid(BASIC, fills=("zero", "silence")),
            Grid(("trim",), MARGINS_S, ("zero", "silence")),
            Grid(("trim",), (0.0, 1.28), ("zero", "silence"), ("last",)),
            Grid(("mask:encoder", "mask:cross"), (1.28,)),
            Grid(("virtual",), (0.0, 0.64, 1.28)),
            Grid(("full", "mask:both", "virtual"), decoding=("beam=5", "greedy,timestamps")),
            Grid(("mask:both", "trim", "virtual"), decoding=("greedy,fallback",)),
            Grid(("full", "mask:both", "virtual"), trailing=("silence=5", "noise=5@-40")),
        ),
    ),
    "full": Spec(
        name="full",
        grid=(
            Grid(
                KINDS,
                MARGINS_S,
                ("zero", "silence", "noise:-40"),
                ("first", "last"),
                ("greedy", "greedy,fallback", "greedy,timestamps", "beam=5", "beam=5,timestamps"),
            ),
            Grid(
                KINDS,
                (0.0, 1.28),
                trailing=("silence=2", "silence=5", "silence=10", "noise=5@-60", "noise=5@-40"),
            ),
        ),
    ),
}


def read(path: Path) -> Spec:
    """Read and validate the spec in a TOML file."""
    return spec_files.read(path, of)


def of(content: Mapping[str, Any]) -> Spec:
    """Build a spec from a table; its `preset` entry names a preset to start from."""
    table = dict(content)
    preset = table.pop("preset", None)
    if preset is not None and preset not in list(PRESETS):
        raise OptionError(f"preset must be one of {', '.join(PRESETS)}, got {brief(preset)}")
    if preset:
        table = asdict(PRESETS[preset]) | table
    grids = table.get("grid", ())
    if not isinstance(grids, (list, tuple)) or not all(isinstance(g, Mapping) for g in grids):
        raise OptionError("grid must be tables, [[grid]], got something else")
    table["grid"] = tuple(Grid(**_validated(Grid, grid, "grid")) for grid in grids)
    return Spec(**_validated(Spec, table, "spec"))


def _validated(kind: type, table: Mapping[str, Any], name: str) -> dict[str, Any]:
    return spec_files.validated(
        kind, table, name, types={"margins": tuple, "most_clips": int}, numbers=NUMBERS
    )
