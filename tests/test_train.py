"""Training under masks: gradients, teacher forcing, batches, augmentation, resuming, adapters."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_files import SMALL

from asrmask.audio.recording import Recording, load_audio
from asrmask.audio.spectrogram import Spectrogram
from asrmask.checkpoints import load_model
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.errors import OptionError
from asrmask.evaluation.corpus import Clip
from asrmask.model.encoding import encode, encode_with_gradients
from asrmask.model.policy import Policy
from asrmask.training import augment, losses
from asrmask.training import spec as specs
from asrmask.training.examples import Batches, rng, split, versions_of
from asrmask.training.spec import Augmentation, LossWeights, TrainSpec
from asrmask.training.teacher import Target
from asrmask.training.trainer import CHECKPOINT, Trainer
from asrmask.transcription.api import TranscribingWhisper

POLICIES = ("mask:encoder", "mask:cross", "mask:both", "trim", "trim,sink=0.5", "virtual")
SOT, NO_TIMESTAMPS, EOT = 50_257, 50_362, 50_256


@pytest.fixture(scope="module")
def small():
    """A Whisper of random weights that is quick to train, in float64."""
    torch.manual_seed(0)
    made = TranscribingWhisper(SMALL).double().eval()
    return made.requires_grad_(True)


def window_of(seconds, seed=0, fill="zero"):
    samples = np.random.default_rng(seed).standard_normal(int(16_000 * seconds), np.float32) / 9
    spectrogram = Spectrogram(Recording.of(samples), 80)
    return spectrogram.window(0, spectrogram.n_frames, fill=fill)


def target_of(window, words, n_likeliest=4, seed=0):
    """A target of random features and probabilities, with `words` tokens and the end token."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([SOT, NO_TIMESTAMPS, *words, EOT])
    n_text = len(words) + 1
    features = torch.randn(window.n_positions, 16, generator=draw, dtype=torch.float64)
    likeliest = torch.stack([torch.randperm(1000, generator=draw)[:n_likeliest]] * n_text)
    return Target(tokens, 2, features, likeliest, torch.full((n_text, n_likeliest), -2.0).double())


WEIGHTS = LossWeights(text=1, features=1, logits=1)


def gradients(model, batches):
    """The gradient of the loss over accumulated batches, all weights in one row."""
    model.zero_grad(set_to_none=True)
    below = {n: sum(b.denominators()[n] for b in batches) for n in losses.NAMES}
    for batch in batches:
        found = losses.sums(model, batch, WEIGHTS)
        sum(value / below[name] for name, value in found.items()).backward()
    return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])


@pytest.mark.parametrize("policy", ["mask:both", "trim", "trim,margin=0.1"])
def test_no_gradient_reaches_hidden_positions(small, policy):
    window, short = window_of(1.0), window_of(0.4, seed=1)
    mels = [w.mel.double().requires_grad_(True) for w in (window, short)]
    windows = [replace(w, frames=m) for w, m in zip((window, short), mels, strict=True)]
    encoded = encode_with_gradients(small, windows, policy)
    targets = [target_of(window, [11, 12]), target_of(short, [13])]
    losses.forced_logits(small, encoded, targets).square().sum().backward()
    for mel, one in zip(mels, windows, strict=True):
        n = 2 * Policy.parse(policy).visible(one.n_positions)
        assert mel.grad[:, n:].count_nonzero() == 0
        assert mel.grad[:, : one.n_frames].count_nonzero() > 0


def test_hidden_keys_get_no_gradient_in_the_encoder_alone(small):
    """Under mask:encoder the padding is computed and read by the decoder, but not by the audio."""
    window = window_of(1.0)
    mel = window.mel.double().requires_grad_(True)
    encoded = encode_with_gradients(small, [replace(window, frames=mel)], "mask:encoder")
    encoded.features[0, : window.n_positions - 1].square().sum().backward()
    assert mel.grad[:, window.n_frames + 1 :].count_nonzero() == 0


