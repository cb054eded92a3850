"""Damaged and hostile checkpoints without end: each gives a model or is refused with our errors.

Case number n of a seed is always the same files, so that a failure can be repeated.
"""

import io
import json
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_files import (
    DIMS,
    protobuf,
    random_weights,
    write_ct2,
    write_ggml,
    write_hub,
    write_onnx,
    write_openai,
)
from fuzzing_audio import DAMAGES

from asrmask.checkpoints import load_model
from asrmask.errors import CheckpointError, OptionError

Files = dict[str, bytes]
Rng = np.random.Generator

NUMBERS = [-1, 0, 1, 2, 3, 4, 8, 15, 16, 17, 20, 60, 1000, 10**5, 10**8, 2**31 - 1, 2**31, 2**40]
NUMBERS += [2**63, 2**64, 10**30]
VALUES = [*NUMBERS, True, None, 1.5, float("nan"), float("inf"), "16", "", [], {}, [[1, 0]]]
VALUES += [[[9, 9]], [[-1, 0]], [[0, 0]] * 5000, "x" * 10_000, [1, 2, 3], {"a": {"b": []}}]
DTYPES = ["F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "", 5]
TYPES = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16]
TYPES += [torch.float8_e4m3fn, torch.int64]


def case(seed: int, number: int, folder: Path) -> tuple[str, Callable[[], object]]:
    """The name of a case, and what runs it: any exception that comes of that is a defect."""
    rng = np.random.default_rng([seed, number])
    canary = folder / "canary"
    family = pick(rng, list(WAYS))
    kind = pick(rng, [kind for kind in whole(folder) if kind.startswith(family)])
    files = dict(whole(folder)[kind])
    told = []
    for _ in range(rng.integers(1, 3)):
        way = pick(rng, [damage, *WAYS[family]])
        files = way(rng, files, canary)
        told.append(way.__name__)
    compute_type = "int8" if rng.random() < 0.2 else "float32"
    target = folder / "case"

    def run() -> None:
        target.mkdir(exist_ok=True)
        for old in target.iterdir():
            old.unlink()
        for name, content in files.items():
            (target / name).write_bytes(content)
        path = next((target / name for name in ("model.pt", "ggml.bin") if name in files), target)
        message = ""
        try:
            model = load_model(str(path), device="cpu", compute_type=compute_type)
        except (CheckpointError, OptionError) as error:
            message = str(error)
        else:
            tokens = torch.zeros(1, 1, dtype=torch.int64)
            with torch.inference_mode():
                model(torch.zeros(1, model.dims.n_mels, 2), tokens)
        assert not canary.exists(), "a pickle ran code"
        assert len(message.splitlines()) <= 1, f"expected one line, got {message!r}"
        assert len(message) < 1000, f"expected a short line, got {len(message)} characters"

    return f"{kind}: {', '.join(told)}, {compute_type}", run


@cache
def whole(folder: Path) -> dict[str, Files]:
    """A small model in every format that is read."""
    writers: dict[str, Callable[[Path], object]] = {
        "zip": write_openai,
        "legacy": lambda to: save(to / "model.pt", content(), zipped=False),
        "hub": write_hub,
        "hub in 2 files": lambda to: write_hub(to, n_shards=2),
        "ct2 float16": write_ct2,
        "ct2 float32": lambda to: write_ct2(to, kind="float32"),
        "ct2 bfloat16": lambda to: write_ct2(to, kind="bfloat16"),
        "ct2 int8": lambda to: write_ct2(to, kind="int8"),
        "ct2 int16": lambda to: write_ct2(to, kind="int16"),
        "ggml float16": write_ggml,
        "ggml float32": lambda to: write_ggml(to, kind="f32"),
        "onnx float32": lambda to: write_onnx(to, kind="float32"),
        "onnx float16": lambda to: write_onnx(to, kind="float16"),
        "onnx uint8": write_onnx,
        "onnx by row": lambda to: write_onnx(to, kind="int8 rows"),
    }
    found = {}
    for kind, write in writers.items():
        to = folder / f"whole {kind}"
        to.mkdir()
        write(to)
        paths = sorted(path for path in to.rglob("*") if path.is_file())
        found[kind] = {path.name: path.read_bytes() for path in paths}
    return found


