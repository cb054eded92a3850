"""Read OpenAI's .pt files, which hold `dims` and `model_state_dict`."""

import io
import os
import pickletools
import re
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from asrmask.checkpoints.checkpoint import Checkpoint, reading
from asrmask.errors import CheckpointError, brief, printable
from asrmask.model.dimensions import ModelDimensions

CONTENT = "dims and model_state_dict, dicts of ten dimensions and of tensors"
ZIP = b"PK\x03\x04"
LEGACY_PICKLES = 5  # magic number, protocol version, system info, content, storage keys
MAX_PICKLE_BYTES = 2**21  # the largest model's pickle has 2e5
MAX_DEPTH = 100
# globals in the pickle of a state dict, besides storages and dtypes, which are in module torch
GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
}


def read(path: Path) -> Checkpoint:
    """Read a checkpoint from a .pt file. Only tensors and plain data are unpickled."""
    with reading(path, "an OpenAI .pt file"):
        content = _load(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"expected {CONTENT}, got {type(content).__name__}")
        dims, weights = content.get("dims"), content.get("model_state_dict")
        if not isinstance(dims, dict) or not isinstance(weights, dict):
            types = brief({key: type(value).__name__ for key, value in content.items()})
            raise CheckpointError(f"expected {CONTENT}, got {types}")
        n_left = path.stat().st_size
        for name, value in weights.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"expected tensors by name, got {brief(name)}: {type(value).__name__}"
                )
            n_bytes = value.numel() * value.element_size()
            n_left -= n_bytes
            if n_left < 0 or n_bytes > value.untyped_storage().nbytes():
                raise CheckpointError(
                    f"{brief(name)} must be in the file as a whole, got "
                    f"{brief(tuple(value.shape))} with strides {brief(value.stride())}"
                )
        return Checkpoint(ModelDimensions.of(dims), dict(weights))


def _load(path: Path) -> Any:
    """Unpickle a file after checking it."""
    is_zip = check(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about things that it then rejects
            # mmap: a storage cannot extend beyond the file, whatever size the pickle claims
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (RuntimeError, OSError):
        raise
    except Exception as error:
        if found := re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error)[:1000]):
            raise _forbidden(found[1]) from None
        # other messages of the unpickler are misleading advice or a bare number
        raise ValueError(type(error).__name__) from None


def check(path: Path) -> bool:
    """Reject files that need more time or memory than their size suggests. True: it is a zip."""
    with path.open("rb") as file:
        start = file.read(MAX_PICKLE_BYTES)
        if start.startswith(ZIP):
            check_pickle(_pickle_in_zip(file))
            return True
    # torch would extract an old tar archive into a temporary folder
    if not start.startswith(b"\x80") or tarfile.is_tarfile(path):
        raise ValueError(f"{len(start)} bytes or more, beginning with {start[:8]!r}")
    pickles = io.BytesIO(start)
    for _ in range(LEGACY_PICKLES):
        check_pickle(pickles)
    return False


def _pickle_in_zip(file: IO[bytes]) -> IO[bytes]:
    """Return the pickle in a zip of uncompressed members, as torch.save writes it."""
    n_file = file.seek(0, os.SEEK_END)
    file.seek(max(n_file - 98, 0))
    tail = file.read()
    with zipfile.ZipFile(file) as archive:
        # torch finds the central directory by its recorded offset, zipfile by the end of the file
        offset, zip64_record = tail[-6:-2], n_file - 98
        if tail[56:60] == b"PK\x06\x07":  # zip64
            offset, zip64_record = tail[48:56], int.from_bytes(tail[64:72], "little")
        if (
            tail[-22:-18] != b"PK\x05\x06"
            or int.from_bytes(offset, "little") != archive.start_dir
            or zip64_record != n_file - 98
        ):
            raise ValueError("a zip whose directory is not at its recorded offset")
        members = archive.infolist()
        n_bytes = sum(member.file_size for member in members)
        is_packed = any(m.compress_type or m.file_size > m.compress_size for m in members)
        if is_packed or n_bytes > n_file:
            raise CheckpointError(
                f"expected a zip of files that are not compressed, got {n_bytes} bytes in {n_file}"
            )
        pickles = [member for member in members if member.filename.lower().endswith(".pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
            sizes = brief([member.file_size for member in pickles])
            raise CheckpointError(
                f"expected one pickle of {MAX_PICKLE_BYTES} bytes or less, got {sizes}"
            )
        return io.BytesIO(archive.read(pickles[0]))


def check_pickle(file: IO[bytes]) -> None:
    """Reject a pickle that imports more than tensors need, or that torch.save would not write.

    torch.save reuses only names and nests little. Reused or deeply nested values could take
    unbounded time to hash or print.
    """
    mark, stack, memo = -1, [], {}  # stack and memo hold nesting depths; a name has depth 0
    for op, arg, _ in pickletools.genops(file):
        value: Any = arg
        if op.name == "GLOBAL" and not (value.startswith("torch ") or value in GLOBALS):
            raise _forbidden(value.replace(" ", "."))
        if op.name == "MARK":
            stack.append(mark)
        elif op.name in {"BINPUT", "LONG_BINPUT"}:
            memo[value] = stack[-1]
        elif op.name in {"BINGET", "LONG_BINGET"}:
            if memo.get(value) != 0:
                raise ValueError("a pickle that uses a value twice")
            stack.append(0)
        else:
            popped = []
            arguments = [kind.name for kind in op.stack_before]
            if "mark" in arguments:
                while (depth := stack.pop()) != mark:
                    popped.append(depth)
                arguments = arguments[: arguments.index("mark")]
            popped += [stack.pop() for _ in arguments]
            is_name = op.name in {"GLOBAL", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING"}
            depth = 0 if is_name else 1 + max(popped, default=0)
            if depth > MAX_DEPTH:
                raise ValueError(f"values within values, more than {MAX_DEPTH}")
            stack += [depth for _ in op.stack_after]


def _forbidden(name: str) -> CheckpointError:
    return CheckpointError(
        f"refused, got a pickle that imports {printable(name[:80])}, "
        f"expected tensors and plain data only"
    )
