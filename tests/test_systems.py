"""Other systems: their names and settings, their weights, and that they hear the same speech."""

import io
import struct
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from conftest import WEIGHTS

from asrmask import extras, systems
from asrmask.audio.spectrogram import log_mel_spectrogram, pad_or_trim
from asrmask.checkpoints import ctranslate2, ggml, huggingface_tokenizer, load_model, read
from asrmask.errors import MissingPackageError, OptionError
from asrmask.evaluation.score import errors
from asrmask.systems import DecodingSettings, Named, Timer
from asrmask.systems.upstream import normalizer
from asrmask.tokenizer.tokenizer import get_tokenizer

# ------------------------------------------------------------------ names and settings


def test_settings_are_read_and_written_alike():
    named = Named.parse("faster-whisper:int8,batch=8")
    assert named == Named("faster-whisper", {"compute_type": "int8", "batch": "8"})
    assert str(named) == "faster-whisper:int8,batch=8"
    assert Named.parse("faster-whisper:compute_type=int8,batch=8") == named
    assert str(Named.parse("openai-whisper")) == "openai-whisper"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("whisperx", "a system must be one of"),
        ("openai-whisper:int8", "settings of openai-whisper must be of none, got 'int8'"),
        ("faster-whisper:threads=3", "settings of faster-whisper must be of compute_type="),
        ("faster-whisper:batch=", "got 'batch='"),
    ],
)
def test_wrong_names_and_settings_are_told(text, told):
    with pytest.raises(OptionError, match=told):
        Named.parse(text)


def test_values_of_settings_are_checked():
    with pytest.raises(OptionError, match="batch must be a whole number, 1 or more, got '0'"):
        systems.whole_number({"batch": "0"}, "batch", 1)
    with pytest.raises(OptionError, match="f16, q8_0, q5_0, q5_1, q4_0, q4_1, got 'q4'"):
        systems.one_of({"weights": "q4"}, "weights", ggml.FORMATS)


def test_a_missing_package_is_told_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    told = "^whisper.cpp needs pywhispercpp: pip install pywhispercpp$"
    with pytest.raises(MissingPackageError, match=told):
        Named.parse("whisper.cpp").check()


# ------------------------------------------------------------------ weights


def test_a_ggml_file_begins_with_the_model_and_has_every_weight():
    _, checkpoint = read("tiny.en")
    file = io.BytesIO()
    ggml.write(file, checkpoint, "f16")
    data = file.getvalue()
    dims = checkpoint.dims
    assert struct.unpack_from("<3i", data) == (0x67676D6C, dims.n_vocab, dims.n_audio_ctx)
    assert struct.unpack_from("<3i", data, 44) == (1, dims.n_mels, 201)
    assert all(name.encode() in data for name in checkpoint.weights)


@pytest.mark.parametrize(
    ("weight_format", "tolerance"),
    [("f16", 0), ("q8_0", 0.011), ("q5_1", 0.06), ("q5_0", 0.09), ("q4_1", 0.12)],
)
def test_a_ggml_file_gives_the_same_weights_back(tmp_path, weight_format, tolerance):
    _, checkpoint = read("tiny.en")
    path = tmp_path / "ggml.bin"
    with path.open("wb") as file:
        ggml.write(file, checkpoint, weight_format)
    _, again = read(str(path))
    assert again.dims == checkpoint.dims
    assert again.weights.keys() == checkpoint.weights.keys()
    for name, weight in checkpoint.weights.items():
        error = (again.weights[name].float() - weight.float()).norm() / weight.float().norm()
        assert weight.norm() == 0 or error <= tolerance, name