def pick(rng: Rng, items: Any) -> Any:
    return items[rng.integers(len(items))]


def content() -> dict[str, Any]:
    return {"dims": DIMS.as_dict(), "model_state_dict": random_weights()}


def save(to: Any, value: object, zipped: bool = True) -> None:
    torch.save(value, to, _use_new_zipfile_serialization=zipped)


def damage(rng: Rng, files: Files, canary: Path) -> Files:
    """Bytes of one file change."""
    name = pick(rng, list(files))
    changed = bytearray(files[name])
    others = {key: bytes(value) for key, value in files.items()}
    return files | {name: bytes(pick(rng, DAMAGES)(rng, changed, others))}


# ---- what is special about .pt files


class Code:
    """Pickled, it is a call."""

    def __init__(self, function: Callable[..., object], *arguments: object):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def changed_content(rng: Rng, files: Files, canary: Path) -> Files:
    """A dimension or a tensor is another one."""
    whole = content()
    dims, weights = whole["dims"], whole["model_state_dict"]
    sound = dict(weights)
    for _ in range(rng.integers(1, 3)):
        if rng.random() < 0.3:
            dims[pick(rng, list(dims))] = pick(rng, VALUES)
        else:
            name = pick(rng, list(weights))
            weights[name] = odd_tensor(rng, sound[name])
    if rng.random() < 0.2:  # dimension and tensor agree
        n = int(pick(rng, [1, 2, 3, 10**6, 10**8, 2**31 - 1]))
        dims["n_vocab"], name = n, "decoder.token_embedding.weight"
        weights[name] = sound[name][:1].expand(n, -1)
    return saved(whole, zipped=rng.random() < 0.6)


def other_model(rng: Rng, files: Files, canary: Path) -> Files:
    """A whole model of other dimensions, which fit each other and the tensors."""
    width, n_head = int(pick(rng, [1, 2, 3, 4, 5, 6, 8, 12])), int(pick(rng, [1, 1, 2, 3]))
    widths = {"n_audio_state": width, "n_text_state": width}
    heads = {"n_audio_head": n_head, "n_text_head": n_head}
    names = ["n_mels", "n_audio_ctx", "n_audio_layer", "n_vocab", "n_text_ctx", "n_text_layer"]
    few = {pick(rng, names): int(pick(rng, [1, 2, 3, 7]))}
    dims = replace(DIMS, **widths, **heads, **few)
    try:
        weights = random_weights(dims)
    except (ZeroDivisionError, RuntimeError, CheckpointError):  # of a width that no model can have
        weights = random_weights()
    return saved({"dims": dims.as_dict(), "model_state_dict": weights}, zipped=rng.random() < 0.6)


def odd_tensor(rng: Rng, weight: torch.Tensor) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: weight[:1].expand(weight.shape[0], *weight.shape[1:]),
        lambda: weight.flatten()[:1].expand(int(pick(rng, [1, 10**4, 10**9, 10**12]))),
        lambda: weight.flatten()[:4].as_strided((3, 3), (1, 0)),
        lambda: weight.T.contiguous().T if weight.ndim == 2 else weight.flip(0),
        lambda: weight.flatten()[: int(rng.integers(weight.numel()))],
        lambda: weight.to(pick(rng, TYPES)),
        lambda: weight.reshape(*[1] * int(rng.integers(70)), *weight.shape),
        lambda: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([weight.flatten(), weight.flatten()[:2]]),
        lambda: weight.to_sparse(),
        lambda: weight.flatten(1).to_sparse_csr() if weight.ndim > 1 else weight.to_sparse(),
        lambda: weight.to("meta"),
        lambda: torch.nn.Parameter(weight),
        lambda: weight.clone().requires_grad_(),
        lambda: weight.unsqueeze(0).to_mkldnn() if torch.backends.mkldnn.is_available() else weight,
        lambda: weight * float("nan"),
        lambda: pick(rng, VALUES),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that torch is about to give up
        return pick(rng, kinds)()


