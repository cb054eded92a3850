"""ONNX exports: which files of a folder are read, and what is said of those that are odd."""

import json

import numpy as np
import pytest
import torch
from checkpoint_files import (
    onnx_tensor,
    protobuf,
    random_weights,
    write_hub,
    write_onnx,
)
from conftest import WEIGHTS

from asrmask.checkpoints import load_model, registry
from asrmask.errors import CheckpointError
from asrmask.evaluation.score import errors
from asrmask.systems.upstream import normalizer

ENCODER = "onnx/encoder_model_quantized.onnx"
NORM = "layers.1.final_layer_norm.weight"
MATRIX = "onnx::MatMul_1000"


def embedding(folder):
    return load_model(str(folder), device="cpu").decoder.token_embedding.weight


def test_files_may_be_in_the_folder_itself(tmp_path):
    expected = embedding(write_onnx(tmp_path))
    for file in (tmp_path / "onnx").iterdir():
        file.rename(tmp_path / file.name)
    assert torch.equal(embedding(tmp_path), expected)


def test_the_most_exact_files_of_a_folder_are_read(tmp_path):
    exact = random_weights()["decoder.token_embedding.weight"]
    write_onnx(tmp_path)
    assert not torch.equal(embedding(tmp_path), exact)
    write_onnx(tmp_path, kind="float32")
    assert torch.equal(embedding(tmp_path), exact)
    other = {name: 2 * weight for name, weight in random_weights().items()}
    write_hub(tmp_path, other)  # safetensors
    assert torch.equal(embedding(tmp_path), 2 * exact)


def test_one_file_of_the_two_is_not_enough(tmp_path):
    (write_onnx(tmp_path) / ENCODER).unlink()
    with pytest.raises(CheckpointError, match="expected a file of weights, got none"):
        load_model(str(tmp_path))


def test_a_decoder_that_was_not_merged_is_read(tmp_path):
    expected = embedding(write_onnx(tmp_path))
    merged = tmp_path / "onnx" / "decoder_model_merged_quantized.onnx"
    data = merged.read_bytes()
    merged.unlink()
    (tmp_path / "onnx" / "decoder_model_quantized.onnx").write_bytes(data)
    assert torch.equal(embedding(tmp_path), expected)


def with_tensor(name, values, *fields):
    """A file's bytes → the same with one more tensor, which replaces another of its name."""
    tensor = onnx_tensor(name, values) + protobuf(*fields)
    return lambda data: data + protobuf((7, protobuf((5, tensor))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "damaged, expected an ONNX model, got"),
        (lambda data: b"\x00" * 30, "expected encoder.conv1.weight, got none"),
        (lambda data: b"\x0b" + data, "a field of wire type 3"),
        (lambda data: b"\xff" * 30 + data, "an integer without an end"),
        (lambda data: data[:-3], "a field of"),
        (lambda data: data.replace(b"0_scale", b"0_scala"), f"expected '{MATRIX}_scale', got none"),
        (
            lambda data: data.replace(b"/fc1/", b"/fcx/"),
            "too many 'encoder.blocks.0.fcx.weight'",
        ),
        (with_tensor(NORM, np.zeros(17, "float32")), "got (17,), expected (16,)"),
        (with_tensor(NORM, np.zeros(16, "float32"), (2, 7)), "'layers.1.final"),
        (with_tensor(NORM, np.zeros(16, "float32"), (14, 1)), "a reference to another"),
        (with_tensor(NORM, np.zeros(16, "float32"), (1, 2)), "64 bytes of torch.float32 for"),
        (with_tensor(NORM, np.zeros(16, "float32"), (1, -1)), "a shape of [16, -1]"),
        (with_tensor(f"{MATRIX}_scale", np.ones(3, "float32")), f"3 scales of '{MATRIX}'"),
        (with_tensor("layers.1.more.weight", np.ones(3, "float32")), "the first too many"),
    ],
)
def test_an_odd_file_is_refused(tmp_path, change, words):
    path = write_onnx(tmp_path) / ENCODER
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        load_model(str(tmp_path))
    line = str(caught.value)
    assert words in line
    assert str(tmp_path) in line
    assert len(line.splitlines()) == 1


def test_a_config_of_another_model_is_refused(tmp_path):
    config = json.loads((write_onnx(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"encoder_layers": 3}))
    with pytest.raises(CheckpointError, match="expected 3 encoder layers, got weights of 2"):
        load_model(str(tmp_path))


def test_hears_with_real_8_bit_weights(samples, sample):
    folder = WEIGHTS / "small"
    if not (folder / "config.json").is_file():
        pytest.skip(f"no weights at {folder}: scripts/weights small fetches them")
    model = load_model(str(folder), device="cpu")
    assert model.dims.as_dict() == registry.dimensions("small")
    assert model.alignment_heads == registry.alignment_heads("small")
    text = model.transcribe(sample, language="en").text
    normalise = normalizer("en")
    assert errors(normalise(samples[sample]), normalise(text)).wer < 0.2
