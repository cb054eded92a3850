"""Virtual padding: exact where it can be, near where it cannot, and kept between runs."""

import math

import pytest
import torch

from asrmask import masks, virtual
from asrmask.audio import Features, Recording, Spectrogram
from asrmask.decoding import decode
from asrmask.encoding import encode, plan, with_bank
from asrmask.model import ModelDimensions, Whisper
from asrmask.policy import Policy
from asrmask.virtual import Bank, Design, Layout, averaged


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
    keeper = virtual._Keeper()
    features = model.encoder(clip.mel[None], tail=keeper)[0]
    parts = (torch.stack(keeper.keys), torch.stack(keeper.values), features)
    return dict(zip(virtual.STORED, parts, strict=True))


def test_with_the_clips_own_padding_in_the_bank_it_is_full(model, clip):
    exact = Bank(model, own_bank(model, clip), Design(stride=1, cross_stride=1))
    planned = plan(Policy("virtual", 0.0), [clip.n_positions], exact.design)
    with torch.inference_mode():
        mine = with_bank(model, exact, clip.mel[None], planned)
    full = encode(model, [clip])
    assert (mine.features - full.features[:, : clip.n_positions]).abs().max() < 1e-4
    for keys, shared, expected in zip(mine.keys, mine.shared, full.keys, strict=True):
        joined = torch.cat([keys, shared.keys[:, :, keys.shape[2] :]], dim=2)
        assert (joined - expected).abs().max() < 1e-4


def test_the_features_are_near_those_of_full(model, samples):
    policy = Policy("virtual")
    for path in samples:
        spectrogram = Spectrogram(Recording.open(path), 80)
        window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
        n = window.n_positions
        mine, real = (encode(model, [window], p).features[0, :n] for p in (policy, Policy()))
        assert (mine - real).norm() / real.norm() < 0.1


def test_texts_are_those_of_full(model, samples):
    for path in samples:
        spectrogram = Spectrogram(Recording.open(path), 80)
        window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
        for choices in ({}, {"beam_size": 5}):
            mine = decode(model, window, padding="virtual", policy_fallback=False, **choices)
            assert mine.text == decode(model, window, **choices).text


def test_layout_counts_every_position_of_the_padding_once():
    for lengths in ([1], [37], [1499], [3, 700, 1500]):
        layout = Layout(torch.tensor(lengths), 1500, Design())
        crossed = masks.joined_keys(layout.own, layout.n_own, layout.cross_mask)
        for mask in (layout.mask, crossed, masks.aside(crossed)):
            assert torch.allclose(mask.exp().sum(dim=-1), torch.tensor(1500.0), atol=1e-2)


def test_layout_of_a_small_window():
    layout = Layout(torch.tensor([3]), 10, Design(stride=4, cross_stride=2))
    # own 0 1 2; groups 0-3, 4-7, 8-9, of which 1, 4 and 2 are padding
    expected = [0, 0, 0, 0, math.log(4), math.log(2)]
    assert torch.allclose(layout.mask[0, 0, 0], torch.tensor(expected))


def test_averages_of_positions_in_a_row():
    x = torch.arange(10.0).reshape(1, 5, 2)
    assert averaged(x, 2).tolist() == [[[1, 2], [5, 6], [8, 9]]]
    assert torch.equal(averaged(x[None], 1), x[None])


def test_a_bank_is_kept_and_read_again(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = virtual.stored(small)
    path = virtual.file_of(small)
    assert path.parent == tmp_path / "asrmask"
    monkeypatch.setattr(virtual, "build", None)  # not called
    assert all(torch.equal(made[name], x) for name, x in virtual.stored(small).items())


@pytest.mark.parametrize("damage", [b"", b"damaged", None])
def test_a_damaged_bank_is_built_again(small, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = virtual.file_of(small)
    path.parent.mkdir()
    if damage is None:
        path.mkdir()  # nor can it be written
    else:
        path.write_bytes(damage)
    assert set(virtual.stored(small)) == set(virtual.STORED)


def test_the_bank_follows_the_weights(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bank = virtual.bank_of(small)
    assert virtual.bank_of(small) is bank
    before = virtual.file_of(small)
    with torch.no_grad():
        small.encoder.blocks[1].attn.key.weight.mul_(1.5)
    assert virtual.file_of(small) != before
    again = virtual.bank_of(small)
    assert not torch.equal(again.groups[1][0], bank.groups[1][0])
    assert torch.equal(again.groups[0][0], bank.groups[0][0])


def test_other_precision_and_shape(small):
    half = Whisper(small.dims)
    half.load_state_dict(small.state_dict())
    half.to(torch.bfloat16).requires_grad_(False).eval()
    mel = torch.zeros(80, 3000)
    mel[:, :200] = torch.randn(80, 200)
    memory = encode(half, [Features(mel, 200), Features(mel, 90)], "virtual")
    assert memory.features.dtype == torch.bfloat16
    # 100 and 45 positions, a margin of 32, and up to a multiple of 32
    assert memory.features.shape == (2, 160, 32)
    assert memory.keys[0].shape == (2, 2, 160, 16)
    assert memory.shared[0].keys.shape == (1, 2, 1500 // 4, 16)
