"""Five file formats, the official names, and what is said of files that are not what they seem."""

import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_files import (
    DIMS,
    HEADS,
    ct2_variables,
    protobuf,
    random_weights,
    write_ct2,
    write_ggml,
    write_hub,
    write_onnx,
    write_openai,
)

from asrmask.checkpoints import available_models, load_model, registry
from asrmask.cli.models import n_parameters
from asrmask.errors import CheckpointError
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.whisper import Whisper


def run(model):
    """Logits of a short text after a little noise."""
    torch.manual_seed(1)
    dims = model.dims
    mel = torch.randn(2, dims.n_mels, 2 * min(dims.n_audio_ctx, 20))
    tokens = torch.randint(dims.n_vocab, (2, 5))
    with torch.inference_mode():
        return model(mel, tokens)


def refusal(path):
    """The one line in which a file or folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        load_model(str(path))
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert "got" in line
    assert re.search("expected|must", line)
    return line


# ---- the five formats


@pytest.mark.parametrize(
    ("write", "tolerance", "heads"),
    [
        pytest.param(write_openai, 0, None, id="openai"),
        pytest.param(write_ggml, 0, None, id="ggml float16"),
        pytest.param(lambda to: write_ggml(to, kind="f32"), 0, None, id="ggml float32"),
        pytest.param(write_hub, 0, HEADS, id="hub"),
        pytest.param(lambda to: write_hub(to, n_shards=3), 0, HEADS, id="hub, 3 shards"),
        pytest.param(write_ct2, 0, HEADS, id="ct2 float16"),
        pytest.param(lambda to: write_ct2(to, kind="float32"), 0, HEADS, id="ct2 float32"),
        pytest.param(lambda to: write_ct2(to, kind="bfloat16"), 1e-2, HEADS, id="ct2 bfloat16"),
        pytest.param(lambda to: write_ct2(to, kind="int16"), 1e-2, HEADS, id="ct2 int16"),
        pytest.param(lambda to: write_ct2(to, kind="int8"), 1e-2, HEADS, id="ct2 int8"),
        pytest.param(lambda to: write_onnx(to, kind="float32"), 0, HEADS, id="onnx float32"),
        pytest.param(lambda to: write_onnx(to, kind="float16"), 0, HEADS, id="onnx float16"),
        pytest.param(write_onnx, 1e-2, HEADS, id="onnx uint8"),
        pytest.param(lambda to: write_onnx(to, kind="int8"), 1e-2, HEADS, id="onnx int8"),
        pytest.param(lambda to: write_onnx(to, kind="int8 rows"), 1e-2, HEADS, id="onnx by row"),
    ],
)
def test_every_format_gives_back_what_was_written(tmp_path, write, tolerance, heads):
    weights = random_weights()
    model = load_model(str(write(tmp_path)), device="cpu")
    assert model.dims == DIMS
    assert model.alignment_heads == (heads or Whisper(DIMS).alignment_heads)
    assert model.state_dict().keys() == weights.keys()
    for name, got in model.state_dict().items():
        error = (got - weights[name]).abs().max() / weights[name].abs().max()
        assert error <= tolerance, name
    original = Whisper(DIMS).eval()
    original.load_state_dict(weights)
    expected = run(original)
    assert (run(model) - expected).std() <= (0.1 if tolerance else 1e-6) * expected.std()
    assert not model.training
    assert {w.dtype for w in model.state_dict().values()} == {torch.float32}


def test_int8_values_are_the_integers_over_the_scale_of_their_row(tmp_path):
    variables = ct2_variables(random_weights(), "int8")
    whole, scale = (variables[f"decoder/embeddings/weight{x}"][0] for x in ("", "_scale"))
    model = load_model(str(write_ct2(tmp_path, kind="int8")))
    expected = torch.from_numpy(whole / scale[:, None]).float()
    torch.testing.assert_close(model.decoder.token_embedding.weight.data, expected)


def test_folder_without_alignment_heads_uses_the_upper_half_of_the_decoder(tmp_path):
    write_hub(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(str(tmp_path)).alignment_heads == Whisper(DIMS).alignment_heads


def test_reads_the_weights_of_openai_whispers_own_model(tmp_path):
    from whisper.model import ModelDimensions as TheirDimensions
    from whisper.model import Whisper as Theirs

    torch.manual_seed(0)
    theirs = Theirs(TheirDimensions(**DIMS.as_dict()))
    torch.nn.init.normal_(theirs.decoder.positional_embedding)
    path = write_openai(tmp_path, theirs.state_dict())
    assert load_model(str(path)).state_dict().keys() == theirs.state_dict().keys()
    tokens = torch.arange(5)[None]
    mel = torch.randn(1, DIMS.n_mels, 2 * DIMS.n_audio_ctx)
    torch.testing.assert_close(load_model(str(path))(mel, tokens), theirs(mel, tokens).detach())


def test_dtype_and_halved_files(tmp_path):
    halved = {name: w.half() for name, w in random_weights().items()}
    path = write_openai(tmp_path, halved)
    assert load_model(str(path)).dtype == torch.float32
    assert load_model(str(path), compute_type="float16", in_memory=True).dtype == torch.float16


def test_the_bundled_tiny_en_is_of_its_official_shape(model):
    assert model.dims.as_dict() == registry.dimensions("tiny.en")
    assert model.alignment_heads == registry.alignment_heads("tiny.en")
    assert not model.is_multilingual
    assert run(model).isfinite().all()


def test_a_bundled_model_with_one_flipped_bit_is_refused(tmp_path, monkeypatch):
    shutil.copy(registry.bundled_folder("tiny.en") / "model.bin", tmp_path)
    with (tmp_path / "model.bin").open("r+b") as file:
        file.seek(40_000_000)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    monkeypatch.setattr(registry, "bundled_folder", lambda name: tmp_path)
    line = refusal("tiny.en")
    assert f"{tmp_path / 'model.bin'}: wrong content, got sha256" in line
    assert registry.BUNDLED_SHA256[:16] in line


# ---- the official names


def cut(name):
    """The shape of an official model, all but the number of its layers."""
    dims = ModelDimensions.of(registry.dimensions(name))
    return replace(dims, n_audio_layer=1, n_text_layer=1)


SHAPES = {cut(name): name for name in available_models()}


@pytest.mark.parametrize("dims", SHAPES, ids=SHAPES.values())
def test_every_official_shape_runs(dims):
    with torch.device("meta"):
        model = Whisper(dims)
    model.to_empty(device="cpu").requires_grad_(False)
    noise = 0.05 * torch.randn(100_003)  # drawing 100 million would take longer than all the rest
    for weight in model.state_dict().values():
        weight.view(-1)[:] = noise.repeat(-(-weight.numel() // len(noise)))[: weight.numel()]
    logits = run(model)
    assert logits.shape == (2, 5, dims.n_vocab)
    assert logits.isfinite().all()
    assert logits.std() > 0


# as openai-whisper's README gives them, in millions
SIZES = {"tiny": 39, "base": 74, "small": 244, "medium": 769, "large": 1550, "turbo": 809}


@pytest.mark.parametrize("name", available_models())
def test_every_official_shape_has_its_published_size(name):
    with torch.device("meta"):
        model = Whisper(ModelDimensions.of(registry.dimensions(name)))
    n = sum(w.numel() for w in model.state_dict().values())
    assert n == n_parameters(registry.dimensions(name))
    family = next(family for family in ("turbo", *SIZES) if family in name)
    assert n / 1e6 == pytest.approx(SIZES[family], rel=0.04)


def test_bands_and_vocabularies_of_the_official_models():
    newest = {"large-v3", "large", "large-v3-turbo", "turbo"}
    for name in available_models():
        dims = registry.dimensions(name)
        tokens = 51_864 if name.endswith(".en") else 51_866 if name in newest else 51_865
        assert (dims["n_mels"], dims["n_vocab"]) == (128 if name in newest else 80, tokens)


def test_names_addresses_and_hashes_are_openai_whispers():
    import whisper

    assert available_models() == whisper.available_models()
    assert {name: registry.url(name) for name in available_models()} == whisper._MODELS
    for name, url in whisper._MODELS.items():
        assert registry.sha256(name) == url.split("/")[-2]
        assert re.fullmatch("[0-9a-f]{64}", registry.sha256(name))


def test_alignment_heads_are_those_that_openai_whisper_unpacks():
    import whisper

    for name in available_models():
        kept = {}
        stand_in = SimpleNamespace(
            dims=SimpleNamespace(**registry.dimensions(name)),
            register_buffer=lambda key, value, persistent, kept=kept: kept.update({key: value}),
        )
        whisper.Whisper.set_alignment_heads(stand_in, whisper._ALIGNMENT_HEADS[name])
        expected = [tuple(pair) for pair in kept["alignment_heads"].indices().T.tolist()]
        assert list(registry.alignment_heads(name)) == expected


@pytest.mark.parametrize("root", [None, "somewhere"])
@pytest.mark.parametrize("cache", [None, "/var/elsewhere"])
def test_files_are_kept_where_openai_whisper_keeps_them(monkeypatch, cache, root):
    import whisper

    class Asked(Exception):
        pass

    def download(url, folder, in_memory):
        raise Asked(os.path.join(folder, os.path.basename(url)))

    monkeypatch.setattr(whisper, "_download", download)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    for name in available_models():
        with pytest.raises(Asked) as asked:
            whisper.load_model(name, download_root=root)
        assert str(registry.cached_file(name, root)) == str(asked.value)


# ---- files that are refused


class Code:
    """Pickled, it is a call of os.system."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("dump", [torch.save, lambda x, to: to.write_bytes(pickle.dumps(x, 2))])
