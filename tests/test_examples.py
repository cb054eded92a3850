"""The examples in docstrings give what they say."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import asrmask

ROOT = Path(asrmask.__file__).parent
WITH_EXAMPLES = [
    path for path in sorted(ROOT.rglob("*.py")) if re.search(r"^ *>>> ", path.read_text(), re.M)
]


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@pytest.mark.parametrize("name", [name_of(path) for path in WITH_EXAMPLES])
def test_examples_in_docstrings_hold(name):
    found = doctest.testmod(import_module(name))
    assert found.attempted
    assert not found.failed
