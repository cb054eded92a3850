"""The flags of openai-whisper's command are ours too: names, short forms, types and defaults."""

import argparse
import sys

import pytest
import torch

from asrmask import cli
from asrmask.cli import transcribe as command
from asrmask.errors import OptionError
from asrmask.systems import upstream
from asrmask.tokenizer.languages import LANGUAGES, language_code
from asrmask.transcription.presets import FAST
from asrmask.transcription.settings import ALIASES
from asrmask.transcription.writers import WRITERS

# where ours differs on purpose: flag → (theirs, ours)
DEFAULTS = {
    "model": ("turbo", "tiny.en"),  # a download of 75 MB, not 1.6 GB
    "verbose": (True, None),  # text alone: the times are in the files
    # chosen when the model is loaded
    "device": ("cuda" if torch.cuda.is_available() else "cpu", None),
}
# any text is taken, and checked later: languages in any case, models on loading, lists of formats
FREE = {"language", "model", "output_format"}
SAMPLES = ["0", "1", "-1", "5", "0.5", "-0.5", "1e-3", "None", "True", "False", "text", "srt"]


class Parsed(Exception):
    """Carries the parser out of the command that made it."""


@pytest.fixture(scope="module")
def theirs():
    """openai-whisper's parser: destination → action."""

    def stop(parser, *rest):
        raise Parsed(parser)

    upstream.whisper()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            sys.modules["whisper.transcribe"].cli()
    (parser,) = caught.value.args
    return actions(parser)


@pytest.fixture(scope="module")
def parser():
    made = cli.Parser(prog="asrmask transcribe", allow_abbrev=False)
    command.add_arguments(made)
    return made


def actions(parser):
    return {action.dest: action for action in parser._actions if action.dest != "help"}


@pytest.fixture(scope="module")
def ours(parser):
    return actions(parser)


def test_every_flag_of_theirs_is_ours_with_its_short_form(theirs, ours):
    assert len(theirs) > 30
    for name, action in theirs.items():
        spelled = [flag for flag in ours[name].option_strings if flag[2:] not in ALIASES]
        assert spelled == action.option_strings
        assert ours[name].nargs == action.nargs


def test_defaults_are_theirs_but_for_those_listed(theirs, ours):
    differing = {
        name: (action.default, ours[name].default)
        for name, action in theirs.items()
        if action.default != ours[name].default
    }
    assert differing == DEFAULTS


def test_choices_are_theirs(theirs, ours):
    for name, action in theirs.items():
        if name not in FREE:
            assert set(ours[name].choices or ()) == set(action.choices or ())


def test_formats_are_theirs_and_may_be_several_or_none(theirs, parser):
    def formats(text):
        return parser.parse_args(["a.wav", "-f", text]).output_format

    every = set(theirs["output_format"].choices) - {"all"}
    assert all(formats(name) == [name] for name in every)
    assert set(formats("all")) == every
    assert formats("none") == []
    assert formats("srt,vtt,srt") == formats("srt, vtt") == ["srt", "vtt"]


@pytest.mark.parametrize(
    ("text", "wrong"), [("doc", "doc"), ("srt,all", "all"), ("none,srt", "none"), ("srt,", "")]
)
def test_formats_that_cannot_be_say_what_is_allowed(parser, capsys, text, wrong):
    with pytest.raises(SystemExit):
        parser.parse_args(["a.wav", "-f", text])
    told = f"expected all, none, or some of {', '.join(WRITERS)} with commas between, got {wrong!r}"
    assert told in capsys.readouterr().err


def booleans(actions):
    return {name for name, action in actions.items() if action.type is cli.boolean}


def test_flags_that_are_yes_or_no_may_stand_alone_and_never_take_a_file(ours, parser):
    assert {"vad_filter", "fp16", "word_timestamps", "fast", "verbose"} <= booleans(ours)
    for name in booleans(ours):
        dashed = name.replace("_", "-")
        for given in ([f"--{name}"], [f"--{dashed}"], [f"--{name}", "true"], [f"--{dashed}=True"]):
            args = parser.parse_args([*given, "a.wav"])
            assert (getattr(args, name), args.audio) == (True, ["a.wav"])
            assert getattr(parser.parse_args(["a.wav", *given]), name) is True
        args = parser.parse_args([f"--{name}", "False", "a.wav"])
        assert (getattr(args, name), args.audio) == (False, ["a.wav"])


