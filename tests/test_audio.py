"""Any file to 16 kHz mono like FFmpeg, log-Mel like openai-whisper, and one way to pad."""

import gc
import os
import subprocess
import sys
import threading
import wave

import fuzzing_audio
import librosa
import numpy as np
import pytest
import torch
import whisper
from hypothesis import given, settings
from hypothesis import strategies as st
from media import at_rate, encode, read_flac, reference, truncated, unreadable, wav
from scipy import signal

from asrmask import audio
from asrmask.audio import media
from asrmask.audio.recording import Recording, load_audio
from asrmask.audio.spectrogram import Features, Spectrogram, log_mel_spectrogram, white_noise
from asrmask.audio.torchaudio_import import import_torchaudio
from asrmask.errors import AudioError, AudioWarning, MissingPackageError, OptionError


@pytest.fixture(scope="module")
def clips(samples):
    """Each sample as stored: int16."""
    return [read_flac(path) for path in samples]


@pytest.fixture(scope="module")
def clip(clips):
    return clips[1]


@pytest.fixture(scope="module")
def long(clips):
    """95.4 s of speech that gets louder, and ends between two frames."""
    tiled = np.resize(np.concatenate(clips), 95 * 16_000 + 6_543) / np.float32(32768)
    return tiled * np.linspace(0.2, 1.0, len(tiled), dtype=np.float32)


def steps(floats):
    """Samples as 16-bit integers; they are whole numbers."""
    scaled = floats * np.float32(32768)
    assert floats.dtype == np.float32
    assert (scaled == scaled.round()).all()
    return scaled.astype(np.int32)


def likeness(a, b, *, max_lag=0):
    """How alike two signals are, 1.0 at best, over what both have; the first may come later."""
    if max_lag:
        n = min(len(a) - max_lag, len(b))
        products = signal.correlate(a[: n + max_lag], b[:n], mode="valid", method="fft")
        a = a[np.argmax(products) :]
    n = min(len(a), len(b))
    return np.corrcoef(a[:n], b[:n])[0, 1]


# --- files to samples


@pytest.mark.parametrize(
    ("name", "codec", "more"),
    [
        ("a.wav", "pcm_s16le", {}),
        ("a.wav", "pcm_s32le", {"form": "s32"}),
        ("a.wav", "pcm_f32le", {"form": "flt"}),
        ("a.wav", "pcm_s16le", {"channels": 2}),
        ("a.flac", "flac", {}),
        ("a.flac", "flac", {"channels": 2}),
        ("a.mka", "flac", {}),
        ("a.aiff", "pcm_s16be", {}),
        ("a.mov", "pcm_s16le", {"video": True}),
    ],
)
def test_samples_that_need_no_resampling_stay_the_same(tmp_path, clip, name, codec, more):
    path = encode(tmp_path / name, clip, codec, **more)
    assert np.array_equal(steps(load_audio(path)), clip)


def test_the_samples_of_the_repository_are_read_as_stored(samples, clips):
    for path, clip in zip(samples, clips, strict=True):
        assert np.array_equal(steps(load_audio(str(path))), clip)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_wav_of_any_rate_is_resampled_as_ffmpeg_does(tmp_path, clip, rate, channels):
    for codec, form in {"pcm_s16le": "s16", "pcm_s32le": "s32", "pcm_f32le": "flt"}.items():
        quiet = at_rate(clip, rate) // channels
        path = encode(
            tmp_path / f"{form}.wav", quiet, codec, rate=rate, channels=channels, form=form
        )
        got = load_audio(path)
        assert np.abs(steps(got) - reference(path)).max() <= 4
        assert len(got) == pytest.approx(len(clip), abs=2)
        again = librosa.resample(quiet.astype(np.float32), orig_sr=rate, target_sr=16_000)
        assert likeness(got, again) > 0.99


