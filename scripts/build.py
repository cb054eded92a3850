"""The build step of pyproject.toml: put the sample speech of data/ into wheels.

Virtual padding is made from it. Mapping a package to data/ would do the same, but then an editable
install is a finder that loses against a folder named asrmask in the working directory.
"""

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

SPEECH = sorted(map(str, Path("data").glob("*.*")))


class BuildWithSpeech(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # in a clone, data/ is found beside the package
            folder = Path(self.build_lib, "asrmask", "speech")
            folder.mkdir(parents=True, exist_ok=True)
            for path in SPEECH:
                shutil.copy(path, folder)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *SPEECH, "scripts/build.py"]
