"""Adapter files: merged and beside the weights, in every command, refused with other weights."""

import json

import pytest
import safetensors.torch
import torch
from checkpoint_files import SMALL

from asrmask.checkpoints import adapter as adapters
from asrmask.checkpoints import int8_cache, load_model, write_merged
from asrmask.errors import CheckpointError, OptionError
from asrmask.model import quantization
from asrmask.model.whisper import Whisper, sha256_of_weights
from asrmask.training.spec import LAYERS, AdapterShape
from asrmask.training.weights import AdapterWeights


def trained(model, shape=None):
    """An adapter for a model, with random changes everywhere."""
    sha256 = sha256_of_weights(model.state_dict())
    weights = AdapterWeights(model, sha256, shape or AdapterShape(rank=4), seed=0)
    with torch.no_grad():
        for weight in weights.parameters.values():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small weights in a .pt file, an adapter for them, and other weights."""
    path = tmp_path_factory.mktemp("adapter")
    for name, seed in (("base", 0), ("other", 1)):
        torch.manual_seed(seed)
        content = {"dims": SMALL.as_dict(), "model_state_dict": Whisper(SMALL).half().state_dict()}
        torch.save(content, path / f"{name}.pt")
    shape = AdapterShape(rank=4, layers=LAYERS)
    trained(load_model(str(path / "base.pt")), shape).save(
        path / "a.safetensors", {"model": "base.pt"}
    )
    return path


@pytest.fixture(scope="module")
def tokens_and_mel():
    draw = torch.Generator().manual_seed(0)
    return torch.tensor([[50_257, 11, 12]]), torch.randn(1, 80, 3000, generator=draw)


def outputs(model, tokens_and_mel):
    tokens, mel = tokens_and_mel
    with torch.inference_mode():
        return model(mel, tokens)


def test_merged_and_beside_the_weights_are_the_same(folder, tokens_and_mel):
    name, file = str(folder / "base.pt"), folder / "a.safetensors"
    plain = load_model(name)
    merged = load_model(name, adapter=file)
    beside = load_model(name, adapter=file, merge_adapter=False)
    assert list(merged.state_dict()) == list(plain.state_dict())
    query = "encoder.blocks.0.attn.query.weight"
    assert torch.equal(beside.state_dict()[query], plain.state_dict()[query])
    found = [outputs(model, tokens_and_mel) for model in (plain, merged, beside)]
    torch.testing.assert_close(found[1], found[2], atol=1e-4, rtol=1e-4)
    assert (found[0] - found[1]).abs().max() > 0.01
    for part in ("encoder", "decoder"):
        positions = f"{part}.positional_embedding"
        assert not torch.equal(merged.state_dict()[positions], plain.state_dict()[positions])


def test_a_new_adapter_changes_nothing(folder, tokens_and_mel):
    plain, adapted = (load_model(str(folder / "base.pt")) for _ in range(2))
    AdapterWeights(adapted, "", AdapterShape(), seed=0)
    assert torch.equal(outputs(plain, tokens_and_mel), outputs(adapted, tokens_and_mel))


def test_of_tiny_it_is_under_two_megabytes(tmp_path):
    weights = trained(load_model("tiny.en"), AdapterShape())
    weights.save(tmp_path / "a.safetensors", {})
    assert (tmp_path / "a.safetensors").stat().st_size < 2_000_000
    assert len([name for name in weights.parameters if name.endswith("lora_a")]) == 8 * 6 + 4 * 4


def test_other_weights_are_refused(folder):
    with pytest.raises(CheckpointError, match="expected the weights that it was trained on") as no:
        load_model(str(folder / "other.pt"), adapter=folder / "a.safetensors")
    assert "(base.pt, sha256" in str(no.value)
    assert "\n" not in str(no.value)
    with pytest.raises(CheckpointError, match="trained on"):
        load_model(str(folder / "other.pt"), adapter=folder / "a.safetensors", merge_adapter=False)


def changed(folder, tmp_path, **changes):
    """A copy of the adapter with other tensors; None leaves one out."""
    made = adapters.read(folder / "a.safetensors")
    tensors = {**made.tensors, **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path = tmp_path / "changed.safetensors"
    adapters.write(path, adapters.Adapter(tensors, made.scale, made.base_sha256))
    return path


QUERY = "encoder.blocks.0.attn.query.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder.nothing.delta": torch.ones(3)}, "must change weights of the model, got encoder"),
        ({QUERY: torch.ones(16, 16)}, "must change weights of the model"),
        ({f"{QUERY}.lora_b": None}, r"query.weight is \(16, 16\), got additions"),
        ({f"{QUERY}.lora_b": torch.ones(16, 5)}, r"query.weight is \(16, 16\), got additions"),
        ({f"{QUERY}.delta": torch.ones(16, 16)}, r"query.weight is \(16, 16\), got additions"),
        ({"encoder.ln_post.bias.delta": torch.ones(17)}, r"bias is \(16,\), got additions"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, tmp_path, changes, message):
    path = changed(folder, tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(str(folder / "base.pt"), adapter=path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_adapters_are_refused(folder, tmp_path):
    damaged, plain = tmp_path / "damaged.safetensors", tmp_path / "plain.safetensors"
    damaged.write_bytes(b"not an adapter")
    safetensors.torch.save_file({"x": torch.ones(2)}, plain)
    for path, message in (
        (tmp_path / "gone", "no such file, expected an adapter"),
        (damaged, "damaged, expected an adapter"),
        (plain, "expected an adapter in the format 'asrmask adapter 1', got no format"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            load_model(str(folder / "base.pt"), adapter=path)
        assert "\n" not in str(caught.value)


def test_int8_models_with_and_without_it_are_kept_apart(folder):
    base, file = folder / "base.pt", folder / "a.safetensors"
    plain, adapted = int8_cache.entry(base, ""), int8_cache.entry(base, "", file)
    assert plain.file != adapted.file
    file.touch()
    assert int8_cache.entry(base, "", file).signature != adapted.signature
    assert int8_cache.entry(folder / "gone.pt", "", file) is None
    with pytest.raises(OptionError, match="merge_adapter must be True with compute_type int8"):
        load_model(str(base), compute_type="int8", adapter=file, merge_adapter=False)


def test_int8_models_are_made_with_it(folder, monkeypatch):
    """What is quantized, and kept, are the merged weights."""
    found = []
    monkeypatch.setattr(quantization, "quantize", found.append)
    monkeypatch.setattr(int8_cache, "save", lambda entry, model: found.append(entry))
    name, file = str(folder / "base.pt"), folder / "a.safetensors"
    load_model(name, compute_type="int8", adapter=file)
    merged, (quantized, entry) = load_model(name, adapter=file), found
    for key, weight in merged.state_dict().items():
        assert torch.equal(weight, quantized.state_dict()[key].float()), key
    assert entry == int8_cache.entry(folder / "base.pt", "", file)


def test_weights_for_other_systems_have_it(folder, tmp_path):
    written = write_merged(str(folder / "base.pt"), str(folder / "a.safetensors"), tmp_path)
    assert written == str(tmp_path / "base+a")
    merged = load_model(str(folder / "base.pt"), adapter=folder / "a.safetensors")
    other = load_model(written)
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, other.state_dict()[name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("command", ["transcribe", "inspect", "masks", "compare", "bench"])
def test_commands_refuse_a_wrong_one_in_one_line(run, folder, sample, tmp_path, command):
    outputs = {"transcribe": ["-f", "none"], "masks": ["--png", tmp_path / "a.png"]}
    data = [sample] if command != "bench" else []
    flags = outputs.get(command, ["--out", tmp_path / "out"])
    code, _, err = run(command, *data, "--adapter", folder / "a.safetensors", *flags)
    assert code != 0
    errors = [line for line in err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "expected the weights that it was trained on (base.pt" in errors[0]


def test_settings_are_kept(folder):
    with safetensors.safe_open(folder / "a.safetensors", framework="pt") as file:
        about = file.metadata()
    assert json.loads(about["settings"]) == {"model": "base.pt"}
    assert about["format"] == adapters.FORMAT
    assert adapters.read(folder / "a.safetensors").scale == 2.0
