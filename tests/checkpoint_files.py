"""A small model of random weights, written in every format that is read."""

import json
import re
import struct

import numpy as np
import torch
from safetensors.torch import save_file

from asrmask.checkpoints import hub
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.whisper import Whisper

# every number differs from its neighbours where it may, so that none can be taken for another
DIMS = ModelDimensions(
    n_mels=7,
    n_audio_ctx=20,
    n_audio_state=16,
    n_audio_head=2,
    n_audio_layer=2,
    n_vocab=60,
    n_text_ctx=12,
    n_text_state=16,
    n_text_head=4,
    n_text_layer=3,
)
# small, but with the windows and tokens of tiny.en
SMALL = ModelDimensions(
    n_mels=80,
    n_audio_ctx=1500,
    n_audio_state=16,
    n_audio_head=2,
    n_audio_layer=2,
    n_vocab=51_864,
    n_text_ctx=448,
    n_text_state=16,
    n_text_head=2,
    n_text_layer=2,
)
HEADS = ((1, 0), (2, 3))
QKV = ("query", "key", "value")


def random_weights(dims=DIMS):
    """Weights of that shape; float16 holds each exactly."""
    torch.manual_seed(0)
    return {
        name: (0.3 * torch.randn(w.shape)).half().float()
        for name, w in Whisper(dims).state_dict().items()
    }


def write_openai(folder, weights=None, **dims):
    path = folder / "model.pt"
    content = {"dims": DIMS.as_dict() | dims, "model_state_dict": weights or random_weights()}
    torch.save(content, path)
    return path


def write_ggml(folder, weights=None, *, kind="f16", **dims):
    path = folder / "ggml.bin"
    d = DIMS.as_dict() | dims
    order = ["n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer"]
    order += ["n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels"]
    parts = [struct.pack("<12i", 0x67676D6C, *(d[name] for name in order), 1)]
    parts += [struct.pack("<2i", 7, 3), bytes(4 * 7 * 3)]  # filters
    parts += [struct.pack("<i", 2), *(struct.pack("<i", 3) + word for word in (b"abc", b"def"))]
    for name, weight in (weights or random_weights()).items():
        values = weight.numpy()
        if name in {"encoder.conv1.bias", "encoder.conv2.bias"}:
            values = values[:, None]
        code = 1 if kind == "f16" and weight.ndim > 1 else 0
        parts.append(struct.pack("<3i", values.ndim, len(name), code))
        parts.append(struct.pack(f"<{values.ndim}i", *values.shape[::-1]) + name.encode())
        parts.append(values.astype("<f2" if code else "<f4").tobytes())
    path.write_bytes(b"".join(parts))
    return path


def hub_name(name):
    """The hub's name of one of openai-whisper's weights."""
    for ours, theirs in [
        ("cross_attn_ln", "encoder_attn_layer_norm"),
        (".attn_ln", ".self_attn_layer_norm"),
        ("mlp_ln", "final_layer_norm"),
        ("cross_attn.", "encoder_attn."),
        (".attn.", ".self_attn."),
        ("query", "q_proj"),
        ("key", "k_proj"),
        ("value", "v_proj"),
        ("attn.out", "attn.out_proj"),
        ("mlp.0", "fc1"),
        ("mlp.2", "fc2"),
        ("token_embedding", "embed_tokens"),
        ("positional_embedding", "embed_positions.weight"),
        ("blocks", "layers"),
        ("ln_post", "layer_norm"),
        ("decoder.ln", "decoder.layer_norm"),
    ]:
        name = name.replace(ours, theirs)
    return f"model.{name}"


