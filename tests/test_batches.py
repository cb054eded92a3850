"""Many windows at a time: each gets the text that it gets alone, and bad files fail alone."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asrmask import cli, load_audio, transcribe_all
from asrmask.audio.spectrogram import Features
from asrmask.checkpoints import load_model
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.quality import stops_early
from asrmask.errors import OptionError
from asrmask.model.encoding import encode, encode_all
from asrmask.model.policy import Policy
from asrmask.transcription import scheduler
from asrmask.transcription.speech import split_at_pauses
from asrmask.transcription.window_loop import DecodeRequest

FAST = {
    "padding": "virtual",
    "cut_at_pauses": True,
    "condition_on_previous_text": False,
    "temperature": 0.0,
}  # and times, which are compared


@pytest.fixture(scope="module")
def joined(samples):
    """Over a minute of speech."""
    return np.concatenate([load_audio(path) for path in samples] * 2)


@pytest.mark.parametrize("compute_type", ["float32", "int8", "float16", "bfloat16"])
def test_a_batch_gives_each_clip_what_it_gets_alone(samples, joined, compute_type):
    model = load_model("tiny.en", compute_type=compute_type)
    clips = [*samples, joined]
    together = transcribe_all(model, clips, batch_size=8, **FAST)
    for clip, found in zip(clips, together, strict=True):
        (alone,) = transcribe_all(model, [clip], batch_size=2, **FAST)
        assert found.text == alone.text
        if compute_type in {"float32", "int8"}:  # in half, times are near ties, and sums round
            assert [s.start for s in found.segments] == [s.start for s in alone.segments]
        assert [s.id for s in found.segments] == list(range(len(found.segments)))


def test_a_batch_of_upstreams_loop_says_what_the_loop_says(model, samples):
    one_by_one = transcribe_all(model, list(samples)[:3], batch_size=1, temperature=0.0)
    together = transcribe_all(model, list(samples)[:3], batch_size=3, temperature=0.0)
    assert [one.text for one in one_by_one] == [one.text for one in together]


def test_words_have_times_in_a_batch(model, samples):
    options = {**FAST, "word_timestamps": True}
    together = transcribe_all(model, list(samples)[:2], batch_size=2, **options)
    for path, found in zip(samples, together, strict=False):
        (alone,) = transcribe_all(model, [path], batch_size=2, **options)
        words = [[w.word for s in one.segments for w in s.words] for one in (found, alone)]
        assert words[0]
        assert words[0] == words[1]


def test_bad_files_in_a_batch_fail_alone(samples, tmp_path, capsys):
    (tmp_path / "bad.wav").write_text("no audio")
    good = [str(path) for path in list(samples)[:2]]
    files = [good[0], str(tmp_path / "bad.wav"), str(tmp_path / "gone.wav"), good[1]]
    out = tmp_path / "out"
    assert cli.main(["transcribe", *files, "--fast", "-f", "json", "-o", str(out)]) == 1
    said = capsys.readouterr()
    assert "bad.wav: expected audio" in said.err
    assert "2 of 4 files failed" in said.err
    texts = [json.loads((out / f"{name}.json").read_text())["text"] for name in stems(good)]
    assert all(texts)
    # on standard output in the order of the files
    assert said.out.split() == " ".join(texts).split()


def stems(paths):
    return [path.rsplit("/", 1)[1].removesuffix(".flac") for path in paths]


def test_flags_given_beside_fast_hold(monkeypatch, capsys):
    import argparse

    from asrmask.cli import transcribe

    parser = cli.Parser(prog="asrmask transcribe", allow_abbrev=False)
    transcribe.add_arguments(parser)
    args = parser.parse_args(["a.wav", "--fast", "--beam-size", "2"])
    assert isinstance(args, argparse.Namespace)
    assert (args.padding, args.compute_type, args.beam_size) == ("virtual", "int8", 2)
    parser = cli.Parser(prog="asrmask transcribe", allow_abbrev=False)
    transcribe.add_arguments(parser)
    args = parser.parse_args(["a.wav"])
    assert (args.padding, args.compute_type, args.beam_size, args.batch_size) == (None, None, 5, 1)


def test_sizes_are_checked(model):
    with pytest.raises(OptionError, match="batch_size must be 1 or more, got 0"):
        transcribe_all(model, [], batch_size=0)
    assert cli.main(["transcribe", "a.wav", "--batch_size", "0"]) == 2


@pytest.mark.parametrize(
    "policy",
    [*("full", "virtual", "trim,margin=0.5", "mask:both"), "trim,margin=0.5,sink=0.5"],
)
def test_windows_encoded_together_are_as_encoded_alone(model, policy):
    policy = Policy.parse(policy)
    generator = torch.Generator().manual_seed(0)
    windows = []
    for n in (40, 100, 100, 300):  # two are encoded together
        mel = torch.zeros(80, 3000)
        mel[:, :n] = torch.randn(80, n, generator=generator)
        windows.append(Features(mel, n))
    together = encode_all(model, windows, policy)
    for i, window in enumerate(windows):
        alone = encode(model, [window], policy)
        for (mine,), (expected,) in zip(together.select([i]).layers, alone.layers, strict=True):
            assert (mine.mask is None) == (policy.kind != "virtual")
            assert mine.keys.shape == expected.keys.shape
            assert torch.allclose(mine.keys, expected.keys, atol=1e-5)
            assert torch.allclose(mine.values, expected.values, atol=1e-5)


def test_finished_clips_leave_the_others_in_their_memory(model):
    window = Features(torch.zeros(80, 3000), 100)
    audio = encode_all(model, [window] * 4, Policy("trim"))
    left = audio.select([0, 2, 3]).select([1, 2])
    ((keys, _, _),), ((all_keys, _, _),) = left.layers[0], audio.layers[0]
    assert (left.n_clips, len(keys)) == (2, 2)
    assert keys.data_ptr() == all_keys[2:].data_ptr()


def waiting_loop(n_frames, **options):
    window = Features(torch.zeros(80, 3000), n_frames)
    request = DecodeRequest(window, Policy("virtual"), DecodingOptions(**options))
    return SimpleNamespace(request=request)


def test_windows_of_like_lengths_are_matched_with_the_one_that_waits_longest():
    waiting = [waiting_loop(n) for n in (500, 3000, 600, 100, 550)]
    chosen = scheduler.choose_batch(waiting, 3)
    assert [one.request.window.n_frames for one in chosen] == [500, 550, 600]


def test_windows_with_other_options_wait():
    first, second = waiting_loop(500), waiting_loop(510)
    drawn = waiting_loop(500, temperature=0.2)
    waiting = [first, waiting_loop(500, language="de"), second, drawn]
    chosen = scheduler.choose_batch(waiting, 8)
    assert list(map(id, chosen)) == [id(first), id(second)]
    assert list(map(id, scheduler.choose_batch([drawn], 8))) == [id(drawn)]


class Noise:
    """A spectrogram that is quiet at some frames."""

    def __init__(self, n_frames, quiet):
        self.n_frames = n_frames
        self.loudness = torch.zeros(n_frames)
        for frame in quiet:
            self.loudness[frame - 20 : frame + 20] = -5


def test_a_long_recording_is_cut_where_it_is_quiet():
    assert split_at_pauses(Noise(2900, []), 0, 2900, 3000) == [(0, 2900)]
    assert split_at_pauses(Noise(100, []), 100, 100, 3000) == []
    parts = split_at_pauses(Noise(4400, [1300, 3000]), 0, 4400, 3000)
    assert [abs(a - b) < 25 for a, b in zip([1300, 3000], [parts[0][1], parts[1][1]], strict=True)]
    assert parts[0][0] == 0
    assert parts[-1][1] == 4400
    for n in (3001, 4000, 9000, 123456):
        parts = split_at_pauses(Noise(n, []), 0, n, 3000)
        assert all(0 < b - a <= 3000 for a, b in parts)
        assert [a for a, _ in parts[1:]] == [b for _, b in parts[:-1]]


def test_a_text_that_stops_at_a_pause_is_read_on_with_timestamps(samples, monkeypatch):
    """Without timestamps a heading may be taken for all: the loop decodes again, and goes on."""
    from asrmask.transcription import window_loop

    model = load_model("tiny.en", compute_type="int8")
    options = {**FAST, "without_timestamps": True}
    path = next(iter(samples))
    (whole,) = transcribe_all(model, [path], batch_size=2, **options)
    assert whole.padding.fallbacks == {}
    seen = []

    def early(text, window):
        seen.append(text)
        return len(seen) == 1

    monkeypatch.setattr(window_loop, "stops_early", early)
    (again,) = transcribe_all(model, [path], batch_size=2, **options)
    assert again.padding.fallbacks == {"stops early": 1}
    words = [text.lower().replace(",", "").split() for text in (whole.text, again.text)]
    assert len(set(words[0]) & set(words[1])) > 0.8 * len(set(words[0]))


@pytest.mark.parametrize(
    ("options", "fallbacks"),
    [
        ({}, {"unsure": 1}),
        ({"logprob_threshold": None}, {}),
        ({"temperature": (0.0, 0.2)}, {}),
    ],
)
def test_an_uncertain_text_is_decoded_again(samples, monkeypatch, options, fallbacks):
    """With one temperature, the limit is stricter than with several."""
    from asrmask.transcription import window_loop

    monkeypatch.setattr(window_loop, "MIN_SURE_LOGPROB", 0.0)  # no text reaches it
    model = load_model("tiny.en")
    result = model.transcribe(next(iter(samples)), **(FAST | options))
    assert result.padding.fallbacks == fallbacks


def test_a_text_is_too_short_for_loud_speech_only():
    mel = torch.full((80, 3000), -1.0)
    mel[:, 100:900] = 0.5  # 8 s that are loud
    window = Features(mel, 1500)
    assert stops_early("Chapter one.", window)
    assert not stops_early("as much text as people say in a few seconds" * 3, window)
    mel[:, 180:900] = -1.0
    assert not stops_early("No.", Features(mel, 1500))