@pytest.mark.parametrize("policy", POLICIES[:-1])
def test_one_pass_is_step_by_step(small, policy):
    window = window_of(1.3)
    target = target_of(window, [11, 12, 13, 14])
    encoded = encode(small, [window], policy)
    with torch.inference_mode():
        at_once = losses.forced_logits(small, encoded, [target])
        cache, steps = small.decoder.cache(1), []
        for token in target.tokens[:-1]:
            x, cache = small.decoder(token[None, None], encoded, cache)
            steps.append(small.decoder.logits(x[0]))
    assert at_once.shape == (5, SMALL.n_vocab)
    torch.testing.assert_close(at_once, torch.cat(steps)[1:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES[:-1])
def test_a_batch_has_the_gradient_of_its_clips_one_by_one(small, policy):
    windows = [window_of(seconds, seed=i) for i, seconds in enumerate((0.7, 2.0, 1.1))]
    texts = ([11, 12, 13, 14, 15, 16], [21], [31, 32, 33])
    targets = [target_of(w, t, seed=i) for i, (w, t) in enumerate(zip(windows, texts, strict=True))]
    policy = Policy.parse(policy)
    together = gradients(small, [losses.TrainingBatch(windows, targets, policy)])
    alone = gradients(
        small,
        [losses.TrainingBatch([w], [t], policy) for w, t in zip(windows, targets, strict=True)],
    )
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    mean_of_means = sum(
        gradients(small, [losses.TrainingBatch([w], [t], policy)])
        for w, t in zip(windows, targets, strict=True)
    )
    assert not torch.allclose(together, mean_of_means / 3, atol=1e-5, rtol=1e-3)


def test_trim_has_the_gradient_of_mask_both(small):
    window = window_of(1.0)
    target = target_of(window, [11, 12])
    trim, both = (
        gradients(small, [losses.TrainingBatch([window], [target], Policy(kind))])
        for kind in ("trim", "mask:both")
    )
    torch.testing.assert_close(trim, both, atol=1e-9, rtol=1e-6)


def test_the_loss_counts_text_alone(small):
    """A longer text beside it, which pads a text, changes nothing; nor does the prompt count."""
    window = window_of(1.0)
    short, long = target_of(window, [11]), target_of(window, [11, 12, 13, 14, 15])
    encoded = encode(small, [window], "trim")
    both = encode(small, [window, window], "trim")
    with torch.inference_mode():
        alone = losses.forced_logits(small, encoded, [short])
        beside = losses.forced_logits(small, both, [short, long])
    assert len(alone) == 2
    assert len(beside) == 2 + 6
    torch.testing.assert_close(alone, beside[:2], atol=1e-6, rtol=1e-6)


def test_divergence_is_zero_for_equal_probabilities():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).double()
    logprobs, likeliest = logits.log_softmax(dim=-1).topk(8)
    target = Target(torch.arange(5), 2, torch.empty(0, 16), likeliest, logprobs)
    assert float(losses.divergence(logits, [target])) == pytest.approx(0, abs=1e-9)
    assert float(losses.divergence(logits.flip(-1), [target])) > 1


# audio


def test_spec_augment_never_touches_padding(small):
    window = window_of(2.0, fill="silence")
    changed = Augmentation(time_masks=3, time_mask_s=1.0, mel_masks=3, mel_mask=20)
    masked = augment.with_masks(window, changed, rng("masks"))
    n = window.n_frames
    assert torch.equal(masked.frames[:, n:], window.frames[:, n:])
    assert (masked.frames[:, :n] != window.frames[:, :n]).float().mean() > 0.05
    assert masked.n_frames == n
    again = augment.with_masks(window, changed, rng("masks"))
    assert torch.equal(masked.frames, again.frames)
    other = augment.with_masks(window, changed, rng("other"))
    assert not torch.equal(masked.frames, other.frames)
    before = torch.random.get_rng_state()
    augment.with_masks(window, changed, rng("masks"))
    assert torch.equal(before, torch.random.get_rng_state())


def test_noise_and_silence_are_drawn_from_the_seed():
    samples = np.ones(16_000, np.float32) / 2
    changed = Augmentation(noise_db=(-40, -40), silence_s=2)
    first, again = (augment.with_noise(samples, changed, rng("a")) for _ in range(2))
    assert np.array_equal(first, again)
    assert 16_000 < len(first) <= 48_000
    assert np.std(first[:16_000]) == pytest.approx(0.01, rel=0.05)
    assert np.std(first[16_000:]) == pytest.approx(0.01, rel=0.1)
    full = np.zeros(480_000, np.float32)
    assert len(augment.with_noise(full, replace(changed, noise_db=()), rng("a"))) == 480_000


def test_cuts_are_the_same_in_every_run(sample):
    clip = Clip(sample, id="a")
    whole, *cut = versions_of(clip, 3.0, 4)
    assert (whole.n_samples, whole.is_cut) == (48_000, False)
    assert len({example.n_samples for example in cut}) == 4
    assert all(16_000 <= example.n_samples <= 48_000 and example.is_cut for example in cut)
    assert cut == versions_of(clip, 3.0, 4)[1:]


