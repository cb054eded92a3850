"""Spec files: TOML tables, checked against the fields of a dataclass."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from asrmask.errors import OptionError, brief

Spec = TypeVar("Spec")


def read(path: Path, of: Callable[[Mapping[str, Any]], Spec]) -> Spec:
    """Read a TOML file and build a spec from its table. Every error names the file."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]

    try:
        return of(tomllib.loads(path.read_text(encoding="utf-8")))
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}, expected a spec") from None
    except RecursionError:
        raise OptionError(f"{path}: expected TOML, got a table or list nested too deeply") from None
    except ValueError as error:
        raise OptionError(f"{path}: expected TOML, got {error}") from None


def validated(
    kind: type,
    table: Mapping[str, Any],
    name: str,
    *,
    types: Mapping[str, type] | None = None,
    numbers: Collection[str] = (),
) -> dict[str, Any]:
    """Check a table for a dataclass: names, and types, which are those of its defaults.

    types:   of fields with another type than their default
    numbers: names of lists that hold numbers; others hold strings, or tables that are checked
    returns the table with tuples for lists
    """
    defaults = {field.name: field.default for field in fields(kind)}
    if unknown := sorted(set(table) - set(defaults)):
        raise OptionError(f"{name} must be of {', '.join(defaults)}, got {unknown[0]!r}")
    expected = {key: type(value) for key, value in defaults.items()} | dict(types or {})
    values = {key: value for key, value in table.items() if value is not None}
    for key, value in values.items():
        if expected[key] is tuple:
            values[key] = _validated_list(key, value, key in numbers)
        elif expected[key] is float and type(value) is int:
            values[key] = float(value)
        elif type(value) is not expected[key]:
            raise OptionError(f"{key} must be of type {expected[key].__name__}, got {brief(value)}")
    return values


def _validated_list(key: str, value: Any, of_numbers: bool) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise OptionError(f"{key} must be a list, got {brief(value)}")
    for x in value:
        is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
        is_plain = isinstance(x, (str, int, float, bool, list, tuple, Mapping)) or x is None
        if not is_number if of_numbers else is_plain and not isinstance(x, str):
            wanted = "numbers" if of_numbers else "strings"
            raise OptionError(f"{key} must be a list of {wanted}, got {brief(x)} in it")
    return tuple(map(float, value)) if of_numbers else tuple(value)
