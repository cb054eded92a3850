"""Virtual padding: exact where it can be, near where it cannot, and kept between runs."""

import pytest
import torch

from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.decoding.task import decode
from asrmask.evaluation.score import errors
from asrmask.model import virtual_padding
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import Bank, Design, Layout, average
from asrmask.model.whisper import Whisper


@pytest.fixture(scope="module")
def clip(sample):
    spectrogram = Spectrogram(Recording.open(sample), 80)
    return spectrogram.window(0, spectrogram.n_frames, fill="zero")


@pytest.fixture(scope="module")
def small():
    """A model with random weights: quick to build banks of."""
    torch.manual_seed(0)
    model = Whisper(ModelDimensions(80, 1500, 32, 2, 2, 51_864, 448, 32, 2, 2))
    return model.requires_grad_(False).eval()


@torch.inference_mode()
def own_bank(model, clip):
    """What the padding of that very clip is."""
    keeper = virtual_padding._KeepKeys()
    features = model.encoder(clip.mel[None], padding=keeper)[0]
    parts = (torch.stack(keeper.keys), torch.stack(keeper.values), features)
    return dict(zip(virtual_padding.STORED, parts, strict=True))


def test_with_the_clips_own_padding_in_the_bank_it_is_full(model, clip):
    exact = Bank(model, own_bank(model, clip), Design(stride=1))
    mine = encode(model, [clip], Policy("virtual", 0.0), bank=exact)
    full = encode(model, [clip])
    n = mine.features.shape[1]  # a multiple of 32: a little of the padding is computed
    assert (mine.features - full.features[:, :n]).abs().max() < 1e-4
    for (own,), (expected,) in zip(mine.layers, full.layers, strict=True):
        assert own.mask.eq(0).all()
        assert (own.keys - expected.keys).abs().max() < 1e-4
        assert (own.values - expected.values).abs().max() < 1e-4


def test_the_features_are_near_those_of_full(model, samples):
    policy = Policy("virtual")
    for path in samples:
        spectrogram = Spectrogram(Recording.open(path), 80)
        window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
        n = window.n_positions
        mine, real = (encode(model, [window], p).features[0, :n] for p in (policy, Policy()))
        assert (mine - real).norm() / real.norm() < 0.1


def test_texts_are_near_those_of_full(model, samples):
    """Word for word, in greedy and beam search, nearly all of them."""
    found = []
    for path in samples:
        spectrogram = Spectrogram(Recording.open(path), 80)
        window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
        for choices in ({}, {"beam_size": 5}):
            mine = decode(model, window, padding="virtual", policy_fallback=False, **choices)
            found.append(errors(decode(model, window, **choices).text, mine.text))
    assert sum(one.total for one in found) / sum(one.n_words for one in found) < 0.05


def test_keys_stand_for_every_position_of_the_window_once():
    for lengths in ([1], [37], [1490], [3, 700, 1500]):
        layout = Layout(torch.tensor(lengths), Design())
        for mask in (layout.mask, layout.cross_mask):
            assert torch.allclose(mask.exp().sum(dim=-1), torch.tensor(1500.0), atol=1e-2)


def test_cross_attention_sees_the_windows_end_position_by_position():
    counts = Layout(torch.tensor([1438]), Design()).cross_mask[0, 0, 0].exp().round()[1438:]
    # 1438, 1439; 1440 … 1455; 1456 … 1471; 1472 … 1474; then 25 positions one by one
    assert counts.tolist() == [2, 16, 16, 3, *[1] * 25]


def test_layout_near_the_end_of_the_window():
    mask = Layout(torch.tensor([1489]), Design(stride=4)).mask[0, 0, 0]
    # groups from 1488 on: 3 positions of padding, then 4 and 4
    assert torch.allclose(mask[1489:].exp(), torch.tensor([3.0, 4.0, 4.0]))
    assert mask[:1489].eq(0).all()


def test_averages_of_positions_in_a_row():
    x = torch.arange(10.0).reshape(1, 5, 2)
    assert average(x, 2).tolist() == [[[1, 2], [5, 6], [8, 9]]]
    assert torch.equal(average(x[None], 1), x[None])


def test_a_bank_is_kept_and_read_again(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = virtual_padding.stored(small)
    path = virtual_padding.file_of(small)
    assert path.parent == tmp_path / "asrmask"
    monkeypatch.setattr(virtual_padding, "build", None)  # not called
    assert all(torch.equal(made[name], x) for name, x in virtual_padding.stored(small).items())


@pytest.mark.parametrize("damage", [b"", b"damaged", None])
def test_a_damaged_bank_is_built_again(small, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = virtual_padding.file_of(small)
    path.parent.mkdir()
    if damage is None:
        path.mkdir()  # nor can it be written
    else:
        path.write_bytes(damage)
    assert set(virtual_padding.stored(small)) == set(virtual_padding.STORED)


def test_the_bank_follows_the_weights(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bank = virtual_padding.bank_of(small)
    assert virtual_padding.bank_of(small) is bank
    before = virtual_padding.file_of(small)
    with torch.no_grad():
        small.encoder.blocks[1].attn.key.weight.mul_(1.5)
    assert virtual_padding.file_of(small) != before
    again = virtual_padding.bank_of(small)
    assert not torch.equal(again.groups[1][0], bank.groups[1][0])
    assert torch.equal(again.groups[0][0], bank.groups[0][0])


def test_other_precision_and_shape(small):
    half = Whisper(small.dims)
    half.load_state_dict(small.state_dict())
    half.to(torch.bfloat16).requires_grad_(False).eval()
    mel = torch.zeros(80, 3000)
    mel[:, :200] = torch.randn(80, 200)
    encoded = encode(half, [Features(mel, 200), Features(mel, 90)], "virtual")
    assert encoded.features.dtype == torch.bfloat16
    # 100 and 45 positions, a margin of 32, and up to a multiple of 32
    assert encoded.features.shape == (2, 160, 32)
    ((keys, _, mask),) = encoded.layers[0]
    # groups from position 96 to 1475, then 25 positions
    assert keys.shape == (2, 2, 160 + 87 + 25, 16)
    assert torch.allclose(mask.exp().sum(dim=-1), torch.tensor(1500.0), atol=1e-2)