def test_batches_hold_each_clip_once_in_an_epoch(sample):
    versions = [versions_of(Clip(sample, id=str(i)), 1 + i / 10, 1) for i in range(50)]
    batches = Batches(versions, 8, seed=0)
    for epoch in (0, 1):
        first = epoch * batches.n_per_epoch
        found = [batches[first + i] for i in range(batches.n_per_epoch)]
        ids = [example.clip.id for batch in found for example in batch]
        assert sorted(ids, key=int) == [str(i) for i in range(50)]
        spreads = [max(e.n_samples for e in b) - min(e.n_samples for e in b) for b in found]
        assert np.median(spreads) < 16_000
    assert batches[0] == Batches(versions, 8, seed=0)[0]
    assert [b.clip.id for b in batches[0]] != [b.clip.id for b in Batches(versions, 8, 1)[0]]


def test_held_out_clips_do_not_depend_on_order_or_seed(sample):
    clips = [Clip(sample, id=str(i)) for i in range(20)]
    trained, held_out = split(clips, 5)
    assert len(held_out) == 5
    assert not {c.id for c in trained} & {c.id for c in held_out}
    assert {c.id for c in split(clips[::-1], 5)[1]} == {c.id for c in held_out}


# runs

QUICK = TrainSpec(
    policies=("trim",),
    steps=3,
    batch_size=1,
    accumulate=2,
    held_out=0,
    timestamps=0.0,
    precision="float32",
    augment=Augmentation(cuts=1, time_masks=1, noise_db=(-60, -50)),
)


@pytest.fixture(scope="module")
def speech(samples, tmp_path_factory):
    """The sample clips, cut to 1.5 s each, with a folder of targets that tests share."""
    clips = [Clip(path, text) for path, text in samples.items()][:2]
    return clips, dict.fromkeys([clip.id for clip in clips], 1.5), tmp_path_factory.mktemp("t")


def trainer(speech, folder, spec=QUICK):
    clips, durations_s, targets = speech
    folder.mkdir(exist_ok=True)
    return Trainer(spec, load_model("tiny.en"), clips, durations_s, folder, targets)


def nothing(*args, **options):
    pass


def test_an_interrupted_run_gives_the_same_weights(speech, tmp_path, one_thread):
    whole = trainer(speech, tmp_path / "whole")
    whole.run(nothing)
    first = trainer(speech, tmp_path / "parts")
    first.progress.history.append(first.train_step())
    first.progress.step = 1
    first.save()
    second = trainer(speech, tmp_path / "parts")
    assert second.progress.step == 1
    second.run(nothing)
    assert second.progress.step == 3
    for name, weight in whole.weights.parameters.items():
        assert torch.equal(weight, second.weights.parameters[name]), name
    losses_of = [[entry["loss"] for entry in t.progress.history] for t in (whole, second)]
    assert losses_of[0] == losses_of[1]
    with pytest.raises(OptionError, match="holds a run with other spec"):
        trainer(speech, tmp_path / "parts", replace(QUICK, seed=1))
    (tmp_path / "parts" / CHECKPOINT).write_bytes(b"damaged")
    with pytest.raises(OptionError, match="expected a checkpoint"):
        trainer(speech, tmp_path / "parts")


def test_two_clips_are_learned_by_heart(samples, tmp_path, one_thread):
    """Cross-entropy under `trim`, which the model cannot read at first, to zero errors."""
    texts = ["Seventeen purple elephants.", "The cat sat."]
    clips = [Clip(path, text) for path, text in zip(samples, texts, strict=False)]
    spec = TrainSpec(
        policies=("trim",),
        steps=24,
        batch_size=2,
        held_out=0,
        learning_rate=4e-3,
        warmup=4,
        losses=LossWeights(text=1, features=0, logits=0),
    )
    durations_s = {clip.id: 2.0 for clip in clips}
    made = Trainer(spec, load_model("tiny.en"), clips, durations_s, tmp_path)
    made.run(nothing)
    assert not (tmp_path / "targets").exists()  # nothing to distil
    model = load_model("tiny.en", adapter=tmp_path / "adapter.safetensors")
    for clip, text in zip(clips, texts, strict=True):
        spectrogram = Spectrogram(Recording.of(load_audio(clip.path)[:32_000]), 80)
        window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
        options = DecodingOptions(without_timestamps=True)
        (result,) = decode_encoded(model, encode(model, [window], "trim"), options)
        assert result.text == text