@pytest.mark.parametrize(
    ("name", "codec", "rate", "more"),
    [
        ("a.mp3", "libmp3lame", 44_100, {"channels": 2}),
        ("a.mp3", "libmp3lame", 16_000, {}),
        ("a.m4a", "aac", 44_100, {"channels": 2}),
        ("a.m4a", "aac", 16_000, {}),
        ("a.aac", "aac", 22_050, {}),
        ("a.ogg", "libopus", 48_000, {}),
        ("a.webm", "libopus", 48_000, {"channels": 2}),
        ("a.mp4", "aac", 48_000, {"channels": 2, "video": True}),
        ("a.mkv", "libopus", 48_000, {"channels": 6, "video": True}),
        ("a.flac", "flac", 48_000, {"channels": 6}),
    ],
)
def test_compressed_audio_and_video_are_read(tmp_path, clip, name, codec, rate, more):
    path = encode(tmp_path / name, at_rate(clip, rate) // 3, codec, rate=rate, **more)
    got = load_audio(path)
    assert np.abs(steps(got) - reference(path)).max() <= 4
    max_lag = 2_300 if name == "a.aac" else 20  # bare AAC does not tell its delay
    assert likeness(got, clip, max_lag=max_lag) > 0.95


@pytest.mark.parametrize("channels", [1, 3, 5, 8, 9, 16, 32])
def test_any_number_of_channels_without_a_layout_is_mixed(tmp_path, clip, channels):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((channels, 2, 16_000, 0, "NONE", None))
        file.writeframes(np.repeat(clip[:, None], channels, axis=1).tobytes())
    got = load_audio(tmp_path / "a.wav")
    assert len(got) == len(clip)
    assert np.abs(steps(got) - clip).max() <= 4


def test_channels_that_nobody_knows_how_to_mix_are_averaged(tmp_path, clip):
    rows = np.zeros((len(clip), 9), np.int16)
    rows[:, 4] = clip
    (tmp_path / "a.wav").write_bytes(wav(rows.tobytes(), channels=9))
    assert np.abs(steps(load_audio(tmp_path / "a.wav")) - clip / 9).max() <= 1


def test_a_format_that_changes_on_the_way_is_followed(tmp_path, clip):
    first = encode(tmp_path / "a.mp3", clip, "libmp3lame")
    second = encode(
        tmp_path / "b.mp3", at_rate(clip, 44_100), "libmp3lame", rate=44_100, channels=2
    )
    (tmp_path / "both.mp3").write_bytes(first.read_bytes() + second.read_bytes())
    got = load_audio(tmp_path / "both.mp3")
    assert len(got) == pytest.approx(2 * len(clip), abs=3_000)
    assert likeness(got[len(clip) :], clip, max_lag=3_000) > 0.95


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_a_wav_header_from_a_pipe_which_cannot_know_the_length_is_no_damage(tmp_path, clip, size):
    (tmp_path / "a.wav").write_bytes(wav(clip.tobytes(), size=size))
    assert np.array_equal(steps(load_audio(tmp_path / "a.wav")), clip)


def test_standard_input_is_read_even_if_the_format_must_seek(tmp_path, clip):
    path = encode(tmp_path / "a.m4a", clip, "aac")
    code = "import sys, asrmask; sys.stdout.buffer.write(asrmask.load_audio('-'))"
    feed = subprocess.Popen(["cat", path], stdout=subprocess.PIPE)
    done = subprocess.run([sys.executable, "-c", code], stdin=feed.stdout, capture_output=True)
    feed.stdout.close()
    assert feed.wait() == 0
    assert done.stderr == b""
    assert np.array_equal(np.frombuffer(done.stdout, np.float32), load_audio(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_is_read(tmp_path, clip):
    path, pipe = encode(tmp_path / "a.m4a", clip, "aac"), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()))
    writer.start()
    got = load_audio(pipe)
    writer.join()
    assert np.array_equal(got, load_audio(path))


def test_names_of_any_bytes_are_opened(tmp_path, sample):
    path = tmp_path / os.fsdecode(b"\xff odd\n:%d.flac")
    path.write_bytes(sample.read_bytes())
    assert np.array_equal(load_audio(path), load_audio(sample))


def test_another_rate_is_refused(sample):
    with pytest.raises(OptionError, match=r"sr must be 16000, .*got 8000"):
        load_audio(sample, sr=8_000)


# --- files that are not audio, or only in part


def test_what_cannot_be_read_is_said_in_one_line(tmp_path, clip):
    for path, problem in unreadable(tmp_path, clip).items():
        with pytest.raises(AudioError) as caught:
            load_audio(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert problem in message
        assert "\n" not in message


def test_a_file_cut_in_the_middle_gives_its_first_part_and_a_warning(tmp_path, clip):
    for path in truncated(tmp_path, clip):
        with pytest.warns(AudioWarning, match=r"cut.*: truncated, got 1\.\d\d s .*expected [23]\."):
            got = load_audio(path)
        assert 16_000 < len(got) < 32_000
        if path.suffix in {".wav", ".flac", ".aiff"}:
            assert np.array_equal(steps(got), clip[: len(got)])
        else:
            assert likeness(got[4_000:], clip[4_000:]) > 0.95


@pytest.mark.parametrize(("name", "codec"), [("a.mp3", "libmp3lame"), ("a.ogg", "libopus")])
def test_a_cut_stream_without_a_length_is_read_as_far_as_it_goes(tmp_path, clip, name, codec):
    path = encode(tmp_path / name, at_rate(clip, 48_000), codec, rate=48_000)
    whole = load_audio(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    got = load_audio(path)
    assert 10_000 < len(got) < len(whole)
    assert likeness(got[:-2_000], whole) > 0.999


def test_damage_in_the_middle_is_reported_and_the_rest_read(tmp_path, clip):
    path = encode(tmp_path / "a.m4a", clip, "aac")
    data = bytearray(path.read_bytes())
    third = len(data) // 3
    data[third : 2 * third] = np.random.default_rng(0).bytes(third)
    path.write_bytes(data)
    with pytest.warns(AudioWarning, match=r"damaged, got \d+ packets that do not decode"):
        assert len(load_audio(path)) > len(clip) // 2


def test_a_rate_that_becomes_impossible_on_the_way_ends_the_recording(tmp_path, clip, monkeypatch):
    first = encode(tmp_path / "a.mp3", clip, "libmp3lame")
    second = encode(tmp_path / "b.mp3", at_rate(clip, 44_100), "libmp3lame", rate=44_100)
    (tmp_path / "both.mp3").write_bytes(first.read_bytes() + second.read_bytes())
    monkeypatch.setattr(media, "RATES", range(1_000, 40_001))
    with pytest.warns(AudioWarning, match=r"damaged, got 3.* s of audio, .*a rate of 44100 Hz"):
        assert len(load_audio(tmp_path / "both.mp3")) == pytest.approx(len(clip), abs=3_000)


def test_more_audio_than_a_file_can_hold_is_damage(tmp_path, clip, monkeypatch):
    path = encode(tmp_path / "a.flac", clip, "flac")
    monkeypatch.setattr(media, "MIN_DURATION_LIMIT_S", 1.0)
    monkeypatch.setattr(media, "MAX_S_PER_BYTE", 1e-9)
    with pytest.warns(AudioWarning, match=r"truncated, got 1\.\d\d s of audio"):
        assert 16_000 < len(load_audio(path)) < 24_000


def test_no_damage_gives_anything_but_audio_or_our_errors(tmp_path, capfd):
    for number in range(1_500):
        _, run = fuzzing_audio.case(1, number, tmp_path)
        try:
            run()
        except Exception as error:
            raise AssertionError(f"scripts/fuzz audio --seed 1 --only {number}") from error
    assert capfd.readouterr().err == ""  # where PyAV would print tracebacks of its own


# --- recordings


def test_reading_mirrors_before_the_beginning_and_is_zero_after_the_end():
    recording = Recording.of(np.arange(1, 6, dtype=np.float32))
    assert recording.read(-3, 7).tolist() == [4, 3, 2, 1, 2, 3, 4, 5, 0, 0]
    assert recording.read(1, 3).tolist() == [2, 3]
    assert recording.read(6, 8).tolist() == [0, 0]
    assert Recording.of(np.ones(1, np.float32)).read(-3, 2).tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        (np.zeros((9, 9), np.float32), r"floats, .* got float32 of shape \(9, 9\)"),
        (np.zeros(3, np.int8), r"floats, .* got int8 of shape \(3,\)"),
        (np.array([0.0, np.nan]), "must be finite numbers, got NaN or infinity"),
        (torch.tensor([0.0, -np.inf]), "must be finite numbers, got NaN or infinity"),
        (np.array([0.0, -9794.0]), r"−1\.\.1, got up to 9794: .* 16-bit integers by 32768$"),
        (np.array([0.0, 2.0**31]), r"−1\.\.1, got up to 2\.1.*: .* 32-bit integers by 2147483648$"),
        (np.array([0.0, 1e30], np.float32), r"floats in −1\.\.1, got up to 1e\+30$"),
        (np.array([0.0, 1e300]), r"floats in −1\.\.1, got up to 1e\+300$"),
    ],
)
def test_samples_that_are_not_sound_are_refused(samples, problem):
    with pytest.raises(AudioError, match=problem):
        Recording.of(samples)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_of_any_float_type_are_samples(clip, dtype):
    samples = torch.from_numpy(clip / np.float32(32768)).to(dtype)
    got = Recording.of(samples.clone().requires_grad_()).read(0, len(clip))
    assert np.array_equal(got, samples.float().numpy())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_arrays_of_any_float_type_are_samples(clip, dtype):
    samples = (clip / np.float32(32768)).astype(dtype)
    got = Recording.of(samples).read(0, len(clip))
    assert np.array_equal(got, samples.astype(np.float32))


def test_samples_a_few_times_too_loud_are_taken_as_they_are(clip):
    check_windows(clip / np.float32(32768) * 50, 80, [(0, 3_000)])


def test_a_long_recording_waits_on_disk_with_the_same_values(sample, clips, monkeypatch):
    monkeypatch.setattr(media, "SPOOL_BYTES", 10_000)
    recording = Recording.open(sample)
    assert recording.n_samples == len(clips[0])
    assert recording.duration_s == len(clips[0]) / 16_000
    assert np.array_equal(steps(recording.read(0, len(clips[0]))), clips[0])
    assert np.array_equal(steps(recording.read(777, 50_777)), clips[0][777:50_777])
    assert not recording.is_silent()
    del recording
    gc.collect()  # a file left open would be a warning, which is an error here


def test_silence_is_known():
    assert Recording.of(np.zeros(500_000, np.float32)).is_silent()
    assert not Recording.of(np.eye(1, 500_000, 499_999, dtype=np.float32)[0]).is_silent()


# --- padding


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(0, 6),
    st.integers(-3, 2),
    st.booleans(),
)
def test_pad_or_trim_is_upstreams(shape, length, axis, as_tensor):
    axis = max(-len(shape), min(axis, len(shape) - 1))
    array = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)
    array = torch.from_numpy(array) if as_tensor else array
    ours = audio.pad_or_trim(array, length, axis=axis)
    theirs = whisper.pad_or_trim(array, length, axis=axis)
    assert type(ours) is type(theirs)
    assert ours.shape == theirs.shape
    assert (ours == theirs).all()
    assert audio.pad_or_trim(torch.ones(2)).shape == (480_000,)


