"""The comparison with openai-whisper: it sees every difference, and finds none."""

import pytest
import torch

from asrmask import DecodingOptions, Recording, Settings, Spectrogram, detect_language
from asrmask.audio.constants import N_FRAMES
from asrmask.audio.recording import load_audio
from asrmask.comparison.divergence import first_divergence
from asrmask.comparison.run import Comparison, UpstreamPeer, run
from asrmask.comparison.transcripts import first_difference
from asrmask.evaluation import corpus
from asrmask.evaluation.corpus import Clip
from asrmask.systems import upstream
from asrmask.tokenizer.tokenizer import get_tokenizer
from asrmask.transcription.result import Segment, Transcription, Word

pytestmark = pytest.mark.usefixtures("one_thread")


# --- differences


def made():
    """A transcription of two segments, the first with word times."""
    words = [Word(" So", 0.0, 0.4, 0.9), Word(" it", 0.4, 0.6, 0.8)]
    return Transcription(
        " So it is.",
        [
            Segment(0, 0, 0.0, 1.0, " So it", [1, 2], 0.0, -0.2, 1.1, 0.01, words),
            Segment(1, 0, 1.0, 2.0, " is.", [3], 0.0, -0.2, 1.1, 0.01),
        ],
    )


CHANGES = {
    "language": (lambda t: t.update(language="de"), "language: ours en, theirs de"),
    "seek": (lambda t: t["segments"][1].update(seek=9), "segment 1, seek: ours 0, theirs 9"),
    "start": (lambda t: t["segments"][0].update(start=0.04), "segment 0, start: ours 0.0, theirs"),
    "end": (lambda t: t["segments"][1].update(end=2.04), "segment 1, end: ours 2.0, theirs 2.04"),
    "text": (lambda t: t["segments"][1].update(text=""), "segment 1, text: ours ' is.', theirs ''"),
    "tokens": (lambda t: t["segments"][1]["tokens"].append(4), "segment 1, tokens: ours [3], "),
    "temperature": (lambda t: t["segments"][0].update(temperature=0.2), "segment 0, temperature: "),
    "word": (
        lambda t: t["segments"][0]["words"][1].update(word=" is"),
        "segment 0, word 1, word: ours ' it', theirs ' is'",
    ),
    "word's start": (
        lambda t: t["segments"][0]["words"][1].update(start=0.5),
        "segment 0, word 1, start: ours 0.4, theirs 0.5",
    ),
    "word's end": (
        lambda t: t["segments"][0]["words"][0].update(end=0.5),
        "segment 0, word 0, end: ours 0.4, theirs 0.5",
    ),
    "fewer words": (lambda t: t["segments"][0]["words"].pop(), "segment 0: other words"),
    "no words": (lambda t: t["segments"][0].pop("words"), "segment 0: other words"),
    "fewer segments": (lambda t: t["segments"].pop(), "ours 2 segments, theirs 1"),
    "more segments": (
        lambda t: t["segments"].append(t["segments"][0]),
        "ours 2 segments, theirs 3",
    ),
    "whole text": (lambda t: t.update(text=" So it is"), "text"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_difference_is_named(name):
    change, expected = CHANGES[name]
    theirs = made().to_dict()
    change(theirs)
    found = first_difference(made(), theirs)
    assert str(found).startswith(expected)
    assert not found.is_near


def test_no_difference_is_none():
    theirs = made().to_dict()
    assert first_difference(made(), theirs) is None
    # how sure the model was may differ in the last digits
    theirs["segments"][0].update(avg_logprob=-0.3, no_speech_prob=0.02, compression_ratio=1.2)
    theirs["segments"][0]["words"][0]["probability"] = 0.5
    assert first_difference(made(), theirs) is None


def test_the_first_difference_is_the_one_named():
    theirs = made().to_dict()
    theirs["segments"][1]["end"] = theirs["segments"][0]["end"] = 9.0
    assert str(first_difference(made(), theirs)).startswith("segment 0, end")


def test_a_time_may_be_one_position_off_and_what_follows_is_its_consequence():
    theirs = made().to_dict()
    theirs["segments"][0]["words"][1]["end"] += 0.02
    found = first_difference(made(), theirs)
    assert found.is_near
    assert str(found).startswith("segment 0, word 1, end: ours 0.6, theirs 0.62")
    theirs["segments"][1]["seek"] = 99  # the next window begins elsewhere: no news
    ours = made()
    ours.segments[1].seek = 97
    assert first_difference(ours, theirs).is_near
    theirs["segments"][0]["tokens"] = [1]  # in the same window: news
    assert not first_difference(ours, theirs).is_near


# --- the same as openai-whisper


@pytest.fixture(scope="module")
def base_twin(base_model):
    return upstream.twin(base_model)


@pytest.fixture(scope="module")
def spoken(shared):
    """A German and a French clip."""
    names = ("fleurs-de-004.ogg", "fleurs-fr-000.ogg")
    return [clip for clip in corpus.read(shared / "fleurs") if clip.path.name in names]


ONE_TRY = Settings(temperature=0.0, no_speech_threshold=None)


@pytest.mark.parametrize(
    "choices",
    [
        {"without_timestamps": True},
        {},
        {"beam_size": 5, "without_timestamps": True},
        {"beam_size": 5},
    ],
)
def test_sample_clips_are_equal_greedily_and_with_beams(model, upstream_model, samples, choices):
    comparison = Comparison(
        model, [UpstreamPeer(upstream_model)], ONE_TRY, DecodingOptions(**choices)
    )
    for path in list(samples)[1:3]:
        found = comparison.compare(Clip(path))["against"]["openai-whisper"]
        assert found["equal"]
        assert max(s["difference"] for s in found["stages"] if s["name"] == "logits") <= 1e-4


def test_a_difference_is_found_and_placed(model, upstream_model, sample):
    """The row of one token changed in one of two models: step, gap and first stage are named."""
    from asrmask.checkpoints import load_model

    changed = load_model("tiny.en")
    opponent, options = UpstreamPeer(upstream_model), DecodingOptions(without_timestamps=True)
    ours = run(model, load_audio(sample), ONE_TRY, options)
    third = ours.attempts[0].result.tokens[3]
    with torch.no_grad():
        changed.decoder.token_embedding.weight[third] *= 0.5
    ours = run(changed, load_audio(sample), ONE_TRY, options)
    _, attempts = opponent.transcribe(ours.samples, ONE_TRY, options)
    parting = first_divergence(changed, upstream_model, ours.attempts, attempts, ONE_TRY)
    assert parting.step == 3
    assert f"({third})" in parting.theirs
    assert parting.gap > 1e-3
    compared = Comparison(changed, [opponent], ONE_TRY, options).compare(Clip(sample))
    found = compared["against"]["openai-whisper"]
    # upstream's text has that token, at step 3 behind two of the opening: it is embedded first
    assert "0.00 s: decoder.token_embedding, token 5 (" in found["first_difference"]
    assert "step 3: asrmask" in found["then"]
    (logits,) = (stage for stage in found["stages"] if stage["name"] == "logits")
    assert not logits["equal"]
    assert all(s["difference"] == 0 for s in found["stages"] if "encoder" in s["name"])
    assert found["words_different"] > 0


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_languages_are_transcribed_and_translated_as_upstream_does(
    base_model, base_twin, spoken, task
):
    comparison = Comparison(
        base_model, [UpstreamPeer(base_twin)], Settings(), DecodingOptions(task=task)
    )
    for clip in spoken:
        compared = comparison.compare(clip)
        found = compared["against"]["openai-whisper"]
        assert found["first_difference"] is None
        assert found["near_tie"] is None
        assert compared["asrmask"]["language"] == found["language"] == clip.language


def test_languages_of_a_batch_are_those_of_each_clip_and_upstream_s(base_model, base_twin, spoken):
    windows = []
    for clip in spoken:
        spectrogram = Spectrogram(Recording.open(clip.path), base_model.dims.n_mels)
        n_frames = min(spectrogram.n_frames, N_FRAMES)
        windows.append(spectrogram.window(0, n_frames, fill="silence"))
    mel = torch.stack([window.mel for window in windows])
    tokens, probs = detect_language(base_model, mel)
    their_tokens, their_probs = upstream.whisper().detect_language(base_twin, mel)
    known = get_tokenizer(multilingual=True, num_languages=99).language_tokens
    assert tokens.tolist() == their_tokens.tolist() == [known[clip.language] for clip in spoken]
    for ours, theirs, clip in zip(probs, their_probs, spoken, strict=True):
        assert max(ours, key=ours.get) == clip.language
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert sum(ours.values()) == pytest.approx(1)
    token, single = detect_language(base_model, windows[1])
    assert token == tokens[1]
    assert single == pytest.approx(probs[1], abs=1e-5)


def test_words_of_a_long_recording_are_timed_as_upstream_does(model, upstream_model, shared):
    clip = Clip(shared / "longform" / "sonnet2.mp3")
    comparison = Comparison(
        model,
        [UpstreamPeer(upstream_model)],
        Settings(word_timestamps=True),
        DecodingOptions(),
    )
    compared = comparison.compare(clip)
    ours, theirs = compared["asrmask"], compared["against"]["openai-whisper"]
    assert theirs["first_difference"] is None
    assert theirs["near_tie"] is None
    assert len(ours["segments"]) > 5
    assert ours["words"] == theirs["words"]
    assert len(ours["words"]) > 100
