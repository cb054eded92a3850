"""Read OpenAI's .pt files, which hold `dims` and `model_state_dict`."""

import io
import os
import pickletools
import re
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from asrmask.checkpoints.checkpoint import Checkpoint, dimensions_from
from asrmask.errors import CheckpointError, brief, one_line, printable

ZIP = b"PK\x03\x04"
LEGACY_PICKLES = 5  # magic number, protocol version, system info, content, storage keys
MOST_PICKLE = 2**21  # bytes; the largest model's pickle has 2e5
MOST_NESTED = 100
# globals in the pickle of a state dict, besides storages and dtypes, which are in module torch
GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
}


def read(path: Path) -> Checkpoint:
    """Read a checkpoint from a .pt file. Only tensors and plain data are unpickled."""
    try:
        is_zip = check(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about things that it then rejects
            # mmap: a storage cannot extend beyond the file, whatever size the pickle claims
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        code = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error)[:1000])
        if code:
            raise _asks_for(path, code[1]) from None
        # other messages of the unpickler are misleading advice or a bare number
        says = isinstance(error, RuntimeError | OSError | zipfile.BadZipFile)
        reason = one_line(error)[:120] if says else type(error).__name__
        raise _damaged(path, reason) from None
    if not isinstance(content, dict) or not {"dims", "model_state_dict"} <= set(content):
        got = brief(list(content)) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path}: expected dims and model_state_dict, got {got}")
    weights = content["model_state_dict"]
    if not isinstance(weights, dict):
        raise CheckpointError(
            f"{path}: expected tensors by name in model_state_dict, got {type(weights).__name__}"
        )
    n_left = path.stat().st_size
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: expected tensors by name, got {brief(name)}: {type(value).__name__}"
            )
        n_bytes = value.numel() * value.element_size()
        n_left -= n_bytes
        if n_left < 0 or n_bytes > value.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {brief(name)} must be in the file as a whole, got "
                f"{brief(tuple(value.shape))} with strides {brief(value.stride())}"
            )
    return Checkpoint(dimensions_from(content["dims"], path), dict(weights))


def check(path: Path) -> bool:
    """Reject files that need more time or memory than their size suggests. True: it is a zip."""
    with path.open("rb") as file:
        start = file.read(MOST_PICKLE)
        if start.startswith(ZIP):
            check_pickle(_pickle_in_zip(file, path), path)
            return True
    # torch would extract an old tar archive into a temporary folder
    if not start.startswith(b"\x80") or tarfile.is_tarfile(path):
        raise _damaged(path, f"{len(start)} bytes or more, beginning with {start[:8]!r}")
    several = io.BytesIO(start)
    for _ in range(LEGACY_PICKLES):
        check_pickle(several, path)
    return False


def _pickle_in_zip(file: IO[bytes], path: Path) -> IO[bytes]:
    """Return the pickle in a zip of uncompressed members, as torch.save writes it."""
    n_all = file.seek(0, os.SEEK_END)
    file.seek(max(n_all - 98, 0))
    tail = file.read()
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        # torch finds the central directory by its recorded offset, zipfile by the end of the file
        told, is_long = tail[-6:-2], tail[56:60] == b"PK\x06\x07"
        if is_long:
            told, place = tail[48:56], struct.unpack("<Q", tail[64:72])[0]
        if (
            tail[-22:-18] != b"PK\x05\x06"
            or int.from_bytes(told, "little") != archive.start_dir
            or (is_long and place != n_all - 98)
        ):
            raise _damaged(path, "a zip whose directory is not where it says")
        packed = [one for one in members if one.compress_type or one.file_size > one.compress_size]
        n_bytes = sum(member.file_size for member in members)
        if packed or n_bytes > n_all:
            raise CheckpointError(
                f"{path}: expected a zip of files that are not compressed, got {n_bytes} bytes "
                f"in {n_all}"
            )
        pickles = [one for one in members if one.filename.lower().endswith(".pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MOST_PICKLE:
            sizes = brief([one.file_size for one in pickles])
            raise CheckpointError(
                f"{path}: expected one pickle of {MOST_PICKLE} bytes or less, got {sizes}"
            )
        return io.BytesIO(archive.read(pickles[0]))


def check_pickle(file: IO[bytes], path: Path) -> None:
    """Reject a pickle that imports more than tensors need, or that torch.save would not write.

    torch.save reuses only names and nests little. Reused or deeply nested values could take
    unbounded time to hash or print.
    """
    mark, stack, memo = -1, [], {}  # stack and memo hold nesting depths; a name has depth 0
    for op, arg, _ in pickletools.genops(file):
        value: Any = arg
        if op.name == "GLOBAL" and not (value.startswith("torch ") or value in GLOBALS):
            raise _asks_for(path, value.replace(" ", "."))
        if op.name == "MARK":
            stack.append(mark)
        elif op.name in {"BINPUT", "LONG_BINPUT"}:
            memo[value] = stack[-1]
        elif op.name in {"BINGET", "LONG_BINGET"}:
            if memo[value] != 0:
                raise _damaged(path, "a pickle that uses a value twice")
            stack.append(0)
        else:
            taken = []
            names = [kind.name for kind in op.stack_before]
            if "mark" in names:
                while (depth := stack.pop()) != mark:
                    taken.append(depth)
                names = names[: names.index("mark")]
            taken += [stack.pop() for _ in names]
            is_name = op.name in {"GLOBAL", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING"}
            depth = 0 if is_name else 1 + max(taken, default=0)
            if depth > MOST_NESTED:
                raise _damaged(path, f"values within values, more than {MOST_NESTED}")
            stack += [depth for _ in op.stack_after]


def _asks_for(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: refused, got a pickle that asks for {printable(name[:80])}, "
        f"expected tensors and plain data only"
    )


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: damaged or not a PyTorch file, expected an OpenAI .pt, got {got}"
    )