def write_hub(folder, weights=None, n_shards=1, **config):
    tensors = {hub_name(name): w.contiguous() for name, w in (weights or random_weights()).items()}
    tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
    write_config(folder, **config)
    if n_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = [f"model-{i + 1:05}-of-{n_shards:05}.safetensors" for i in range(n_shards)]
    places = {name: files[i % n_shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    write_index(folder, places)
    return folder


def write_config(folder, **config):
    numbers = {theirs: DIMS.as_dict()[ours] for ours, theirs in hub.DIMENSIONS.items()}
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper"} | numbers | config))
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": HEADS}))


def write_index(folder, places):
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def ct2_variables(weights, kind):
    """CTranslate2's variables: (values, type code) by name."""
    out = {}

    def put(name, tensor):
        if name.endswith("/weight") and kind in ("int8", "int16"):
            rows = tensor.flatten(1).numpy()
            most = np.abs(rows).max(axis=1) if kind == "int8" else np.abs(rows).max()
            scale = np.float32((127 if kind == "int8" else 1024) / most)
            whole = np.rint(rows * (scale[:, None] if kind == "int8" else scale))
            out[name] = whole.reshape(tensor.shape).astype(kind), 1 if kind == "int8" else 2
            out[f"{name}_scale"] = np.asarray(scale), 0
        elif kind == "bfloat16":
            out[name] = tensor.bfloat16().view(torch.int16).numpy(), 5
        elif kind == "float32":
            out[name] = tensor.numpy(), 0
        else:
            out[name] = tensor.numpy().astype(np.float16), 4

    def norm(theirs, ours):
        put(f"{theirs}/gamma", weights[f"{ours}.weight"])
        put(f"{theirs}/beta", weights[f"{ours}.bias"])

    def linear(theirs, *ours):
        zeros = torch.zeros(DIMS.n_text_state)  # stands where keys have no bias
        put(f"{theirs}/weight", torch.cat([weights[f"{name}.weight"] for name in ours]))
        put(f"{theirs}/bias", torch.cat([weights.get(f"{name}.bias", zeros) for name in ours]))

    for part, n_layer in (("encoder", DIMS.n_audio_layer), ("decoder", DIMS.n_text_layer)):
        for i in range(n_layer):
            theirs, ours = f"{part}/layer_{i}", f"{part}.blocks.{i}"
            own, cross = f"{ours}.attn", f"{ours}.cross_attn"
            linear(f"{theirs}/self_attention/linear_0", *(f"{own}.{x}" for x in QKV))
            linear(f"{theirs}/self_attention/linear_1", f"{own}.out")
            norm(f"{theirs}/self_attention/layer_norm", f"{own}_ln")
            if part == "decoder":
                linear(f"{theirs}/attention/linear_0", f"{cross}.query")
                linear(f"{theirs}/attention/linear_1", f"{cross}.key", f"{cross}.value")
                linear(f"{theirs}/attention/linear_2", f"{cross}.out")
                norm(f"{theirs}/attention/layer_norm", f"{cross}_ln")
            linear(f"{theirs}/ffn/linear_0", f"{ours}.mlp.0")
            linear(f"{theirs}/ffn/linear_1", f"{ours}.mlp.2")
            norm(f"{theirs}/ffn/layer_norm", f"{ours}.mlp_ln")
        put(f"{part}/position_encodings/encodings", weights[f"{part}.positional_embedding"])
    linear("encoder/conv1", "encoder.conv1")
    linear("encoder/conv2", "encoder.conv2")
    put("decoder/embeddings/weight", weights["decoder.token_embedding.weight"])
    norm("encoder/layer_norm", "encoder.ln_post")
    norm("decoder/layer_norm", "decoder.ln")
    out["encoder/num_heads"] = np.asarray(DIMS.n_audio_head, np.int16), 2
    out["decoder/num_heads"] = np.asarray(DIMS.n_text_head, np.int16), 2
    out["decoder/scale_embeddings"] = np.asarray(0, np.int8), 1
    return out


def write_ct2(folder, weights=None, kind="float16", spec="WhisperSpec", version=6, changed=()):
    """changed: (name, new values or None to leave it out) of variables"""
    variables = ct2_variables(weights or random_weights(), kind)
    for name, value in changed:
        if value is None:
            del variables[name]
        else:
            variables[name] = value, 4

    def text(string):
        return struct.pack("<H", len(string) + 1) + string.encode() + b"\0"

    data = struct.pack("<I", version) + text(spec) + struct.pack("<II", 3, len(variables))
    for name, (array, code) in sorted(variables.items()):
        data += text(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += struct.pack("<BI", code, array.nbytes) + array.tobytes()
    data += struct.pack("<I", 1)
    data += text("decoder/projection/weight") + text("decoder/embeddings/weight")
    (folder / "model.bin").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"alignment_heads": HEADS}))
    return folder


def protobuf(*fields):
    """A protobuf message of (number, integer, bytes or text)."""
    return b"".join(
        varint(number << 3) + varint(value)
        if isinstance(value, int)
        else varint(number << 3 | 2) + varint(len(value)) + as_bytes(value)
        for number, value in fields
    )