# --- samples to log-Mel


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("padding", [0, 480_000])
def test_log_mel_is_upstreams(clips, n_mels, padding):
    for clip in clips:
        floats = clip / np.float32(32768)
        theirs = whisper.log_mel_spectrogram(floats, n_mels, padding=padding)
        for form in (floats, torch.from_numpy(floats)):
            ours = log_mel_spectrogram(form, n_mels, padding=padding)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_log_mel_needs_more_samples_than_are_mirrored():
    for n in (0, 1, 200):
        with pytest.raises(AudioError, match=f"expected more than 200 samples, got {n}$"):
            log_mel_spectrogram(np.zeros(n, np.float32))
    assert log_mel_spectrogram(np.zeros(201, np.float32)).shape == (80, 1)


def test_log_mel_of_a_file_and_of_a_batch(sample, clips):
    floats = torch.from_numpy(clips[0] / np.float32(32768))
    assert torch.equal(log_mel_spectrogram(sample), log_mel_spectrogram(floats))
    batch = torch.stack([floats, floats / 2])
    theirs = whisper.log_mel_spectrogram(batch)
    torch.testing.assert_close(log_mel_spectrogram(batch), theirs, atol=1e-5, rtol=0)


def as_log(power):
    """Mel power as log_mel_spectrogram gives it."""
    log = torch.as_tensor(power)[:, :-1].clamp(min=1e-10).log10()
    return (log.clamp(min=log.max() - 8) + 4) / 4


