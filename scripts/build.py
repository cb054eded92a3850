"""The build steps of pyproject.toml: compile asrmask/kernels, and put data/ into wheels.

The kernels are compiled by zig, a C compiler that pip installs for the build. Where there is no zig
or it fails, asrmask is installed without them and uses PyTorch's operations.

Virtual padding is made from the speech in data/. Mapping a package to data/ would do the same, but
then an editable install is a finder that loses against a folder named asrmask in the working
directory.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SPEECH = sorted(map(str, Path("data").glob("*.*")))
KERNELS = Path("asrmask", "kernels")
SOURCES = sorted(str(path) for path in KERNELS.glob("*.[ch]"))
PORTABLE = "supported.c"  # runs before the processor is known
TARGET = "x86_64-linux-gnu.2.17"  # any Linux since 2014
FLAGS = ["-O3", "-fPIC", "-std=c11", "-fno-strict-aliasing", "-fno-math-errno"]
FLAGS += ["-Wall", "-Wextra", "-Werror"]
# the C library is in every process that loads the kernels: not linking it saves its stubs
LINK = ["-shared", "-s", "-nostdlib", "-Wl,--allow-shlib-undefined", "-Wl,-z,undefs"]
PROCESSOR = [
    f"-m{name}"
    for name in ("avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512vnni")
]


def compile_kernels(library: Path) -> bool:
    """Compile the kernels into a library; False if this is not the place for them."""
    is_linux = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    if not is_linux or importlib.util.find_spec("ziglang") is None:
        return False
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", TARGET]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        run_zig = partial(subprocess.run, check=True, env=environment)
        objects = []
        for source in map(Path, SOURCES):
            if source.suffix == ".c":
                objects.append(str(Path(folder, source.stem + ".o")))
                flags = FLAGS if source.name == PORTABLE else [*FLAGS, *PROCESSOR]
                run_zig([*zig, *flags, "-c", str(source), "-o", objects[-1]])
        built = Path(folder, library.name)
        run_zig([*zig, *LINK, "-o", str(built), *objects])
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(".part")  # whole or not at all: it may be in use
        shutil.copy(built, part)
        part.replace(library)
    return True


class Build(build_py):
    def run(self) -> None:
        super().run()
        folder = Path("." if self.editable_mode else self.build_lib)
        try:
            compile_kernels(folder / KERNELS / "kernels.so")
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"asrmask: the kernels were not compiled: {error}", file=sys.stderr)
        if not self.editable_mode:  # in a clone, data/ is found beside the package
            speech = Path(self.build_lib, "asrmask", "speech")
            speech.mkdir(parents=True, exist_ok=True)
            for path in SPEECH:
                shutil.copy(path, speech)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *SPEECH, *SOURCES, "scripts/build.py"]


class BuildWheel(bdist_wheel):
    """A wheel with the kernels is for one platform, and for any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        has_kernels = any(Path(self.bdist_dir).rglob("kernels.so"))
        return ("py3", "none", "linux_x86_64") if has_kernels else tag