def as_bytes(value):
    return value.encode() if isinstance(value, str) else value


def varint(value):
    value %= 2**64
    low = [value >> 7 * i & 0x7F for i in range(max(1, -(-value.bit_length() // 7)))]
    return bytes([*(part | 0x80 for part in low[:-1]), low[-1]])


ONNX_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "float16": 10}


def onnx_tensor(name, values):
    """Numbers alone are stored one by one, as onnxruntime's quantiser does."""
    values = np.asarray(values)
    kind = (2, ONNX_TYPES[str(values.dtype)])
    if values.ndim:
        return protobuf(*((1, n) for n in values.shape), kind, (8, name), (9, values.tobytes()))
    if values.dtype == np.float32:
        return protobuf(kind, (4, values.tobytes()), (8, name))
    return protobuf(kind, (5, varint(int(values))), (8, name))


def onnx_tensors(name, values, kind):
    """The tensors of a weight: itself, or 8-bit integers with a scale and a zero point."""
    if kind not in ("uint8", "int8", "int8 rows") or values.ndim == 1 or "positions" in name:
        return [onnx_tensor(name, values.astype("float16" if kind == "float16" else "float32"))]
    axis = values.ndim - 1 if name.startswith("onnx::") else 0  # of the outputs
    others = tuple(i for i in range(values.ndim) if i != axis) if kind == "int8 rows" else None
    low, high = values.min(axis=others, keepdims=True), values.max(axis=others, keepdims=True)
    scale = np.float32((high - low) / 255)
    least = 0 if kind == "uint8" else -128
    zero = np.rint(least - low / scale)
    whole = np.clip(np.rint(values / scale) + zero, least, least + 255)
    dtype = kind.split()[0]
    shape = () if others is None else (-1,)
    return [
        onnx_tensor(f"{name}_quantized", whole.astype(dtype)),
        onnx_tensor(f"{name}_scale", scale.reshape(shape)),
        onnx_tensor(f"{name}_zero_point", zero.astype(dtype).reshape(shape)),
    ]


def onnx_model(part, weights, kind="uint8"):
    """An export of the encoder or the decoder. Matrices have numbers for names."""
    tensors, nodes = [], []
    for name, weight in weights.items():
        theirs = hub_name(name).removeprefix("model.encoder.")
        values = weight.numpy()
        if values.ndim == 2 and "embed" not in theirs:
            operand = f"onnx::MatMul_{1000 + len(nodes)}"
            module = theirs.removesuffix(".weight")
            node = "/" + re.sub(r"\.(?!\d)", "/", module) + "/MatMul"  # /layers.0/fc1/MatMul
            values, theirs = values.T, operand
            quantized = kind in ("uint8", "int8", "int8 rows")
            operator = "MatMulInteger" if quantized else "MatMul"
            inputs = ["x", operand + "_quantized" * quantized]
            named = [(3, node + "_quant" * quantized), (4, operator)]
            nodes.append(protobuf(*((1, text) for text in inputs), *named))
        elif part == "decoder":
            theirs += "_merged_0"
        tensors += onnx_tensors(theirs, values, kind)
    nodes.append(protobuf((1, "a"), (1, "b"), (3, "/layers.0/self_attn/MatMul"), (4, "MatMul")))
    graph = [(1, node) for node in nodes]
    if part == "decoder":  # both branches have the nodes, and share the tensors
        branch = protobuf(*graph)
        attributes = [(5, protobuf((1, name), (6, branch))) for name in ("then", "else")]
        graph = [(1, protobuf((1, "use_cache_branch"), (4, "If"), *attributes))]
    graph += [(5, tensor) for tensor in tensors]
    return protobuf((1, 8), (2, "onnx.quantize"), (7, protobuf(*graph)))


def write_onnx(folder, weights=None, kind="uint8", **config):
    weights = weights or random_weights()
    write_config(folder, **config)
    (folder / "onnx").mkdir(exist_ok=True)
    variant = {"float32": "", "float16": "_fp16"}.get(kind, "_quantized")
    for part, name in (("encoder", "encoder_model"), ("decoder", "decoder_model_merged")):
        own = {name: weight for name, weight in weights.items() if name.startswith(part)}
        (folder / "onnx" / f"{name}{variant}.onnx").write_bytes(onnx_model(part, own, kind))
    return folder