def hostile(rng: Rng, files: Files, canary: Path) -> Files:
    """A pickle that asks for a call, or holds what is dear to hash or to show."""
    shell = f"touch '{canary}'"
    calls = [
        Code(os.system, shell),
        Code(eval, f"__import__('os').system({shell!r})"),
        Code(exec, f"__import__('os').system({shell!r})"),
        Code(Path.touch, canary),
        Code(getattr, Code(__import__, "os"), "system"),
        Code(torch.load, str(canary)),
        Code(torch.zeros, 10**9),
        Code(bytearray, 10**9),
    ]
    deep: Any = ()
    for _ in range(200):
        deep = (deep, deep)
    nested: Any = []
    for _ in range(200):
        nested = [nested, nested]
    long = -(10**5000)
    odd = pick(rng, [*calls, deep, nested, long])
    value = content()
    places: list[Callable[[], object]] = [
        lambda: value.update(more=odd),
        lambda: value.update(dims=odd),
        lambda: value["dims"].update(n_mels=odd),
        lambda: value["model_state_dict"].update(more=odd),
        lambda: value["model_state_dict"].update({"decoder.ln.bias": odd}),
    ]
    pick(rng, places)()
    if rng.random() < 0.3:
        return {"model.pt": pickle.dumps({"dims": 1, "x": calls[0]}, int(rng.integers(6)))}
    return saved(value, zipped=rng.random() < 0.6)


def dear_key(rng: Rng, files: Files, canary: Path) -> Files:
    """A key whose hash would take for ever, or overflow the stack: written by hand."""
    if rng.random() < 0.5:
        key = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(100))
    else:
        key = b")" + b"\x85" * int(pick(rng, [99, 1000, 10**6]))
    return {"model.pt": zipped({"data.pkl": b"\x80\x02}" + key + b"K\x01s."})}


def saved(value: object, zipped: bool) -> Files:
    file = io.BytesIO()
    try:
        save(file, value, zipped)
    except (RuntimeError, NotImplementedError, TypeError, RecursionError):
        return {"model.pt": b"\x80\x02}."}  # what cannot be written cannot be read either
    return {"model.pt": file.getvalue()}


def members_of(files: Files) -> Files:
    try:
        with zipfile.ZipFile(io.BytesIO(files["model.pt"])) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # damaged before
        return members_of(saved(content(), zipped=True))


def zipped(members: Files, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name if "/" in name else f"archive/{name}", data)
    return file.getvalue()


def damaged_member(rng: Rng, files: Files, canary: Path) -> Files:
    """Bytes of a file in the zip change, its checksum with them."""
    members = members_of(files)
    name = pick(rng, list(members))
    if rng.random() < 0.7:
        name = next((key for key in members if key.endswith("data.pkl")), name)
    return {"model.pt": zipped(members | damage(rng, {name: members[name]}, canary))}


def zip_trick(rng: Rng, files: Files, canary: Path) -> Files:
    """The zip itself is unlike those of torch.save."""
    members = members_of(files)
    names = list(members)
    first = names[0].split("/")[0]
    tricks: list[Callable[[], bytes]] = [
        lambda: zipped(members, zipfile.ZIP_DEFLATED),
        lambda: zipped(members, zipfile.ZIP_BZIP2),
        lambda: zipped(members | {pick(rng, names): bytes(10**7)}, zipfile.ZIP_DEFLATED),
        lambda: zipped(members | {f"{first}/constants.pkl": b"\x80\x02}."}),
        lambda: zipped(members | {f"{first}/DATA.PKL": b"\x80\x02}."}),
        lambda: zipped(members | {f"{first}/byteorder": pick(rng, [b"big", b"", b"\xff"])}),
        lambda: zipped(members | {f"{first}/version": pick(rng, [b"99", b"", b"x" * 99])}),
        lambda: zipped({key: members[key] for key in names if rng.random() < 0.95}),
        lambda: zipped(dict(zip(rng.permutation(names), members.values(), strict=True))),
        lambda: zipped({f"{key}/../{key}": data for key, data in members.items()}),
        lambda: rng.bytes(int(rng.integers(1, 200))) + zipped(members),
        lambda: zipped(members) + rng.bytes(int(rng.integers(1, 200))),
        lambda: zipped(members) * 2,
        lambda: with_directory(rng, zipped(members)),
        lambda: with_directory(rng, files.get("model.pt", b"")),
        lambda: tar(members),
    ]
    return {"model.pt": pick(rng, tricks)()}


