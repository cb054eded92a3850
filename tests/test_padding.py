"""Padding policies in the window loop and on the command line."""

import json

import numpy as np
import pytest

from asrmask import load_audio, transcribe
from asrmask.cli import main
from asrmask.errors import OptionError
from asrmask.model.policy import Policy
from asrmask.transcription.settings import Settings


@pytest.mark.parametrize(
    "text", ["virtual", "trim,margin=2", "trim,margin=1.28,sink=0.5", "mask:encoder", "full"]
)
def test_the_window_loop_records_what_became_of_the_padding(model, sample, text):
    result = transcribe(model, str(sample), padding=text)
    use = result.padding
    assert use.policy == text
    assert use.windows == 1
    computed, avoided = Policy.parse(text).padding_s(355)
    fell_back = sum(use.fallbacks.values())
    assert use.padding_avoided_s == (0 if fell_back else avoided)
    assert use.padding_computed_s == pytest.approx(computed + (22.9 if fell_back else 0))
    assert result.segments[0].policy == ("full" if fell_back else text)
    assert "Dashwood" in result.text


def test_without_a_policy_the_result_is_upstreams(model, sample):
    result = transcribe(model, str(sample))
    assert "padding" not in result
    assert "policy" not in result.segments[0]


def test_a_window_that_runs_away_is_decoded_again_and_counted(model, sample):
    result = transcribe(model, str(sample), padding="trim", sample_len=4, temperature=0.0)
    assert result.padding.fallbacks == {"no end": 1}
    assert {segment.policy for segment in result.segments} == {"full"}
    assert result.padding.padding_avoided_s == 0
    assert "1 of 1 windows decoded again with all of it (no end: 1)" in str(result.padding)
    bare = transcribe(
        model, str(sample), padding="trim", sample_len=4, temperature=0.0, policy_fallback=False
    )
    assert bare.padding.fallbacks == {}
    assert bare.segments[0].policy == "trim"


def test_word_times_and_clips_under_virtual_padding(model, sample):
    choices = {"word_timestamps": True, "clip_timestamps": [0.0, 3.0, 3.5, 7.0]}
    mine = transcribe(model, str(sample), padding="virtual", **choices)
    full = transcribe(model, str(sample), **choices)
    assert mine.padding.windows == 2
    assert mine.padding.padding_avoided_s == pytest.approx((1500 - 192 + 1500 - 224) / 50)
    assert mine.text == full.text
    words = [[word for s in r.segments for word in s.words] for r in (mine, full)]
    for a, b in zip(*words, strict=True):
        assert a.word == b.word
        assert a.start == pytest.approx(b.start, abs=0.25)
        assert a.end == pytest.approx(b.end, abs=0.25)