def test_code_in_a_pickle_is_not_run(tmp_path, dump):
    trace, path = tmp_path / "ran", tmp_path / "model.pt"
    dump({"dims": DIMS.as_dict(), "model_state_dict": {}, "more": Code(trace)}, path)
    assert "system" in refusal(path)
    assert not trace.exists()
    with suppress(RuntimeError):
        torch.load(path, weights_only=False)  # where it is let, the code does run
    assert trace.exists()


def test_a_name_that_is_neither_official_nor_a_path_is_refused():
    for name in ("tiny.fr", "no/such/file.pt", "two\nlines", "nul\0", "long" * 2000):
        line = refusal(name)
        assert "tiny.en, tiny, base.en" in line
        assert repr(name)[:20] in line


def without(name):
    return {key: w for key, w in random_weights().items() if key != name}


CONV = "encoder.conv1.weight"
NORM = "decoder.blocks.1.mlp_ln.weight"
CT2_NORM = "decoder/layer_1/ffn/layer_norm/gamma"
TOO_WIDE = {NORM: torch.zeros(17)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"dims": None}, "ten dimensions"),
        ({"dims": {}}, "n_mels"),
        ({"dims": {"n_mels": 80}}, "n_audio_ctx"),
        ({"dims": DIMS.as_dict() | {"n_mels": -80}}, "{'n_mels': -80}"),
        ({"dims": DIMS.as_dict() | {"n_vocab": "60"}}, "{'n_vocab': '60'}"),
        ({"dims": DIMS.as_dict() | {"n_vocab": 60.0}}, "{'n_vocab': 60.0}"),
        ({"dims": DIMS.as_dict() | {"n_vocab": torch.zeros(2, 2)}}, "positive whole numbers"),
        ({"dims": DIMS.as_dict() | {"n_text_head": 3}}, "multiples of their head counts"),
        ({"dims": DIMS.as_dict() | {"n_text_state": 32}}, "equally wide"),
        ({"dims": DIMS.as_dict() | {"n_text_layer": 10**9}}, "1000000000 decoder layers"),
        ({"dims": DIMS.as_dict() | {"n_mels": 10**30}}, "positive whole numbers"),
        ({"dims": DIMS.as_dict() | {"n_mels": 80}}, f"{CONV} has the wrong shape"),
        ({"model_state_dict": [1]}, "'model_state_dict': 'list'"),
        ({"model_state_dict": {CONV: "x"}}, f"got '{CONV}': str"),
        ({"model_state_dict": {5: torch.zeros(1)}}, "got 5: Tensor"),
        ({"model_state_dict": {}}, "expected decoder.positional_embedding, got none"),
        ({"model_state_dict": without(NORM)}, f"expected {NORM}, got none"),
        ({"model_state_dict": random_weights() | {"a\nb": torch.zeros(1)}}, "'a\\nb'"),
        ({"model_state_dict": random_weights() | TOO_WIDE}, "got (17,), expected (16,)"),
        ({"model_state_dict": random_weights() | {NORM: torch.ones(16).int()}}, "torch.int32"),
        (
            {"model_state_dict": random_weights() | {NORM: torch.ones(16, device="meta")}},
            "_rebuild_meta_tensor_no_storage",
        ),
        ({"model_state_dict": random_weights() | {NORM: torch.ones(16).to_sparse()}}, "sparse"),
    ],
)
def test_a_pt_file_with_the_wrong_content_is_refused(tmp_path, content, words):
    path = tmp_path / "model.pt"
    torch.save({"dims": DIMS.as_dict(), "model_state_dict": random_weights()} | content, path)
    line = refusal(path)
    assert str(path) in line
    assert words in line


