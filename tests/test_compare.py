"""asrmask compare: it names what differs, and its exit code can be relied on."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from asrmask import DecodingOptions, Policy, Settings, Spectrogram, cli
from asrmask.audio.recording import Recording, load_audio
from asrmask.checkpoints import load_model
from asrmask.comparison import sampling, stages
from asrmask.comparison.divergence import DecodingAttempt, Divergence, first_divergence
from asrmask.comparison.run import Comparison, TextPeer, UpstreamPeer, find_clips
from asrmask.comparison.sampling import Draw
from asrmask.comparison.transcripts import compare_times
from asrmask.decoding.options import DecodingResult
from asrmask.errors import OptionError
from asrmask.evaluation.corpus import Clip
from asrmask.systems import DecodingSettings, System, SystemTranscript, TimedText, upstream

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["--beam_size", "None", "--temperature_increment_on_fallback", "None"]


@pytest.fixture(scope="module")
def speech(samples):
    """A clip of three seconds."""
    return list(samples)[1]


@pytest.fixture(scope="module")
def other():
    """openai-whisper's model with weights of its own, to be changed."""
    made = upstream.twin(load_model("tiny.en"))
    weights = {name: weight.clone() for name, weight in made.state_dict().items()}
    made.load_state_dict(weights, assign=True)
    return made


