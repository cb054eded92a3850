"""Check for optional packages, which the extras in pyproject.toml install."""

from importlib.util import find_spec

from asrmask.errors import MissingPackageError


def require(user: str, *packages: str, install: str = "asrmask[tools]") -> None:
    """Raise MissingPackageError for the first package that is not installed. Imports nothing.

    user:     the feature that needs the packages
    packages: import names
    install:  the argument for pip install
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingPackageError(user, package, install)