@pytest.mark.parametrize("given", [["--fp16=maybe"], ["--fp16", "no"], ["--fp16", "0"]])
def test_flags_that_are_yes_or_no_take_true_and_false_only(parser, capsys, given):
    with pytest.raises(SystemExit):
        parser.parse_args(["a.wav", *given])
    assert "argument --fp16: expected True or False, got " in capsys.readouterr().err


def test_files_may_be_between_flags(parser):
    args = parser.parse_args(["a.wav", "--vad_filter", "b.wav", "-f", "srt", "-", "--", "--c.wav"])
    assert args.audio == ["a.wav", "b.wav", "-", "--c.wav"]
    with pytest.raises(SystemExit):
        parser.parse_args(["a.wav", "-f", "srt", "b.wav", "-x"])


def test_a_preset_is_set_unless_it_is_false():
    fresh = cli.Parser(prog="asrmask transcribe", allow_abbrev=False)
    command.add_arguments(fresh)
    assert fresh.parse_args(["a.wav", "--fast", "False"]).batch_size == 1
    args = fresh.parse_args(["--fast", "a.wav", "--beam_size", "2"])
    assert (args.batch_size, args.beam_size, args.audio) == (FAST.batch_size, 2, ["a.wav"])


def test_every_language_of_theirs_is_known(theirs):
    for name in theirs["language"].choices:
        assert language_code(name) in LANGUAGES
    with pytest.raises(OptionError):
        language_code("klingon")


def value(action, text):
    """What a flag makes of a text; None if it refuses it."""
    try:
        read = (action.type or str)(text)
    except (ValueError, argparse.ArgumentTypeError):
        return None
    return (read,) if action.choices is None or read in action.choices else None


def test_values_mean_what_they_mean_there(theirs, ours):
    for name, action in theirs.items():
        if name in FREE:
            continue
        for text in SAMPLES:
            assert value(ours[name], text) == value(action, text), (name, text)


def test_every_flag_may_be_spelled_with_dashes(ours, parser):
    for name, action in ours.items():
        for flag in [f for f in action.option_strings if f.startswith("--")]:
            assert flag in {f"--{name}", f"--no_{name}"} or ALIASES[flag[2:]] == name
            given = [] if action.nargs == 0 else [next(t for t in samples(action))]
            dashed = flag[:2] + flag[2:].replace("_", "-")
            expected = parser.parse_args(["a.wav", flag, *given])
            assert parser.parse_args(["a.wav", dashed, *given]) == expected
            if given:
                assert parser.parse_args(["a.wav", f"{dashed}={given[0]}"]) == expected


def samples(action):
    """Texts that a flag takes, other than what gives its default."""
    texts = action.choices or SAMPLES
    return (text for text in texts if value(action, text) not in [None, (action.default,)])


def test_flags_of_faster_whisper_s_options(parser):
    given = "--multilingual --repetition_penalty 1.2 --no_repeat_ngram_size 3 --max_new_tokens 9"
    args = parser.parse_args(["a.wav", *given.split(), "--chunk_length", "15"])
    settings, options = command.options_from_args(args)
    assert (settings.multilingual, settings.chunk_length) == (True, 15)
    assert (options.repetition_penalty, options.no_repeat_ngram_size) == (1.2, 3)
    assert options.sample_len == 9
    for name in ("log_prob_threshold", "logprob_threshold"):
        settings, _ = command.options_from_args(parser.parse_args(["a.wav", f"--{name}", "-0.5"]))
        assert settings.logprob_threshold == -0.5


def test_a_value_keeps_its_dashes(parser):
    args = parser.parse_args(["a-b.wav", "--initial-prompt=well-known --beam-size", "-o", "x-y"])
    assert args.initial_prompt == "well-known --beam-size"
    assert (args.audio, args.output_dir) == (["a-b.wav"], "x-y")