@pytest.fixture
def run(capsys):
    """Runs the command in this process: exit code, standard output, standard error."""

    def call(*arguments):
        capsys.readouterr()
        try:
            code = cli.main(["compare", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def changed(other, monkeypatch):
    """Makes one weight of openai-whisper's model differ, for a while."""
    monkeypatch.setattr(upstream, "twin", lambda model: other)
    before = {}

    def change(name, by=1e-2):
        weight = other.get_parameter(name)
        before[name] = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[0] += by

    yield change
    with torch.no_grad():
        for name, weight in before.items():
            other.get_parameter(name).copy_(weight)


# --- stages


@pytest.mark.parametrize(
    "name",
    [
        "encoder.conv1.weight",
        "encoder.blocks.2.mlp.0.weight",
        "encoder.blocks.1.attn.query.weight",
        "encoder.ln_post.bias",
        "decoder.blocks.1.cross_attn.key.weight",
        "decoder.blocks.2.cross_attn.value.bias",
        "decoder.blocks.3.mlp.2.bias",
        "decoder.positional_embedding",
    ],
)
def test_a_changed_weight_is_named(changed, model, other, speech, name):
    changed(name)
    found = stages_of(model, other, speech, Policy())
    module = name if name.endswith("embedding") else name.rpartition(".")[0]
    assert next(stage for stage in found if not stage.is_equal).name == module


def test_the_command_says_which_layer_differs_where_and_by_how_much(changed, run, speech):
    changed("encoder.blocks.2.mlp.0.weight")
    code, out, _ = run(speech, *QUICK, "--word_timestamps", "False")
    assert code == 1
    (first,) = re.findall(r"first difference: (.*)", out)
    told = r"window at 0.00 s: encoder.blocks.2.mlp.0, position \d+ \(\d\.\d\d s\): \d\.\de-\d\d"
    assert re.match(told, first)
    assert re.search(r"^encoder.blocks.2 .*! encoder.blocks.2.mlp.0, position", out, re.MULTILINE)
    assert "not equal: 1 of 1 files differ" in out


def test_what_is_no_number_is_a_difference(changed, model, other, speech):
    changed("encoder.blocks.0.mlp_ln.bias", by=float("nan"))
    found = stages_of(model, other, speech, Policy())
    first = next(stage for stage in found if not stage.is_equal)
    assert first.name == "encoder.blocks.0.mlp_ln"
    assert json.loads(json.dumps(first.difference, allow_nan=False)) > 1e30


def test_no_stage_differs_with_the_same_weights_and_each_is_there(model, upstream_model, speech):
    found = stages_of(model, upstream_model, speech, Policy())
    assert all(stage.is_equal for stage in found)
    worst = stages.worst_by_group(stage.as_dict() for stage in found)
    groups = [stage["group"] for stage in worst]
    blocks = [f"encoder.blocks.{i}" for i in range(4)]
    memory = [f"decoder.blocks.{i} cross {what}" for i in range(4) for what in ("keys", "values")]
    assert groups == [
        *("log-Mel", "encoder.conv1", "encoder.conv2", "encoder.positional_embedding"),
        *blocks,
        "encoder.ln_post",
        *memory,
        *("decoder.token_embedding", "decoder.positional_embedding"),
        *[f"decoder.blocks.{i}" for i in range(4)],
        *("decoder.ln", "logits"),
    ]


FIRST = {
    "full,fill=silence": "log-Mel",
    "full,positions=last": "encoder.conv2",  # its padding is not at the window's edge
    "mask:encoder": "encoder.blocks.0.attn.out",
    "mask:cross": "decoder.blocks.0.cross_attn.out",
    "mask:both": "encoder.blocks.0.attn.out",
    "trim": "encoder.blocks.0.attn.out",
    "trim,positions=last": "encoder.conv2",
    "trim,margin=1.28,sink=0.5": "encoder.blocks.0.attn.out",
    "virtual": "encoder.blocks.0.attn.out",
}


@pytest.mark.parametrize("policy", FIRST)
def test_a_policy_differs_from_the_stage_at_which_it_takes_effect(
    model, upstream_model, speech, policy
):
    found = stages_of(model, upstream_model, speech, Policy.parse(policy))
    assert next(stage for stage in found if not stage.is_equal).name == FIRST[policy]


def stages_of(model, other, path, policy):
    spectrogram = Spectrogram(Recording.open(path), model.dims.n_mels)
    n_frames = spectrogram.n_frames
    whole = upstream.whisper().log_mel_spectrogram(load_audio(path), padding=480_000)
    their_mel = upstream.whisper().pad_or_trim(whole[:, :n_frames], 3000)
    window = spectrogram.window(0, n_frames, fill=policy.fill)
    tokens = [50257, 50362, 1770, 13, 6026, 49365, 318]
    return stages.compare(model, other, window, their_mel, tokens, policy=policy)


# --- tokens


def attempts(mel, ours, theirs, **choices):
    """One window that both have decoded, to these tokens."""
    options = DecodingOptions(language="en", without_timestamps=True, **choices)
    result = DecodingResult(torch.empty(0), "en", tokens=ours, avg_logprob=-0.5, no_speech_prob=0.1)
    asked = upstream.whisper().DecodingOptions(
        language="en", without_timestamps=True, fp16=False, **choices
    )
    other = replace(result, tokens=theirs)
    return [DecodingAttempt(0, 300, options, result)], [upstream.Attempt(mel, asked, other)]


@pytest.fixture(scope="module")
def window(speech):
    spectrogram = Spectrogram(Recording.open(speech), 80)
    return spectrogram.window(0, spectrogram.n_frames, fill="zero").mel


def test_tokens_part_where_the_gap_between_the_logits_is_measured(model, upstream_model, window):
    tokens = torch.tensor([[50257, 50362, 1770]])
    with torch.inference_mode():
        logits = upstream_model(window[None], tokens)[0, -1]
    a, b = logits.topk(2).indices.tolist()
    mine, others = attempts(window, [1770, b, 13], [1770, a, 13])
    found = first_divergence(model, upstream_model, mine, others, Settings())
    assert (found.start, found.step, found.is_near) == (0, 1, False)
    assert found.gap == pytest.approx(float(logits[a] - logits[b]), abs=1e-5)
    assert f"({a})" in found.theirs
    assert f"({b})" in found.ours
    assert "step 1" in str(found)
    mine, others = attempts(window, [1770, b], [1770, b])
    assert first_divergence(model, upstream_model, mine, others, Settings()) is None
    mine, others = attempts(window, [1770], [1770, a], beam_size=5)
    assert "mean log-prob" in str(first_divergence(model, upstream_model, mine, others, Settings()))


def test_a_near_tie_is_told_and_counts_as_equal(run, speech, monkeypatch):
    tie = Divergence(0, 3, "' the' (262)", "' a' (257)", 4e-4, "gap between the logits")
    assert tie.is_near
    assert not replace(tie, gap=2e-3).is_near
    assert not replace(tie, gap=None).is_near
    monkeypatch.setattr("asrmask.comparison.run.first_divergence", lambda *_: tie)
    code, out, _ = run(speech, *QUICK, "--word_timestamps", "False")
    assert code == 0
    assert "step 3: asrmask ' the' (262), openai-whisper ' a' (257), gap between" in out
    assert "4.0e-04 (a near tie)" in out
    assert "1 of 1 files equal (1 of them by a near tie)" in out


def test_a_threshold_between_two_equal_texts_is_a_near_tie_too(model, upstream_model, window):
    mine, others = attempts(window, [1770], [1770])
    below = replace(mine[0].result, avg_logprob=-1.00001)
    above = replace(mine[0].result, avg_logprob=-0.99999)
    again = replace(mine[0].options, temperature=0.2)
    ours = [replace(mine[0], result=below), replace(mine[0], options=again)]
    theirs = [replace(others[0], result=above)]
    found = first_divergence(model, upstream_model, ours, theirs, Settings())
    assert found.is_near
    assert found.step is None
    assert "temperatures 0, 0.2, openai-whisper temperatures 0, avg_logprob" in str(found)
    ours[0] = replace(ours[0], result=replace(below, avg_logprob=-1.1))
    assert not first_divergence(model, upstream_model, ours, theirs, Settings()).is_near


@pytest.fixture(scope="module")
def drawn(upstream_model, speech):
    """An attempt of openai-whisper's at temperature 1, and its draws."""
    samples = load_audio(speech)
    torch.manual_seed(0)
    _, (attempt,) = upstream.transcribe(upstream_model, samples, temperature=1.0, best_of=3)
    return attempt, sampling.replay(upstream_model, attempt)


def test_draws_can_be_run_again_and_say_how_near_they_were(drawn):
    attempt, found = drawn
    assert all(len(draw.tokens) == 3 for draw in found)
    margins = [margin for draw in found for margin in draw.margins]
    assert all(0 <= margin < torch.inf for margin in margins)  # each is the race that was run
    texts = [[draw.tokens[i] for draw in found] for i in range(3)]
    texts = [text[: text.index(50256)] for text in texts]
    assert attempt.result.tokens in texts


def test_drawn_texts_part_by_the_margin_of_the_draw(model, upstream_model, drawn):
    attempt, found = drawn
    row = next(
        i for i in range(3) if attempt.result.tokens[1] == found[1].tokens[i] != found[0].tokens[i]
    )
    options = DecodingOptions(language="en", temperature=1.0, best_of=3)
    tokens = list(attempt.result.tokens)
    tokens[1] += 1
    ours = [list(draw.tokens) for draw in found]
    ours[1][row] += 1
    result = DecodingResult(torch.empty(0), "en", tokens=tokens)

    def parting(draws):
        mine = DecodingAttempt(0, 300, options, result, draws)
        return first_divergence(model, upstream_model, [mine], [attempt], Settings())

    assert parting(ours).gap == pytest.approx(found[1].margins[row])
    assert "drawn at temperature 1, gap in the draw" in str(parting(ours))
    # what is drawn behind the end of a text is of no account; nothing that differs: no gap
    same = [list(draw.tokens) for draw in found]
    assert parting(same).gap is None
    assert sampling.largest_margin([[7], [8]], [Draw([7], [0.1]), Draw([9], [0.2])], eot=7) is None
    assert sampling.largest_margin([[1, 2]], [Draw([3, 4], [0.1, 0.2])], eot=7) == 0.2


# --- other systems


def test_times_are_compared_where_both_have_the_same_words():
    ours = SystemTranscript(
        "a b c",
        [TimedText(0, 3, " a b c")],
        [TimedText(0, 1, "a"), TimedText(1, 2, "b"), TimedText(2, 3, "c")],
    )
    words = [TimedText(0, 1, "a"), TimedText(1.5, 2, "x"), TimedText(2.3, 3, "c")]
    found = compare_times(ours, SystemTranscript("a x c", [], words), str.strip)
    assert (found.unit, found.n, found.is_equal) == ("words", 4, True)
    assert found.largest_s == pytest.approx(0.3)
    # without word times: where segments begin and end with the same word
    parted = SystemTranscript("a b c", [TimedText(0.2, 1, " a"), TimedText(1, 3.6, " b c")])
    found = compare_times(ours, parted, str.strip)
    assert (found.unit, found.n, found.is_equal) == ("segments", 2, False)
    assert found.largest_s == pytest.approx(0.6)
    assert compare_times(ours, SystemTranscript("z", [TimedText(0, 1, "z")]), str.strip) is None


@pytest.mark.parametrize(
    ("system", "package"),
    [("faster-whisper", "faster_whisper"), ("whisper.cpp", "pywhispercpp")],
)
def test_others_hear_the_same_in_a_clear_recording(run, shared, tmp_path, system, package):
    if find_spec(package) is None:
        pytest.skip(f"{system} is not installed: pip install asrmask[systems]")
    said = tmp_path / "said.txt"
    said.write_text(
        "And so, my fellow Americans, ask not what your country can do for you; ask what you can "
        "do for your country."
    )
    file = tmp_path / "found.json"
    jfk = shared / "jfk.flac"
    code, out, _ = run(jfk, "--against", system, "--reference", said, "--json", file, *QUICK)
    assert code == 0
    assert f"{system}: 1 of 1 files equal, 0 words differ; WER asrmask 0.00 %" in out
    (found,) = json.loads(file.read_text())["files"]
    theirs = found["against"][system]
    assert theirs["wer"] == found["asrmask"]["wer"] == 0
    assert "ask not what your country can do for you" in theirs["text"]
    assert theirs["times"]["n"] >= 2
    assert theirs["times"]["largest_s"] <= 0.5
    assert 9 < theirs["segments"][-1]["end"] <= 11.5
    assert theirs["took_s"] > 0


def test_systems_that_are_unknown_or_not_installed_get_one_line(run, speech, monkeypatch):
    code, out, err = run(speech, "--against", "nobody")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "nobody" in err
    monkeypatch.setattr("asrmask.extras.find_spec", lambda name: None)
    code, out, err = run(speech, "--against", "transformers")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install" in err


class Echo(System):
    """A system that hears what it is told to, and keeps what it was given."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def transcribe(self, path, decoding):
        self.samples, self.decoding = self.load_audio(path), decoding
        return SystemTranscript(self.text, [TimedText(0, 3, self.text)])


def test_others_are_given_the_same_samples_and_are_asked_alike(model, speech):
    system = Echo("nothing of that kind")
    settings, options = Settings(word_timestamps=True), DecodingOptions(beam_size=2, language="en")
    comparison = Comparison(model, [TextPeer("echo", system)], settings, options)
    found = comparison.compare(Clip(speech, "nothing of that sort"))["against"]["echo"]
    assert (system.samples == load_audio(speech)).all()
    assert system.decoding == DecodingSettings(2, "en", "transcribe", True)
    assert not found["equal"]
    assert found["wer"] == 0.25


@pytest.mark.parametrize("why", [ImportError("no libgomp"), RuntimeError("bad\nweights")])
def test_a_system_that_does_not_load_gets_one_line(run, speech, monkeypatch, why):
    monkeypatch.setattr("asrmask.extras.find_spec", lambda name: True)
    monkeypatch.setattr("asrmask.systems.prepare", lambda *_: "weights")

    def load(*_, **__):
        raise why

    monkeypatch.setattr("asrmask.systems.load", load)
    code, out, err = run(speech, "--against", "whisper.cpp")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"whisper.cpp failed: {type(why).__name__}" in err


# --- the command


def test_an_error_of_the_program_is_not_taken_for_a_difference(run, speech, monkeypatch):
    monkeypatch.setattr(Comparison, "compare", lambda *_: 1 // 0)
    code, _, err = run(speech)
    assert code == 2
    assert err.rstrip().endswith("ZeroDivisionError: integer division or modulo by zero")


def check_equal(report, paths):
    """Everything that is reported of these files is the same for both systems."""
    assert [file["name"] for file in report["files"]] == [path.name for path in paths]
    for file in report["files"]:
        theirs = file["against"]["openai-whisper"]
        assert theirs["text"] == file["asrmask"]["text"]
        assert theirs["segments"] == file["asrmask"]["segments"]
        assert theirs["words"] == file["asrmask"]["words"] != []


def test_sample_speech_is_equal_in_table_json_and_page(run, samples, tmp_path, monkeypatch):
    """On three of the five clips; two other tests compare the other two."""
    monkeypatch.setattr(Comparison, "_warm_up", lambda *_: None)  # only for the timing
    paths = [path for i, path in enumerate(samples) if i not in (2, 3)]
    rows = "".join(f"{path}\t{samples[path]}\n" for path in paths)
    manifest = tmp_path / "manifest.tsv"
    manifest.write_text("path\ttext\n" + rows)
    json_file = tmp_path / "new" / "found.json"
    code, out, _ = run(manifest, *QUICK, "--json", json_file, "--out", tmp_path / "page")
    assert code == 0, out
    assert out.splitlines()[-1] == "equal within tolerance"
    assert "3 of 3 files equal, 0 words differ; WER asrmask" in out
    found = json.loads(json_file.read_text())
    assert found["equal"]
    assert found["exit_code"] == 0
    assert found["threads"] == torch.get_num_threads() == 1  # numba would set all cores
    check_equal(found, paths)
    for file in found["files"]:
        assert file["against"]["openai-whisper"]["wer"] == file["asrmask"]["wer"] < 0.5
    page = (tmp_path / "page" / "compare.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert not re.search("https?:|src=|<script|<link|url\\(", page)
    assert all(path.name in page for path in paths)
    assert "encoder.blocks.3" in page
    assert not list(tmp_path.rglob(".asrmask-*"))


def test_a_policy_is_not_equal_and_what_differs_is_marked(run, speech, tmp_path):
    policy = ["--padding", "trim", "--no_policy_fallback", "--word_timestamps", "False"]
    code, out, err = run(speech, *QUICK, *policy, "--json", "-", "--out", tmp_path)
    assert code == 1
    (found,) = json.loads(out)["files"]  # standard output is JSON alone: the table is beside it
    theirs = found["against"]["openai-whisper"]
    assert "encoder.blocks.0.attn.out" in theirs["first_difference"]
    assert theirs["words_different"] > 0
    assert re.search(r"openai-whisper → asrmask: .*\[\+ ", err)
    page = (tmp_path / "compare.html").read_text()
    assert "<ins>" in page
    assert "first difference: window at 0.00 s: encoder.blocks.0.attn.out" in page
    assert "openai-whisper → asrmask" in page


def test_a_bad_file_fails_alone(run, samples, tmp_path):
    speech = list(samples)[2]
    bad = tmp_path / "bad.wav"
    bad.write_text("no audio")
    missing = tmp_path / "missing.wav"
    code, out, err = run(bad, missing, speech, *QUICK, "--out", tmp_path, "--json", tmp_path / "j")
    assert code == 2
    assert [line.startswith("asrmask: error: ") for line in err.splitlines()].count(True) == 2
    assert "1 of 1 files equal" in out
    assert out.splitlines()[-1] == "equal within tolerance; failed: 2"
    found = json.loads((tmp_path / "j").read_text())
    check_equal(found, [speech])
    assert set(found["failed"]) == {str(bad), str(missing)}
    assert not found["equal"]
    assert "missing.wav" in (tmp_path / "compare.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--padding", "none"], "padding must be one of"),
        (["--model", "/no/such/model.pt"], "/no/such/model.pt"),
        (["--reference", "/no/such.txt"], "--reference must be a text file"),
        (["--beam_size", "0"], "beam_size must be 1 or more"),
        (["--out", "/proc/no"], "/proc/no: No such file or directory, expected a file or folder"),
        (["--json", "/tmp"], "expected a file to write"),
        (["--against", "asrmask"], "must name another system"),
        (["--threads", "-1"], "--threads must be 0 or more"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_before_the_work(run, speech, arguments, told):
    code, out, err = run(speech, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_clips_are_files_folders_and_data_sets(samples, tmp_path):
    folder = next(iter(samples)).parent
    assert [clip.text for clip in find_clips([str(folder)])] == list(samples.values())
    assert [clip.path for clip in find_clips([str(folder / "manifest.tsv")])] == list(samples)
    for name in ("a.wav", "b.mp3", "c.txt"):
        (tmp_path / name).touch()
    found = find_clips([str(tmp_path), "none.wav"])
    assert [clip.path.name for clip in found] == ["a.wav", "b.mp3", "none.wav"]
    assert find_clips(["a.wav"], "said") == [Clip(Path("a.wav"), "said")]
    with pytest.raises(OptionError, match="--reference is for one file, got 2"):
        find_clips(["a.wav", "b.wav"], "said")


def test_drawn_texts_are_the_same_too(model, upstream_model, samples):
    """Temperatures above 0 draw the same random numbers in both."""
    comparison = Comparison(
        model,
        [UpstreamPeer(upstream_model)],
        Settings(temperature=(0.8,)),
        DecodingOptions(best_of=2),
    )
    found = comparison.compare(Clip(list(samples)[3]))["against"]["openai-whisper"]
    assert found["first_difference"] is None
    assert SystemTranscript.of({"text": "", "segments": [], "language": "en"}).words is None