def with_directory(rng: Rng, whole: bytes) -> bytes:
    """A number in the zip's directory is another one."""
    changed = bytearray(whole)
    for signature, fields in ((b"PK\x01\x02", 46), (b"PK\x05\x06", 22), (b"PK\x06\x06", 56)):
        places = [i for i in range(len(whole)) if whole.startswith(signature, i)]
        if places and rng.random() < 0.5:
            at = pick(rng, places) + int(rng.integers(4, fields - 4))
            value = int(pick(rng, [0, 1, 2, 100, len(whole), 2**31, 2**32 - 1]))
            changed[at : at + 4] = struct.pack("<I", value)
    return bytes(changed)


def tar(members: Files) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("storages", "tensors", "pickle", *members):
            info = tarfile.TarInfo(name)
            data = members.get(name, b"\x80\x02}.")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


# ---- what is special about folders


def changed_json(rng: Rng, files: Files, canary: Path) -> Files:
    """A value in a JSON file is another one."""
    name = pick(rng, [name for name in files if name.endswith(".json")])
    try:
        whole = json.loads(files[name])
        where = whole.get("weight_map", whole)
        key = pick(rng, list(where))
    except (ValueError, AttributeError, RecursionError):  # damaged before
        return files | {name: b"[" * 10_000}
    if rng.random() < 0.2:
        del where[key]
    else:
        others = [*VALUES, *files, "../model.safetensors", "/dev/zero", "nul\0", "n" * 5000]
        where[key] = pick(rng, others)
    return files | {name: json.dumps(whole).encode()}


def changed_header(rng: Rng, files: Files, canary: Path) -> Files:
    """A tensor of a safetensors file has another type, shape or place."""
    name = pick(rng, [name for name in files if name.endswith(".safetensors")] or [None])
    try:
        (n,) = struct.unpack("<Q", files[name][:8])
        header = json.loads(files[name][8 : 8 + n])
        tensor = header[pick(rng, list(header))]
        key = pick(rng, ["dtype", "shape", "data_offsets"])
        if key == "dtype":
            tensor[key] = pick(rng, DTYPES)
        elif rng.random() < 0.2:
            tensor[key] = pick(rng, VALUES)
        else:
            tensor[key][rng.integers(len(tensor[key]))] = pick(rng, NUMBERS)
    except (KeyError, ValueError, TypeError, AttributeError, struct.error, IndexError):
        return files  # damaged before
    text = json.dumps(header).encode()
    return files | {name: struct.pack("<Q", len(text)) + text + files[name][8 + n :]}


def changed_variable(rng: Rng, files: Files, canary: Path) -> Files:
    """A variable of CTranslate2's has another shape or type, or there are aliases of it."""
    whole = bytearray(files["model.bin"])
    names = [b"/weight\0", b"/bias\0", b"_scale\0", b"encodings\0", b"num_heads\0", b"gamma\0"]
    name = pick(rng, names)
    places = [i + len(name) for i in range(len(whole)) if whole.startswith(name, i)]
    if places and rng.random() < 0.8:
        at = pick(rng, places)
        field = int(rng.integers(5))
        if field == 0:
            whole[at : at + 1] = bytes([int(rng.integers(256))])
        else:
            value = int(pick(rng, [0, 1, 2, 16, 48, 10**6, 10**8, 2**31, 2**32 - 1]))
            at += 1 + 4 * (field - 1)
            whole[at : at + 4] = struct.pack("<I", value)
    else:
        weight = b"decoder/embeddings/weight\0"
        alias = b"decoder/layer_%d/ffn/linear_0/weight\0"
        n = int(pick(rng, [1, 10, 10_000]))
        pairs = b"".join(
            struct.pack("<H", len(text)) + text for i in range(n) for text in (alias % i, weight)
        )
        whole = whole[: -len(weight) - 40] + struct.pack("<I", n) + pairs
    return files | {"model.bin": bytes(whole)}


