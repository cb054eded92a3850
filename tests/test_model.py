"""The model's masks and cache, with small random weights and with the real tiny.en."""

import pytest
import torch

from asrmask.errors import OptionError
from asrmask.model import masks
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.whisper import Whisper

DIMS = ModelDimensions(
    n_mels=80,
    n_audio_ctx=50,
    n_audio_state=32,
    n_audio_head=4,
    n_audio_layer=2,
    n_vocab=120,
    n_text_ctx=24,
    n_text_state=32,
    n_text_head=4,
    n_text_layer=2,
)


@pytest.fixture
def small():
    torch.manual_seed(0)
    return Whisper(DIMS).eval().requires_grad_(False)


@pytest.fixture
def mel():
    torch.manual_seed(1)
    return torch.randn(2, 80, 100)


@pytest.fixture
def tokens():
    torch.manual_seed(2)
    return torch.randint(0, DIMS.n_vocab, (2, 12))


def by_chunks(model, tokens, features, size, cross_mask=None):
    encoded = model.decoder.cross_attention_cache(features, cross_mask)
    cache = model.decoder.cache(*tokens.shape)
    out = []
    for chunk in tokens.split(size, dim=1):
        x, cache = model.decoder(chunk, encoded, cache)
        out.append(model.decoder.logits(x))
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("size", [1, 3, 5, 12])
@pytest.mark.parametrize("masked", [False, True])
def test_cached_equals_whole_at_any_chunk_size(small, mel, tokens, size, masked):
    """Teacher-forced logits of a whole text in one pass are the step-by-step ones."""
    features = small.encode(mel)
    cross = masks.padding([50, 20], 50) if masked else None
    whole = small.logits(tokens, features, cross)
    assert torch.allclose(by_chunks(small, tokens, features, size, cross), whole, atol=1e-5)


def test_cached_equals_whole_with_real_weights(model, sample):
    from asrmask.audio.recording import load_audio
    from asrmask.audio.spectrogram import log_mel_spectrogram, pad_or_trim

    features = model.encode(log_mel_spectrogram(pad_or_trim(load_audio(sample)))[None])
    tokens = torch.randint(0, 50_000, (1, 30), generator=torch.Generator().manual_seed(0))
    whole = model.logits(tokens, features)
    for size in (1, 3):
        assert torch.allclose(by_chunks(model, tokens, features, size), whole, atol=1e-3)


def test_later_tokens_do_not_change_earlier_logits(small, mel, tokens):
    features = small.encode(mel)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % DIMS.n_vocab
    before, after = small.logits(tokens, features), small.logits(changed, features)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any()


def test_encoder_mask_hides_what_lies_behind_it(small, mel):
    """Position t sees frames up to 2t + 2 by the convolutions: behind those nothing counts."""
    mask = masks.padding([20, 20], 50)
    garbage = mel.clone()
    garbage[:, :, 42:] = 100 * torch.randn(2, 80, 58)
    assert torch.equal(small.encode(mel, mask)[:, :20], small.encode(garbage, mask)[:, :20])
    assert (small.encode(mel)[:, :20] != small.encode(garbage)[:, :20]).any()


def test_cross_mask_hides_features(small, mel, tokens):
    features = small.encode(mel)
    mask = masks.padding([20, 50], 50)
    garbage = features.clone()
    garbage[0, 20:] = 100
    assert torch.equal(small.logits(tokens, features, mask), small.logits(tokens, garbage, mask))
    assert (small.logits(tokens, features) != small.logits(tokens, garbage)).any()


def test_no_gradient_reaches_a_hidden_frame(small, mel, tokens):
    mel.requires_grad_()
    features = small.encode(mel, masks.padding([20, 30], 50))
    small.logits(tokens, features, masks.padding([20, 30], 50)).sum().backward()
    for clip, n in enumerate((20, 30)):
        assert mel.grad[clip, :, 2 * n + 1 :].eq(0).all()
        assert mel.grad[clip, :, : 2 * n].ne(0).any(dim=0).all()


def test_all_valid_masks_are_bit_identical_to_none(small, mel, tokens):
    features = small.encode(mel)
    assert torch.equal(small.encode(mel, masks.padding([50, 50], 50)), features)
    cross = masks.padding([50, 50], 50)
    assert torch.equal(small.logits(tokens, features, cross), small.logits(tokens, features))


def test_masks_with_an_empty_row_are_refused(small, mel, tokens):
    empty = torch.zeros(2, 1, 1, 50, dtype=torch.bool)
    with pytest.raises(OptionError, match="something visible"):
        small.encode(mel, empty)
    with pytest.raises(OptionError, match="something visible"):
        small.logits(tokens, small.encode(mel), empty)


def test_recording_changes_nothing_and_names_every_place(small, mel, tokens):
    places = {}

    def record(place, quantity, tensor):
        places[place, quantity] = tuple(tensor.shape)

    features = small.encode(mel, record=record)
    assert torch.allclose(features, small.encode(mel), atol=1e-5)
    logits = small.logits(tokens, features, record=record)
    assert torch.allclose(logits, small.logits(tokens, features), atol=1e-5)
    for layer in range(2):
        assert places[f"encoder.{layer}.self", "weights"] == (2, 4, 50, 50)
        assert places[f"decoder.{layer}.self", "scores"] == (2, 4, 12, 12)
        assert places[f"decoder.{layer}.cross", "weights"] == (2, 4, 12, 50)
        assert places[f"decoder.{layer}.cross", "outputs"] == (2, 4, 12, 8)


@pytest.mark.parametrize("shape", [(80, 100), (2, 64, 100), (2, 80, 102), (2, 80, 0)])
def test_spectrograms_of_another_shape_are_refused(small, shape):
    with pytest.raises(OptionError, match=r"mel must be \(B, 80, 1\.\.100 frames\), got"):
        small.encode(torch.zeros(shape))


def test_a_text_longer_than_the_context_is_refused(small, mel):
    with pytest.raises(OptionError, match="at most 24 tokens, got 25"):
        small.logits(torch.zeros(2, 25, dtype=torch.long), small.encode(mel))