def test_a_ctranslate2_folder_gives_the_same_weights_back(tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers comes with faster-whisper")
    _, checkpoint = read("tiny.en")
    ctranslate2.write(tmp_path / "folder", checkpoint)
    again = ctranslate2.read(tmp_path / "folder")
    assert again.dims == checkpoint.dims
    assert again.alignment_heads == checkpoint.alignment_heads
    assert again.weights.keys() == checkpoint.weights.keys()
    for name, weight in checkpoint.weights.items():
        assert torch.equal(again.weights[name].float(), weight.float()), name


def test_weights_without_alignment_heads_have_the_default_ones_in_ctranslate2(tmp_path):
    """Without any, faster-whisper raises an error where words are timed."""
    pytest.importorskip("tokenizers", reason="tokenizers comes with faster-whisper")
    _, checkpoint = read("tiny.en")
    ctranslate2.write(tmp_path / "folder", replace(checkpoint, alignment_heads=None))
    heads = ctranslate2.read(tmp_path / "folder").alignment_heads
    assert heads == checkpoint.dims.default_alignment_heads


def test_a_tokenizer_file_gives_the_same_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers comes with faster-whisper")
    for multilingual in (False, True):
        ours = get_tokenizer(multilingual)
        huggingface_tokenizer.write(tmp_path / "t.json", ours.vocabulary)
        theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
        for text in (" And so, my fellow Americans", " naïve café — 12,345 €", " 日本語です。"):
            tokens = theirs.encode(text, add_special_tokens=False).ids
            assert tokens == ours.encode(text)
            assert theirs.decode(tokens) == text
        assert theirs.token_to_id("<|notimestamps|>") == ours.no_timestamps


def test_faster_whisper_hears_with_weights_written_for_it(samples, sample, tmp_path):
    if find_spec("faster_whisper") is None:
        pytest.skip("faster-whisper is not installed")
    _, checkpoint = read("tiny.en")
    ctranslate2.write(tmp_path / "folder", checkpoint)
    texts = []
    for weights in (systems.prepare(Named("faster-whisper", {}), "tiny.en", tmp_path), "folder"):
        system = systems.load(Named("faster-whisper", {}), str(tmp_path / weights), threads=1)
        texts.append(system.transcribe(sample, DecodingSettings(word_timestamps=True)))
    assert texts[0] == texts[1]


# ------------------------------------------------------------------ speech


@pytest.mark.parametrize(
    "text",
    [
        "asrmask",
        "openai-whisper",
        "faster-whisper:int8",
        "faster-whisper:int8,batch=4",
        "whisper.cpp",
        "whisper.cpp:q8_0",
        "whisper.cpp:q5_0",
        "transformers",
    ],
)
def test_every_system_hears_the_same_speech(text, samples, sample, tmp_path):
    named = Named.parse(text)
    kind = systems.KINDS[named.name]
    if find_spec(kind.package) is None:
        pytest.skip(f"{kind.install} is not installed")
    system = systems.load(named, systems.prepare(named, "tiny.en", tmp_path), threads=1)
    heard = system.transcribe(sample, DecodingSettings(language="en"))
    normalise = normalizer("en")
    assert errors(normalise(samples[sample]), normalise(heard.text)).wer < 0.2
    assert heard.segments
    times = [time for piece in heard.segments for time in (piece.start, piece.end)]
    assert times == sorted(times)
    assert all(type(time) is float for time in times)
    assert system.transcribe_all([sample], DecodingSettings(language="en")) == [heard]


@pytest.mark.parametrize("name", ["tiny.en", "tiny", "base.en"])
def test_whisper_cpp_and_asrmask_hear_the_same_with_one_ggml_file(name, samples, tmp_path):
    """Greedy, no fallback, no timestamps."""
    pytest.importorskip("pywhispercpp", reason="pywhispercpp is not installed")
    from pywhispercpp.model import Model
    from pywhispercpp.utils import redirect_stderr

    path = WEIGHTS / name / f"ggml-{name}.bin"
    if name == "tiny.en":
        path = systems.prepare(Named("whisper.cpp", {}), name, tmp_path)
    elif not path.is_file():
        pytest.skip(f"no weights at {path}: scripts/weights {name} fetches them")
    ours = load_model(str(path), device="cpu")
    with redirect_stderr(to=None):
        theirs = Model(str(path), params_sampling_strategy=0, n_threads=1, print_progress=False)
    for sample in list(samples)[:3]:
        audio = systems.load_audio(sample)
        with redirect_stderr(to=None):
            segments = theirs.transcribe(
                audio, language="en", temperature_inc=0.0, no_timestamps=True, suppress_nst=True
            )
        mel = log_mel_spectrogram(pad_or_trim(audio))  # whisper.cpp, too, pads the samples
        result = ours.decode(mel, language="en", without_timestamps=True)
        assert result.text.strip() == "".join(s.text for s in segments).strip()


# ------------------------------------------------------------------ parts


def test_a_part_within_another_counts_once():
    timer = Timer()
    with timer.part("decoder"):
        time.sleep(0.02)
        with timer.part("encoder"):
            time.sleep(0.05)
    assert timer.seconds["encoder"] >= 0.05
    assert 0.02 <= timer.seconds["decoder"] < timer.seconds["encoder"]
