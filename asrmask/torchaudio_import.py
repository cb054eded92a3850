"""torchaudio beside any build of PyTorch.

The wheel on PyPI links CUDA's libraries, so beside a CPU-only PyTorch `import torchaudio` fails in
its compiled extension. Its transforms and its resampling are plain PyTorch and need no extension.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn


def import_torchaudio() -> Any:
    """The module torchaudio: whole where it imports, otherwise without its compiled extension."""
    try:
        return import_module("torchaudio")
    except (OSError, RuntimeError) as error:  # a library is missing, or of another build
        reason = str(error.__cause__ or error)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
        del sys.modules[name]  # half imported
    sys.modules["torchaudio._extension"] = _absent(reason)
    return import_module("torchaudio")


def _absent(reason: str) -> ModuleType:
    """Stands for torchaudio's compiled extension and says that there is none."""

    def fail_if_no_align(function: Callable[..., Any]) -> Callable[..., NoReturn]:
        def fail(*args: object, **kwargs: object) -> NoReturn:
            raise RuntimeError(
                f"{function.__name__} needs torchaudio's compiled extension, got: {reason}"
            )

        return fail

    module: Any = ModuleType("torchaudio._extension")
    module._IS_TORCHAUDIO_EXT_AVAILABLE = False
    module._IS_ALIGN_AVAILABLE = False
    module._check_cuda_version = lambda: None
    module._load_lib = lambda lib: False
    module.fail_if_no_align = fail_if_no_align
    return module