def test_a_pickle_of_something_else_is_refused(tmp_path):
    path = tmp_path / "model.pt"
    for content in ([1], {"weights": 1}, torch.zeros(3)):
        torch.save(content, path)
        assert "dims and model_state_dict" in refusal(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "", "expected JSON"),
        ("config.json", "{'a'", "expected JSON"),
        ("config.json", "\xff", "expected JSON"),
        ("config.json", "[" * 100_000, "expected JSON"),
        ("config.json", "[1]", "expected a JSON object, got list"),
        ("config.json", "{}", "model_type must be whisper, got None"),
        ("config.json", '{"model_type": "bert"}', "got 'bert'"),
        ("config.json", '{"model_type": "whisper"}', "num_mel_bins"),
        ("generation_config.json", "no", "expected JSON"),
        ("generation_config.json", '{"alignment_heads": 5}', "[[layer, head], …], got 5"),
        ("generation_config.json", '{"alignment_heads": [[Infinity, 0]]}', "[[layer, head], …]"),
        ("generation_config.json", '{"alignment_heads": [[3, 0]]}', "3 layers of 4 heads"),
        ("model.safetensors", "", "expected safetensors"),
        ("model.safetensors", "random" * 99, "expected safetensors"),
        ("model.safetensors.index.json", "{}", "weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', "got 5"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../x.safetensors"}}', "'../x.s"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd'"),
        ("model.safetensors.index.json", '{"weight_map": {"a": ".."}}', "'..'"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "gone"}}', "gone: expected a file"),
    ],
)
def test_a_hub_folder_with_a_wrong_file_is_refused(tmp_path, name, content, words):
    write_hub(tmp_path)
    (tmp_path / name).write_text(content, encoding="latin-1")
    line = refusal(tmp_path)
    assert str(tmp_path) in line
    assert words in line


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"weights": without(NORM)}, f"expected {NORM}, got none"),
        ({"weights": random_weights() | TOO_WIDE}, "got (17,), expected (16,)"),
        ({"weights": random_weights() | {"decoder.lm": torch.zeros(1)}}, "'decoder.lm'"),
        ({"encoder_layers": -2}, "{'n_audio_layer': -2}"),
        ({"d_model": "16"}, "'n_audio_state': '16'"),
        ({"vocab_size": True}, "{'n_vocab': True}"),
    ],
)
def test_a_hub_folder_with_the_wrong_weights_is_refused(tmp_path, written, words):
    line = refusal(write_hub(tmp_path, **written))
    assert str(tmp_path) in line
    assert words in line


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"spec": "TransformerSpec"}, "expected a WhisperSpec, got 'TransformerSpec'"),
        ({"version": 7}, "version must be 6, got 7"),
        ({"changed": [(CT2_NORM, None)]}, f"expected '{CT2_NORM}', got none"),
        ({"changed": [("encoder/num_heads", None)]}, "expected 'encoder/num_heads', got none"),
        ({"changed": [("encoder/num_heads", np.float16(-2))]}, "{'n_audio_head': -2}"),
        ({"changed": [("encoder/num_heads", np.zeros(2, np.float16))]}, "damaged"),
        ({"changed": [("encoder/conv1/weight", np.zeros(2, np.float16))]}, "damaged"),
        ({"changed": [("encoder/position_encodings/encodings", np.float16(1))]}, "damaged"),
        ({"changed": [(CT2_NORM, np.zeros(17, np.float16))]}, "got (17,), expected (16,)"),
        ({"changed": [(CT2_NORM + "_scale", np.ones(9, np.float16))]}, "damaged"),
        ({"changed": [("decoder/layer_9/weight", np.ones(9, np.float16))]}, "layer_3/"),
        ({"changed": [("decoder/embed/weight", np.ones(9, np.float16))]}, "'decoder/embed/weight'"),
    ],
)
def test_a_ctranslate2_folder_with_wrong_variables_is_refused(tmp_path, written, words):
    line = refusal(write_ct2(tmp_path, **written))
    assert str(tmp_path) in line
    assert words in line


