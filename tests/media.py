"""Media files for tests, good and broken, made with PyAV: there need not be an ffmpeg command."""

import struct

import av
import numpy as np
import soundfile
import soxr

LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}
SCALES = {"s16": (np.int16, 1), "s32": (np.int32, 65536), "flt": (np.float32, 1 / 32768)}


def read_flac(path):
    """The samples of a clip as they are stored: int16, not read by the code under test."""
    return soundfile.read(path, dtype="int16")[0]


def at_rate(samples, rate):
    """int16 samples at 16 kHz brought to another rate."""
    return samples if rate == 16_000 else soxr.resample(samples, 16_000, rate)


def encode(
    path,
    samples,
    codec,
    *,
    rate=16_000,
    channels=1,
    form="s16",
    video=False,
    options=None,
    bit_rate=None,
):
    """Write int16 samples, the same in every channel, to a file of the kind that its name says."""
    dtype, scale = SCALES[form]
    rows = np.repeat(samples[:, None], channels, axis=1)
    data = (rows * scale if form == "flt" else rows.astype(dtype) * dtype(scale)).astype(dtype)
    layout = LAYOUTS[channels]
    with av.open(str(path), "w", options=options or {}) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        if video:
            film(out)
        frame = av.AudioFrame.from_ndarray(data.reshape(1, -1), format=form, layout=layout)
        frame.sample_rate = rate
        frame.pts = 0
        convert = av.AudioResampler(format=stream.codec_context.format.name)
        for piece in [*convert.resample(frame), *convert.resample(None), None]:
            out.mux(stream.encode(piece))
    return path


def film(out, codec="mpeg4", pix_fmt="yuv420p"):
    """Add one black picture to a file that is being written."""
    stream = out.add_stream(codec, rate=5)
    stream.width = stream.height = 32
    stream.pix_fmt = pix_fmt
    frame = av.VideoFrame(32, 32, "rgb24")
    frame.pts = 0
    for piece in [frame, None]:
        out.mux(stream.encode(piece))


def reference(path):
    """int16 samples as the ffmpeg command would give them: libswresample on the whole stream."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=16_000)
    with av.open(str(path)) as file:
        frames = list(file.decode(audio=0))
    for frame in frames:
        frame.pts = None
    blocks = [block for frame in [*frames, None] for block in resampler.resample(frame)]
    return np.concatenate([block.to_ndarray()[0] for block in blocks])


def wav(data, *, tag=1, channels=1, rate=16_000, bits=16, size=None):
    """The bytes of a wav file, true or not: tag 1 is integers, 3 floats; size is what it claims."""
    align = channels * bits // 8
    size = len(data) if size is None else size
    header = struct.pack("<IHHIIHH", 16, tag, channels, rate, rate * align, align, bits)
    riff = struct.pack("<I", min(36 + size, 2**32 - 1))
    return b"RIFF" + riff + b"WAVEfmt " + header + b"data" + struct.pack("<I", size) + data


def unreadable(folder, samples):
    """Files of which nothing can be read: path → what must be said about it."""
    floats = np.append(samples, 0) / np.float32(32768)
    pcm = samples.tobytes()
    noise = np.random.default_rng(0).bytes(20_000)
    written = {
        "empty.wav": (b"", "empty, got 0 bytes"),
        "text.wav": (b"this is no sound\n" * 99, "Invalid data"),
        "noise.mp3": (noise, "Invalid data"),
        "noise.wav": (noise, "Invalid data"),
        "header.wav": (wav(pcm)[:30], "Invalid data"),
        "no_data.wav": (wav(b""), "got none"),
        "interrupted.wav": (wav(b"", size=1000), "expected audio samples, got none"),
        "channels.wav": (wav(pcm[:65_000], channels=65), "got 65 channels (must be 1..64)"),
        "fast.wav": (
            wav(pcm, rate=2**31 - 1),
            "got a rate of 2147483647 Hz (must be 1000..3000000)",
        ),
        "slow.wav": (wav(pcm, rate=1), "got a rate of 1 Hz (must be 1000..3000000)"),
        "no_channels.wav": (wav(pcm, channels=0), "got one of zero channels"),
        "no_rate.wav": (wav(pcm, rate=0), "Invalid data"),
        "no_codec.wav": (wav(pcm, tag=0x1234), "unknown codec"),
    }
    for name, value in {"nan": np.nan, "inf": np.inf}.items():
        floats[-1] = value
        data = wav(floats.tobytes(), tag=3, bits=32)
        written[f"{name}.wav"] = (data, "must be finite numbers, got NaN or infinity")
    # finite in 64 bits alone, in so many channels that FFmpeg does not mix them itself
    data = wav(np.tile([1e300, -1e300], 9 * 100).tobytes(), tag=3, bits=64, channels=9)
    written["beyond.wav"] = (data, "must be finite numbers, got NaN or infinity")
    m4a = encode(folder / "whole.m4a", samples, "aac")  # its table of contents is at the end
    written["cut.m4a"] = (m4a.read_bytes()[: m4a.stat().st_size // 2], "Invalid data")
    m4a.unlink()
    expected = {}
    for name, (data, problem) in written.items():
        (folder / name).write_bytes(data)
        expected[folder / name] = problem
    with av.open(str(folder / "mute.mp4"), "w") as out:
        film(out)
    with av.open(str(folder / "image.png"), "w", format="image2") as out:
        film(out, "png", "rgb24")
    (folder / "folder.wav").mkdir()
    return expected | {
        folder / "mute.mp4": "expected an audio stream that FFmpeg can decode, got video",
        folder / "image.png": "expected an audio stream that FFmpeg can decode, got video",
        folder / "folder.wav": "is a folder, expected an audio file",
        folder / "missing.wav": "No such file or directory, expected an audio file",
        folder / ("x" * 300): "File name too long, expected an audio file",
    }


def truncated(folder, samples):
    """Files cut in the middle, whose first part can be read and whose headers tell."""
    made = {
        folder / "cut.wav": ("pcm_s16le", {}),
        folder / "cut.flac": ("flac", {}),
        folder / "cut.aiff": ("pcm_s16be", {}),
        folder / "cut_front.m4a": ("aac", {"options": {"movflags": "faststart"}}),
        folder / "cut.webm": ("libopus", {"rate": 48_000}),
    }
    for path, (codec, more) in made.items():
        encode(path, at_rate(samples, more.get("rate", 16_000)), codec, **more)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return list(made)