@pytest.mark.parametrize("policy", ["virtual", "trim,positions=last", "trim,sink=0.5"])
def test_other_policies_can_be_trained_under(speech, tmp_path, policy):
    spec = replace(QUICK, policies=(policy,), learning_rate=5e-5, warmup=0)
    made = trainer(speech, tmp_path, spec)
    batch = made.batch([made.batches[0][0]], Policy.parse(policy), Augmentation())
    before = made.backward([batch])
    assert 0 < before["features"] < 2
    for _ in range(3):
        made.optimizer.step()
        made.optimizer.zero_grad()
        after = made.backward([batch])
    assert after["features"] + after["logits"] < before["features"] + before["logits"]


def test_everything_can_be_trained(speech, tmp_path):
    spec = replace(QUICK, train="everything", learning_rate=1e-3, warmup=0, steps=1)
    made = trainer(speech, tmp_path, spec)
    before = copy.deepcopy(made.model.state_dict())
    made.run(nothing)
    after = load_model(str(tmp_path / "model.pt")).state_dict()
    changed = [n for n, w in before.items() if not torch.allclose(w, after[n], atol=1e-5)]
    assert any("encoder" in name for name in changed)
    assert any("decoder" in name for name in changed)


def test_the_command_writes_an_adapter_and_a_page(run, samples, tmp_path):
    data, spec, out = tmp_path / "data", tmp_path / "train.toml", tmp_path / "out"
    data.mkdir()
    rows = "".join(f"{path}\n" for path in list(samples)[:3])
    (data / "manifest.tsv").write_text(f"path\n{rows}")
    spec.write_text("policies = ['trim']\nsteps = 1\nbatch_size = 2\nheld_out = 1\n")
    command = ["train", data, "--spec", spec, "--out", out, "--threads", "1"]
    code, printed, err = run(*command)
    assert code == 0, err
    assert printed.startswith(f"{out / 'adapter.safetensors'}: step ")
    page = (out / "train.html").read_text(encoding="utf-8")
    assert "Training of tiny.en under trim" in page
    assert "step 1 of 1 ·" in page
    assert page.count("<figure>") == 2
    (out / "train.html").unlink()
    assert run("report", out)[0] == 0
    again = (out / "train.html").read_text(encoding="utf-8")
    without_images = [re.sub(r'src="[^"]+"', "", text) for text in (page, again)]  # of random ids
    assert without_images[0] == without_images[1]
    adapter = (out / "adapter.safetensors").read_bytes()
    assert run(*command)[0] == 0  # it is done: nothing is trained again
    assert (out / "adapter.safetensors").read_bytes() == adapter
    (data / "manifest.tsv").write_text(f"path\n{rows}gone.wav\n")
    code, _, err = run(*command)
    assert code == 2
    assert "error: gone: no such file" in err
    assert "1 of 4 clips cannot be used; --skip_bad continues without them" in err


# specs


def test_spec_from_toml(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(
        'policies = ["trim", "virtual"]\nsteps = 5\n[adapter]\nrank = 4\n'
        "[losses]\ntext = 1\n[augment]\nnoise_db = [-50, -30]\n"
    )
    spec = specs.read(path)
    assert (spec.policies, spec.steps, spec.adapter.rank) == (("trim", "virtual"), 5, 4)
    assert spec.losses == LossWeights(text=1.0)
    assert spec.augment.noise_db == (-50.0, -30.0)
    assert [str(policy) for policy in spec.validation_policies] == ["trim", "virtual", "full"]
    assert spec.hash != TrainSpec().hash


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policies = []", "policies must be one or more"),
        ("policies = ['masked']", "padding must be one of"),
        ("train = 'nothing'", "train must be one of adapter, everything"),
        ("steps = 0", "steps must be 1 or more, got 0"),
        ("steps = '5'", "steps must be of type int"),
        ("precision = 'half'", "precision must be one of auto"),
        ("timestamps = 2", r"timestamps must be 0\.\.1"),
        ("learning_rate = -1.0", "learning_rate must be above 0"),
        ("adapter = 3", "adapter must be a table"),
        ("[adapter]\nrank = 0", r"rank must be 1\.\.512"),
        ("[adapter]\nlayers = ['all']", "layers must be of query, key"),
        ("[losses]\nfeatures = 0\nlogits = 0", "one of them above 0"),
        ("[augment]\nnoise_db = [-30, -50]", "noise_db must be two levels"),
        ("colour = 'red'", "spec must be of model, policies"),
        ("steps = [", "expected TOML"),
    ],
)
def test_wrong_specs_are_one_line(tmp_path, text, message):
    path = tmp_path / "train.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        specs.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