OPENAI = [
    changed_content,
    changed_content,
    other_model,
    hostile,
    dear_key,
    damaged_member,
    damaged_member,
]


def changed_number(rng: Rng, files: Files, canary: Path) -> Files:
    """A number in the header of a ggml file, or before a weight's name, is another one."""
    changed = bytearray(files["ggml.bin"])
    at = 4 * int(rng.integers(1, 20))
    if rng.random() < 0.7:
        name = pick(rng, list(random_weights())).encode()
        at = changed.find(name) - 4 * int(rng.integers(1, 6))
    value = int(pick(rng, [-(2**31), *NUMBERS[:16]])) + int(rng.integers(0, 2))
    if 0 <= at <= len(changed) - 4:
        changed[at : at + 4] = struct.pack("<i", min(value, 2**31 - 1))
    return files | {"ggml.bin": bytes(changed)}


def near_a_name(rng: Rng, files: Files, canary: Path) -> Files:
    """A number of an ONNX file, beside the name of a tensor or node, is another one."""
    name = pick(rng, [name for name in files if name.endswith(".onnx")])
    changed = bytearray(files[name])
    part = pick(rng, [b".weight", b".bias", b"MatMul", b"_scale", b"_zero_point", b"_quantized"])
    places = [i for i in range(len(changed)) if changed.startswith(part, i)] or [0]
    at = pick(rng, places) + int(rng.integers(-20, 40))
    changed[max(at, 0) : at + 1] = pick(
        rng, [b"", b"\0", b"\x7f", b"\xff", b"\xff\x7f", rng.bytes(9)]
    )
    return files | {name: bytes(changed)}


def odd_graph(rng: Rng, files: Files, canary: Path) -> Files:
    """An ONNX file has one more graph, of odd tensors and of products by any of them."""
    name = pick(rng, [name for name in files if name.endswith(".onnx")])
    names = ["layer_norm.weight", "conv1.weight_quantized", "conv1.weight_scale", "x.weight"]
    names += [f"onnx::MatMul_1000{end}" for end in ("", "_quantized", "_scale", "_zero_point")]
    names += ["model.decoder.embed_tokens.weight_merged_0_quantized", ""]
    graph: list[tuple[int, object]] = []
    for _ in range(rng.integers(1, 4)):
        dims = [(1, pick(rng, NUMBERS)) for _ in range(pick(rng, [0, 1, 2, 3, 70]))]
        fields = [*dims, (2, pick(rng, [*range(18), 10**9])), (8, pick(rng, names))]
        fields.append((pick(rng, [4, 5, 9]), rng.bytes(pick(rng, [0, 1, 4, 64, 10**5]))))
        fields += [(pick(rng, range(16)), pick(rng, NUMBERS))] * pick(rng, [0, 0, 1, 10**4])
        graph.append((5, protobuf(*fields)))
    for i in range(pick(rng, [0, 1, 10, 5000])):
        node = [(1, "x"), (1, pick(rng, names)), (3, f"/layers.{i}/fc1/MatMul"), (4, "MatMul")]
        graph.append((1, protobuf(*node)))
    nested = protobuf(*graph)
    for _ in range(pick(rng, [0, 1, 300])):
        nested = protobuf((1, protobuf((5, protobuf((6, nested))))))
    more = protobuf((7, nested))
    return files | {name: more + files[name] if rng.random() < 0.5 else files[name] + more}


WAYS: dict[str, list[Callable[[Rng, Files, Path], Files]]] = {
    "zip": [*OPENAI, zip_trick, zip_trick],
    "legacy": [*OPENAI],
    "hub": [changed_json, changed_header, changed_header],
    "ggml": [changed_number, changed_number],
    "onnx": [changed_json, near_a_name, near_a_name, odd_graph, odd_graph],
    "ct2": [changed_json, changed_variable, changed_variable, changed_variable],
}
