"""Int8 models in the cache folder: the same as quantized, and made again when they must be."""

import os

import pytest
import safetensors.torch
import torch

from asrmask import kernels
from asrmask.checkpoints import download, int8_cache, load_model, registry
from asrmask.errors import CheckpointError
from asrmask.model import quantization
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.whisper import Whisper

DIMS = ModelDimensions(80, 1500, 32, 2, 2, 51_864, 448, 32, 2, 2)


def write_source(path, seed):
    """An OpenAI file with random weights."""
    torch.manual_seed(seed)
    content = {"dims": DIMS.as_dict(), "model_state_dict": Whisper(DIMS).state_dict()}
    torch.save(content, path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "asrmask"


@pytest.fixture
def source(tmp_path):
    write_source(tmp_path / "model.pt", 0)
    return tmp_path / "model.pt"


@pytest.fixture
def made(monkeypatch):
    """What is quantized, one entry a time."""
    made, quantize = [], quantization.quantize
    monkeypatch.setattr(quantization, "quantize", lambda model: (made.append(1), quantize(model)))
    return made


def load(source):
    return load_model(str(source), compute_type="int8")


def assert_same(one, other):
    expected = other.state_dict()
    for name, weight in one.state_dict().items():
        assert weight.dtype == expected[name].dtype, name
        assert torch.equal(weight, expected[name]), name
    assert list(one.state_dict()) == list(expected)
    assert (one.dims, one.alignment_heads) == (other.dims, other.alignment_heads)
    modules = [{name: type(m) for name, m in model.named_modules()} for model in (one, other)]
    assert modules[0] == modules[1]


def test_a_stored_model_is_the_quantized_one(cache, made, sample):
    first, second = (load_model("tiny.en", compute_type="int8") for _ in range(2))
    assert len(made) == 1
    assert len(list(cache.iterdir())) == 1
    assert_same(first, second)
    assert second.alignment_heads == registry.alignment_heads("tiny.en")
    assert not second.training
    assert not any(weight.requires_grad for weight in second.parameters())
    options = {"preset": "fast", "word_timestamps": True}
    texts = [model.transcribe(sample, **options).to_dict() for model in (first, second)]
    assert texts[0] == texts[1]
    assert len(texts[0]["segments"][0]["tokens"]) > 5


def test_weights_are_aligned_and_the_file_stays_as_it_is(cache):
    load_model("tiny.en", compute_type="int8")
    stored = load_model("tiny.en", compute_type="int8")
    weights = stored.state_dict().values()
    if kernels.available():
        assert all(weight.data_ptr() % int8_cache.ALIGNMENT == 0 for weight in weights)
    before = [path.read_bytes() for path in cache.iterdir()]
    for weight in weights:
        weight.zero_()
    assert [path.read_bytes() for path in cache.iterdir()] == before


@pytest.mark.parametrize("packed", [True, False])
def test_models_of_any_size_and_for_any_processor(cache, source, made, monkeypatch, packed):
    if not packed:
        monkeypatch.setattr("asrmask.kernels.available", lambda: False)
    assert_same(load(source), load(source))
    assert len(made) == 1


def test_what_another_processor_made_is_not_taken(cache, source, made, monkeypatch):
    load(source)
    monkeypatch.setattr("asrmask.model.int8.max_weight", lambda: 99)
    load(source)
    assert len(made) == 2


def test_a_model_is_made_again_when_its_source_changes(cache, source, made):
    before, times = load(source), source.stat()
    write_source(source, 1)
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy can have
    after = load(source)
    assert not torch.equal(before.decoder.positional_embedding, after.decoder.positional_embedding)
    assert_same(after, load(source))
    assert len(made) == 2
    assert len(list(cache.iterdir())) == 1


def test_the_signature_has_the_files_of_a_folder(cache, tmp_path):
    signatures = []
    for name in ("config.json", "model-00001-of-00002.safetensors", "onnx/encoder_model.onnx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        signatures.append(int8_cache.entry(tmp_path, "").signature)
    (tmp_path / "config.json").write_text("{}")
    signatures.append(int8_cache.entry(tmp_path, "").signature)
    assert len(set(signatures)) == 4


def test_official_names_have_an_entry_of_their_own(cache, source):
    files = {int8_cache.entry(source, name).file for name in ("", "tiny.en", "tiny")}
    assert len(files) == 3


def stored_weights(path):
    """The metadata and the weights of a stored model."""
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def damage(path, how):
    about, weights = stored_weights(path)
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how in {"empty", "text"}:
        path.write_text("" if how == "empty" else "damaged")
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    else:
        if how == "no metadata":
            about = None
        elif how == "another type":
            weights["encoder.ln_post.bias"] = weights["encoder.ln_post.bias"].half()
        elif how == "another shape":
            weights["encoder.ln_post.bias"] = torch.zeros(33)
        elif how == "no such dimensions":
            about["dimensions"] = "{}"
        elif how == "a weight too few":
            del weights["encoder.ln_post.bias"]
        safetensors.torch.save_file(weights, path, about)


@pytest.mark.parametrize(
    "how",
    [
        *("cut", "empty", "text", "a folder", "no metadata", "no such dimensions"),
        *("another type", "another shape", "a weight too few"),
    ],
)
def test_a_damaged_file_is_made_again(cache, source, made, how):
    first = load(source)
    (path,) = cache.iterdir()
    damage(path, how)
    assert_same(first, load(source))
    assert len(made) == 2
    if how != "a folder":
        assert_same(first, load(source))
        assert len(made) == 2


def test_no_file_without_a_folder_to_write_to(tmp_path, source, made, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_same(load(source), load(source))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(int8_cache, "cache_folder", no_home)
    load(source)
    assert len(made) == 3


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_official_weights_are_verified_when_they_are_read(cache, monkeypatch):
    if registry.bundled_folder("tiny.en") is None:
        pytest.skip("tiny.en is not installed with the package")
    with monkeypatch.context() as patched:
        patched.setattr(registry, "BUNDLED_SHA256", "0" * 64)
        with pytest.raises(CheckpointError, match="wrong content"):
            load_model("tiny.en", compute_type="int8")
    load_model("tiny.en", compute_type="int8")
    monkeypatch.setattr(download, "sha256_of", None)  # not called
    load_model("tiny.en", compute_type="int8")


def test_a_download_is_kept_under_its_official_name(cache, source, made, monkeypatch):
    target = cache.parent / "whisper" / "tiny.pt"

    def fetch(url, target, sha256, progress):
        target.parent.mkdir(parents=True)
        return source.rename(target)

    monkeypatch.setattr(download, "fetch", fetch)
    first = load("tiny")
    assert target.is_file()
    assert_same(first, load("tiny"))  # a second download would fail
    assert len(made) == 1