def test_only_the_last_window_of_a_long_recording_is_short(model, samples):
    joined = np.concatenate([load_audio(path) for path in samples] * 2)  # 49 s
    choices = {"policy_fallback": False, "temperature": 0.0}  # nothing is drawn
    mine, full = (transcribe(model, joined, padding=p, **choices) for p in ("virtual", None))
    first = [[s.text for s in r.segments if s.seek == 0] for r in (mine, full)]
    assert first[0] == first[1]
    seeks = {segment.seek for segment in mine.segments}
    sizes = [min(3000, len(joined) // 160 - seek) for seek in seeks]
    avoided = sum(Policy("virtual").padding_s(-(-size // 2))[1] for size in sizes)
    assert mine.padding.padding_avoided_s == pytest.approx(avoided)
    assert mine.text.endswith("made amiable himself.")


def test_bad_policies_are_found_before_any_work():
    with pytest.raises(OptionError, match="margin must be"):
        Settings(padding="trim,margin=40").check()


@pytest.mark.parametrize("text", ["nothing", "trim,margin=-1", "trim,margin=31", "virtual,fill=x"])
def test_a_bad_policy_is_one_line_on_the_command_line(sample, tmp_path, capsys, text):
    for command in ("transcribe", "masks"):
        assert main([command, str(sample), "--padding", text]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert err.startswith(f"asrmask {command}: error: ")


def test_transcribe_writes_the_policy_into_json(sample, tmp_path, capsys):
    arguments = ["transcribe", str(sample), "-o", str(tmp_path), "-f", "json"]
    assert main([*arguments, "--padding", "virtual", "--beam_size", "None"]) == 0
    out = capsys.readouterr()
    assert "asrmask: padding virtual: 1.2 s of padding computed, 21.7 s avoided; 0 of 1" in out.err
    written = json.loads((tmp_path / f"{sample.stem}.json").read_text())
    assert written["padding"] == {
        "policy": "virtual",
        "windows": 1,
        "fallbacks": {},
        "padding_computed_s": 1.22,
        "padding_avoided_s": 21.68,
    }
    assert written["segments"][0]["policy"] == "virtual"


def test_masks_are_shown_and_drawn(sample, tmp_path, capsys):
    png = tmp_path / "masks.png"
    assert main(["masks", str(sample), "--padding", "virtual", "--png", str(png)]) == 0
    out = capsys.readouterr().out
    assert "audio     355 of 1500 positions" in out
    assert "padding   1.22 s computed, 21.68 s avoided" in out
    assert "encoder: audio attends to audio, 1500 queries × 1500 keys" in out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_masks_tell_of_a_sink(sample, tmp_path, capsys):
    arguments = ["masks", str(sample), "--png", str(tmp_path / "masks.png")]
    assert main([*arguments, "--padding", "trim,margin=1.28,sink=0.5"]) == 0
    out = capsys.readouterr().out
    assert "visible   419 with the margin of 1.28 s, and the last 0.5 s of the window" in out
    assert "padding   1.78 s computed, 21.12 s avoided" in out


def test_masks_need_a_folder_for_the_picture(sample, tmp_path, capsys):
    assert main(["masks", str(sample), "--png", str(tmp_path / "no" / "such.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_four_tokens_print_as_the_textbook_matrix():
    from asrmask.inspection.mask_pictures import pictures, text
    from asrmask.model.encoding import plan

    encoder, decoder, cross = pictures(plan(Policy("mask:both"), [300]), list("abcd"))
    assert text(decoder).split("\n") == [
        "  a  1 0 0 0",
        "  b  1 1 0 0",
        "  c  1 1 1 0",
        "  d  1 1 1 1",
    ]
    assert text(cross).split("\n") == ["  │" + "█" * 12 + "·" * 48 + "│"] * 4
    assert encoder.cells[:, :300].all()
    assert not encoder.cells[:, 300:].any()


def test_a_sink_is_drawn_at_the_windows_end():
    from asrmask.inspection.mask_pictures import ABSENT, HIDDEN, VISIBLE, pictures
    from asrmask.model.encoding import plan

    for kind, between in (("trim", ABSENT), ("mask:both", HIDDEN)):
        encoder, _, cross = pictures(plan(Policy(kind, sink=0.5), [300]), ["a"])
        for row in (encoder.cells[0], encoder.cells[-1], cross.cells[0]):
            assert (row[:300] == VISIBLE).all()
            assert (row[300:1475] == between).all()
            assert (row[1475:] == VISIBLE).all()
        assert (encoder.cells[300:1475, :300] == (ABSENT if kind == "trim" else VISIBLE)).all()


def test_operations_of_full_are_those_of_the_shapes(model):
    from asrmask.model.cost import encoder_operations, token_operations
    from asrmask.model.encoding import plan

    full = plan(Policy(), [300])
    # FACTS: a full pass of tiny.en is about 37 GFLOP, without the decoder's keys and values
    cross = 4 * 1500 * 384**2 * 4
    assert encoder_operations(model.dims, full) - cross == pytest.approx(37e9, rel=0.01)
    trim = plan(Policy("trim"), [300])
    assert encoder_operations(model.dims, trim) < encoder_operations(model.dims, full) / 5
    assert token_operations(model.dims, full) == 5 * token_operations(model.dims, trim)
    sink = plan(Policy("trim", sink=0.5), [275])
    assert encoder_operations(model.dims, sink) == encoder_operations(model.dims, trim)
    assert token_operations(model.dims, sink) == token_operations(model.dims, trim)
    virtual = plan(Policy("virtual"), [300])
    assert encoder_operations(model.dims, trim) < encoder_operations(model.dims, virtual)
