"""Import torchaudio with any build of PyTorch.

The wheel on PyPI links CUDA's libraries, so with a CPU-only PyTorch `import torchaudio` fails in
its compiled extension. Transforms and resampling are plain PyTorch and do not need the extension.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn


def import_torchaudio() -> Any:
    """Import torchaudio, without its compiled extension if that fails to load."""
    try:
        return import_module("torchaudio")
    except (OSError, RuntimeError) as error:  # a library is missing or does not match
        reason = str(error.__cause__ or error)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
        del sys.modules[name]  # partially imported

    def fail_if_no_align(function: Callable[..., Any]) -> Callable[..., NoReturn]:
        def fail(*args: object, **kwargs: object) -> NoReturn:
            name = function.__name__
            raise RuntimeError(f"{name} needs torchaudio's compiled extension, got: {reason}")

        return fail

    stub: Any = ModuleType("torchaudio._extension")  # reports the extension as unavailable
    stub._IS_TORCHAUDIO_EXT_AVAILABLE = stub._IS_ALIGN_AVAILABLE = False
    stub._check_cuda_version = lambda: None
    stub._load_lib = lambda lib: False
    stub.fail_if_no_align = fail_if_no_align
    sys.modules["torchaudio._extension"] = stub
    return import_module("torchaudio")