def test_a_ctranslate2_folder_with_a_wrong_config_is_refused(tmp_path):
    write_ct2(tmp_path)
    for content, words in [
        ("no", "expected JSON"),
        ("[]", "JSON object"),
        ('{"alignment_heads": 1}', "got 1"),
    ]:
        (tmp_path / "config.json").write_text(content)
        assert words in refusal(tmp_path)


def test_folders_without_weights_are_refused(tmp_path):
    assert "got neither" in refusal(tmp_path)
    write_hub(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors: expected a file of weights, got none" in refusal(tmp_path)
    (tmp_path / "model.bin").mkdir()
    assert str(tmp_path / "model.bin") in refusal(tmp_path)


FORMATS = [
    pytest.param(write_openai, "model.pt", id="openai"),
    pytest.param(write_hub, "model.safetensors", id="hub"),
    pytest.param(write_ct2, "model.bin", id="ct2"),
    pytest.param(write_ggml, "ggml.bin", id="ggml"),
    pytest.param(write_onnx, "onnx/encoder_model_quantized.onnx", id="onnx encoder"),
    pytest.param(write_onnx, "onnx/decoder_model_merged_quantized.onnx", id="onnx decoder"),
]


@pytest.mark.parametrize(("write", "file"), FORMATS)
def test_a_file_that_ends_early_is_refused(tmp_path, write, file):
    path = write(tmp_path)
    data = (tmp_path / file).read_bytes()
    for n in [0, 1, 5, 100, 1000, len(data) // 2, len(data) - 100, len(data) - 1]:
        (tmp_path / file).write_bytes(data[:n])
        assert str(tmp_path / file) in refusal(path)


def test_a_ctranslate2_file_that_ends_early_names_the_variable(tmp_path):
    path = write_ct2(tmp_path) / "model.bin"
    data = path.read_bytes()
    path.write_bytes(data[: data.index(CT2_NORM.encode()) + len(CT2_NORM) + 20])
    assert f"announced at '{CT2_NORM}'" in refusal(tmp_path)


@pytest.mark.parametrize(("write", "file"), FORMATS)
def test_damage_anywhere_is_refused_in_one_line_or_does_not_matter(tmp_path, write, file):
    path, rng = write(tmp_path), random.Random(0)
    data = (tmp_path / file).read_bytes()
    n_refused = 0
    for trial in range(80):
        if trial % 4 == 0:
            damaged = bytearray(rng.randbytes(rng.randrange(2000)))
        else:
            damaged = bytearray(data)
            for _ in range(rng.randrange(1, 30)):
                damaged[rng.randrange(len(data))] = rng.randrange(256)
        Path(tmp_path / file).write_bytes(damaged)
        with suppress(CheckpointError):
            load_model(str(path))
            continue
        refusal(path)
        n_refused += 1
    assert n_refused >= 20


# ---- files that ask for more than they hold


def huge_context(folder):
    return write_openai(folder, n_audio_ctx=10**8)


def repeated_row(folder):
    """A vocabulary of 1e8 tokens, each the same row of the file."""
    weights, name = random_weights(), "decoder.token_embedding.weight"
    weights[name] = weights[name][:1].expand(10**8, -1)
    return write_openai(folder, weights, n_vocab=10**8)


def repeated_layers(folder):
    """500 layers whose weights are all the same bytes of the file."""
    state, dims = 256, {"n_audio_state": 256, "n_text_state": 256, "n_text_layer": 500}
    shapes = Whisper(ModelDimensions(**DIMS.as_dict() | dims | {"n_text_layer": 1})).state_dict()
    same = torch.zeros(4 * state * state)
    weights = {}
    for name, weight in shapes.items():
        for i in range(500 if name.startswith("decoder.blocks.") else 1):
            named = name.replace("decoder.blocks.0.", f"decoder.blocks.{i}.")
            weights[named] = same[: weight.numel()].view(weight.shape)
    return write_openai(folder, weights, **dims)


def zip_bomb(folder):
    """A storage that takes a thousand times as much memory as its part of the file."""
    path, packed = write_openai(folder), folder / "packed.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, bytes(300_000_000) if name.endswith("data/0") else old.read(name))
    return packed


def many_scales(folder):
    """A row over a column of scales would be a matrix."""
    name = "decoder/embeddings/weight"
    changed = [(name, np.ones((1, 20_000), np.float16))]
    return write_ct2(folder, changed=[*changed, (f"{name}_scale", np.ones(20_000, np.float16))])


def many_aliases(folder):
    path = write_ct2(folder) / "model.bin"
    name, data = b"decoder/embeddings/weight\0", path.read_bytes()
    names = [name, b"decoder/projection/weight\0"]
    head = len(data) - 4 - sum(2 + len(text) for text in names)
    pairs = b"".join(
        struct.pack("<H", len(text)) + text
        for i in range(20_000)
        for text in (b"decoder/x_%d/weight\0" % i, name)
    )
    path.write_bytes(data[:head] + struct.pack("<I", 20_000) + pairs)
    return folder


def many_products(folder):
    """20,000 matrices, all of them the same tensor."""
    path = write_onnx(folder) / "onnx" / "encoder_model_quantized.onnx"
    operand = (1, "onnx::MatMul_1000_quantized")
    nodes = [
        (1, protobuf((1, "x"), operand, (3, f"/layers.{i}/fc1/MatMul"), (4, "MatMulInteger")))
        for i in range(20_000)
    ]
    path.write_bytes(path.read_bytes() + protobuf((7, protobuf(*nodes))))
    return folder


def costly_key(folder):
    """A key whose hash takes 2^99 steps: pairs of pairs, each of the same pair twice."""
    key = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(99))
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + key + b"K\x01s.")
    return folder / "model.pt"