@pytest.mark.parametrize("n_mels", [80, 128])
def test_librosa_and_torchaudio_give_the_same_log_mel(clip, n_mels):
    floats = clip / np.float32(32768)
    ours = log_mel_spectrogram(floats, n_mels)
    shape = {"n_fft": 400, "hop_length": 160, "n_mels": n_mels, "pad_mode": "reflect"}
    theirs = librosa.feature.melspectrogram(y=floats, sr=16_000, power=2.0, center=True, **shape)
    torch.testing.assert_close(ours, as_log(theirs), atol=1e-4, rtol=0)
    transform = import_torchaudio().transforms.MelSpectrogram(
        16_000, power=2.0, center=True, norm="slaney", mel_scale="slaney", **shape
    )
    torch.testing.assert_close(ours, as_log(transform(torch.tensor(floats))), atol=1e-4, rtol=0)


def test_unknown_numbers_of_bands_are_refused():
    with pytest.raises(OptionError, match=r"n_mels must be one of \[80, 128\], got 64"):
        log_mel_spectrogram(np.zeros(1_000, np.float32), 64)


# --- windows


def check_windows(floats, n_mels, windows):
    """Windows are cut and padded as openai-whisper's transcribe() does."""
    spectrogram = Spectrogram(Recording.of(floats), n_mels)
    mel = whisper.log_mel_spectrogram(floats, n_mels, padding=480_000)
    n_frames = mel.shape[1] - 3_000
    assert spectrogram.n_frames == n_frames
    for start, size in windows:
        size = min(size, n_frames - start)
        theirs = whisper.pad_or_trim(mel[:, start : start + size], 3_000)
        ours = spectrogram.window(start, size, fill="zero")
        assert (ours.n_frames, ours.fill) == (size, "zero")
        torch.testing.assert_close(ours.mel, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_windows_are_upstreams_also_across_blocks(long, n_mels):
    starts = [0, 2_998, 3_000, 4_321, 6_500, 9_000, 9_539]
    check_windows(long, n_mels, [(start, 3_000) for start in starts] + [(2_990, 20), (8_999, 1)])


@pytest.mark.parametrize("n_samples", [160, 161, 200, 319, 401, 479_999, 480_000, 480_159, 480_161])
def test_windows_are_upstreams_at_any_length(long, n_samples):
    check_windows(long[40_000 : 40_000 + n_samples], 80, [(0, 3_000)])


def test_the_loudest_frame_may_be_the_last_and_partial():
    for rest in (1, 100, 121, 159):
        floats = np.zeros(16_000 + rest, np.float32)
        floats[-1] = 1.0
        check_windows(floats, 80, [(0, 100), (90, 10)])


def test_silent_padding_is_silence_in_the_samples(clips):
    for clip, cut in zip(clips, [0, 1, 77, 159, 160], strict=True):
        floats = clip[: len(clip) - cut] / np.float32(32768)
        theirs = whisper.log_mel_spectrogram(whisper.pad_or_trim(floats))
        spectrogram = Spectrogram(Recording.of(floats), 80)
        ours = spectrogram.window(0, spectrogram.n_frames, fill="silence")
        torch.testing.assert_close(ours.mel, theirs, atol=1e-5, rtol=0)


def test_a_full_window_has_no_padding_of_any_kind(long):
    spectrogram = Spectrogram(Recording.of(long), 80)
    for start in (0, 4_000):
        zero, silence = (
            spectrogram.window(start, 3_000, fill=fill) for fill in ("zero", "silence")
        )
        assert torch.equal(zero.mel, silence.mel)


def test_silence_after_part_of_a_recording_hides_what_follows(long):
    whole = Spectrogram(Recording.of(long), 80).window(4_000, 500, fill="silence", size=700)
    assert whole.mel.shape == (80, 700)
    cut = long.copy()
    cut[4_500 * 160 :] = 0
    left = Spectrogram(Recording.of(cut), 80)
    left._peak_and_loudness = Spectrogram(Recording.of(long), 80)._peak_and_loudness
    torch.testing.assert_close(whole.mel, left.window(4_000, 700, fill="zero", size=700).mel)


@pytest.mark.parametrize(
    ("start", "n_frames", "size"),
    [(0, 101, 3_000), (-1, 5, 3_000), (99, 2, 3_000), (0, 11, 10), (100, 1, 10)],
)
def test_windows_outside_the_recording_are_refused(start, n_frames, size):
    spectrogram = Spectrogram(Recording.of(np.ones(16_000, np.float32)), 80)
    with pytest.raises(OptionError, match=rf"frames must be .* got {start}\.\.{start + n_frames}"):
        spectrogram.window(start, n_frames, fill="zero", size=size)


def test_unknown_fills_are_refused():
    spectrogram = Spectrogram(Recording.of(np.ones(16_000, np.float32)), 80)
    for n_frames in (50, 100):
        with pytest.raises(OptionError, match=r"fill must be zero, silence or noise:DB .*'noise'"):
            spectrogram.window(0, n_frames, fill="noise", size=100)


def test_white_noise_has_its_level_in_decibels_of_full_scale():
    noise = white_noise(np.random.default_rng(0), 100_000, -20)
    assert noise.dtype == np.float32
    assert np.sqrt(np.mean(noise**2)) == pytest.approx(0.1, rel=0.02)


def test_a_recording_must_have_one_frame():
    Recording.of(np.zeros(160, np.float32)).check_length("speech")
    with pytest.raises(AudioError, match="speech: too short, got 159 samples, expected 160"):
        Recording.of(np.zeros(159, np.float32)).check_length("speech")


def test_noise_has_its_level_and_is_the_same_every_time():
    loud = Spectrogram(Recording.of(np.full(16_000, 0.5, np.float32)), 80)
    quiet, again, louder = (loud.window(0, 50, fill=f"noise:{db}") for db in (-40, -40.0, -20))
    assert torch.equal(quiet.mel, again.mel)
    difference = (louder.mel - quiet.mel)[:, 200:]  # 20 dB are two decades of power, a quarter each
    assert difference.mean() == pytest.approx(0.5, abs=1e-3)
    silence = loud.window(0, 50, fill="silence")
    assert torch.equal(quiet.mel[:, :45], silence.mel[:, :45])


@pytest.mark.parametrize(("n_frames", "n_positions"), [(1, 1), (2, 1), (3, 2), (3_000, 1_500)])
def test_a_position_is_real_if_one_of_its_frames_is(n_frames, n_positions):
    assert Features(torch.zeros(80, 3_000), n_frames).n_positions == n_positions


# --- torchaudio beside a PyTorch of another build


def test_torchaudio_resamples(clip):
    torchaudio = import_torchaudio()
    assert torchaudio is sys.modules["torchaudio"] is import_torchaudio()
    floats = clip / np.float32(32768)
    up = torchaudio.functional.resample(torch.from_numpy(floats), 16_000, 48_000)
    back = torchaudio.functional.resample(up, 48_000, 16_000)
    assert len(up) == 3 * len(clip)
    assert likeness(up.numpy(), at_rate(floats, 48_000)) > 0.999
    assert likeness(back.numpy(), floats) > 0.999


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_samples_of_any_rate_are_brought_to_16_khz(clip, rate):
    floats = clip / np.float32(32768)
    recording = Recording.of(at_rate(floats, rate), rate)
    assert abs(recording.n_samples - len(floats)) <= 2 * 16_000 // rate + 1
    limit = 0.999 if rate > 16_000 else 0.95  # 8 kHz has nothing above 4 kHz
    assert likeness(recording.read(0, recording.n_samples), floats) > limit


@pytest.mark.parametrize("rate", [0, -16_000, 44_101, 10**9, 16_000.5])
def test_rates_that_cannot_be_resampled_are_told(rate):
    with pytest.raises(OptionError, match=rf"rate must be a multiple of 25 .* got {rate}"):
        Recording.of(np.zeros(100, np.float32), rate)


# --- without PyAV


def test_librosa_reads_files_where_pyav_is_missing(sample, clip, tmp_path, monkeypatch):
    expected = load_audio(sample)
    high = encode(tmp_path / "high.wav", at_rate(clip, 44_100), "pcm_s16le", rate=44_100)
    monkeypatch.setattr(media, "av", None)
    assert np.array_equal(load_audio(sample), expected)
    assert likeness(load_audio(high), clip / np.float32(32768)) > 0.999
    (tmp_path / "text.wav").write_text("no audio at all")
    with pytest.raises(AudioError, match=r"text\.wav: expected audio that librosa can read"):
        load_audio(tmp_path / "text.wav")
    monkeypatch.setitem(sys.modules, "librosa", None)
    with pytest.raises(MissingPackageError, match="reading audio files needs av: pip install av"):
        load_audio(sample)


PACKAGE = {
    "__init__.py": "from torchaudio import _extension, functional",
    "_extension.py": "raise OSError('libcudart.so: not there')",
    "functional.py": "from torchaudio._extension import fail_if_no_align\n"
    "@fail_if_no_align\ndef forced_align(): return 1\n"
    "def resample(): return 2",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs a torchaudio of our own."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def install(files):
        (tmp_path / "torchaudio").mkdir()
        for name, text in files.items():
            (tmp_path / "torchaudio" / name).write_text(text)

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
        del sys.modules[name]


def test_torchaudio_is_imported_without_an_extension_that_does_not_load(installed):
    installed(PACKAGE)
    torchaudio = import_torchaudio()
    assert torchaudio.functional.resample() == 2
    assert not torchaudio._extension._IS_TORCHAUDIO_EXT_AVAILABLE
    with pytest.raises(RuntimeError, match=r"forced_align needs .* got: libcudart.so: not there"):
        torchaudio.functional.forced_align()


def test_torchaudio_that_loads_is_left_alone(installed):
    installed(PACKAGE | {"_extension.py": "fail_if_no_align = lambda function: function"})
    assert import_torchaudio().functional.forced_align() == 1


def test_torchaudio_that_is_missing_or_broken_says_so(installed):
    installed({"__init__.py": "import no_such_module"})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_torchaudio()
