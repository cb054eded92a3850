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
    sys.modules["torchaudio._extension"] = _absent(reason)
    return import_module("torchaudio")


def _absent(reason: str) -> ModuleType:
    """A stub for torchaudio's compiled extension that reports it as unavailable."""

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