def deep_key(folder):
    """A key whose hash overflows the stack."""
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02})" + b"\x85" * 2**20 + b"K\x01s.")
    return folder / "model.pt"


HUGE = {
    huge_context: "encoder.positional_embedding has the wrong shape, got (20, 16), expected (1000",
    repeated_row: "must be in the file as a whole, got (100000000, 16) with strides (0, 1)",
    repeated_layers: "must be in the file as a whole",
    zip_bomb: "expected a zip of files that are not compressed",
    many_scales: "20000 scales of 'decoder/embeddings/weight', which is (1, 20000)",
    many_aliases: "elements in",
    many_products: "elements in",
    costly_key: "uses a value twice",
    deep_key: "values within values",
}


def test_a_file_that_asks_for_more_than_it_holds_is_refused_before_memory_is_taken(tmp_path):
    for make in HUGE:
        (tmp_path / make.__name__).mkdir()
    paths = [str(make(tmp_path / make.__name__)) for make in HUGE]
    code = (
        "import os, resource, sys\n"
        "from asrmask.checkpoints import load_model\n"
        "from asrmask.errors import CheckpointError\n"
        "for path in sys.argv[1:2] + sys.argv[1:]:\n"  # the first imports what it needs
        "    try: print(load_model(path, device='cpu').dims)\n"
        "    except CheckpointError as error: print(error)\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + 2 ** 27, -1))\n"
    )
    if sys.platform != "linux":
        pytest.skip("memory is limited by Linux's means")
    run = [sys.executable, "-c", code, *paths]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300)
    for line, words in zip(done.stdout.splitlines()[1:], HUGE.values(), strict=True):
        assert words in line


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_width_that_has_no_position_table_is_refused(tmp_path, width):
    dims = {"n_audio_state": width, "n_text_state": width, "n_audio_head": 1, "n_text_head": 1}
    assert "widths must be even and 4 or more" in refusal(write_openai(tmp_path, **dims))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda w: torch.nested.nested_tensor([w, w[:2]]), "_rebuild_nested_tensor"),
        (lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "_rebuild_qtensor"),
        (lambda w: w[:1].clone().expand(16), "in the file as a whole, got (16,) with strides (0,)"),
        (lambda w: w.to(torch.float8_e4m3fn), "_rebuild_tensor_v3"),
    ],
    ids=["nested", "quantised", "expanded", "8 bits"],
)
def test_a_tensor_that_is_not_plain_is_refused(tmp_path, odd, words):
    weights = random_weights()
    assert words in refusal(write_openai(tmp_path, weights | {NORM: odd(weights[NORM])}))


def test_parameters_and_transposed_tensors_are_read(tmp_path):
    name, weights = "decoder.blocks.1.mlp.0.weight", random_weights()
    odd = {NORM: torch.nn.Parameter(weights[NORM]), name: weights[name].T.contiguous().T}
    for zipped in (True, False):
        content = {"dims": DIMS.as_dict(), "model_state_dict": weights | odd}
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        got = load_model(str(tmp_path / "a.pt")).state_dict()
        for key, weight in weights.items():
            assert torch.equal(got[key], weight)
            assert got[key].is_contiguous()


def test_a_model_does_not_change_with_the_file_it_was_read_from(tmp_path):
    path = write_openai(tmp_path)
    model = load_model(str(path), device="cpu")
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(model.decoder.ln.weight, random_weights()["decoder.ln.weight"])


@pytest.mark.parametrize("seed", range(2))
def test_damaged_and_hostile_checkpoints(tmp_path, seed):
    import fuzzing_checkpoints  # it imports this file

    for number in range(150):
        name, run = fuzzing_checkpoints.case(seed, number, tmp_path)
        try:
            run()
        except Exception as error:
            raise AssertionError(
                f"scripts/fuzz checkpoints --seed {seed} --only {number}: {name}"
            ) from error
