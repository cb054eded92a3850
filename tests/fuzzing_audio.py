"""Damaged audio files without end: each is read as samples or refused with our errors.

Case number n of a seed is always the same file, so that a failure can be repeated.
"""

import io
import struct
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import soundfile
from media import at_rate, encode, read_flac

from asrmask.audio.recording import load_audio
from asrmask.errors import AudioError, AudioWarning, OptionError

CLIP = Path(__file__).parent.parent / "data" / "austen-0880.flac"
HEAD = 400  # bytes that hold most headers
# what stands before the numbers of a header, wherever in the file that is
MARKS = [b"fmt ", b"fact", b"data", b"fLaC", b"OpusHead", b"\x01vorbis", b"Info", b"Xing"]
MARKS += [b"mvhd", b"tkhd", b"mdhd", b"stsd", b"stts", b"stsc", b"stsz", b"stco", b"esds", b"alac"]
MARKS += [b"\x2a\xd7\xb1", b"\x44\x89", b"\xb5\x84", b"\x9f\x81", b"\x53\x6e", b"\x63\xa2"]  # mkv
MARKS += [b"COMM", b"SSND", b"desc", b"pakt", b"strh", b"strf", b"avih", b"wvpk", b"TTA1", b"OggS"]

# name of a file → codec and rate
KINDS: dict[str, tuple[str, int]] = {
    "s16.wav": ("pcm_s16le", 16_000),
    "u8.wav": ("pcm_u8", 8_000),
    "f32.wav": ("pcm_f32le", 16_000),
    "f64.wav": ("pcm_f64le", 8_000),
    "mulaw.wav": ("pcm_mulaw", 8_000),
    "adpcm.wav": ("adpcm_ms", 16_000),
    "ima.wav": ("adpcm_ima_wav", 16_000),
    "mp3.wav": ("libmp3lame", 16_000),
    "a.w64": ("pcm_s24le", 16_000),
    "a.flac": ("flac", 16_000),
    "flac.ogg": ("flac", 16_000),
    "opus.ogg": ("libopus", 48_000),
    "opus.webm": ("libopus", 48_000),
    "aac.mkv": ("aac", 16_000),
    "a.mp3": ("libmp3lame", 16_000),
    "a.mp2": ("mp2", 16_000),
    "aac.m4a": ("aac", 16_000),
    "alac.m4a": ("alac", 16_000),
    "a.aac": ("aac", 16_000),
    "pcm.mov": ("pcm_s16be", 16_000),
    "ima.mov": ("adpcm_ima_qt", 16_000),
    "a.aiff": ("pcm_s16be", 16_000),
    "a.caf": ("pcm_s16be", 16_000),
    "alac.caf": ("alac", 16_000),
    "a.au": ("pcm_s16be", 16_000),
    "a.voc": ("pcm_u8", 16_000),
    "a.ac3": ("ac3", 48_000),
    "a.wv": ("wavpack", 16_000),
    "a.tta": ("tta", 16_000),
    "a.amr": ("libopencore_amrnb", 8_000),
    "a.wma": ("wmav2", 44_100),
    "a.avi": ("adpcm_ms", 16_000),
    "a.flv": ("libmp3lame", 44_100),
    "a.ts": ("aac", 16_000),
    "a.nut": ("flac", 16_000),
}
# codecs of a wav header: all that FFmpeg gives a number below, and some that it does not
TAGS = [*range(0x140), 0x160, 0x161, 0x162, 0x163, 0x200, 0x270, 0x401, 0x566F, 0x2000, 0x2001]
TAGS += [0xFFFE, 0xA106, 0xF1AC, 0x706D, 0x4143, 0x674F, 0x6750, 0xFFFF]


def case(seed: int, number: int, folder: Path) -> tuple[str, Callable[[], object]]:
    """The name of a case, and what runs it: any exception that comes of that is a defect."""
    rng = np.random.default_rng([seed, number])
    name, content = damaged(rng, folder)

    def run() -> None:
        path = folder / "damaged"
        path.write_bytes(content)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                samples = load_audio(path)
        except (AudioError, OptionError) as error:
            message = str(error)
        else:
            message = ""
            assert len(samples), "expected samples"
            assert np.isfinite(samples).all(), "expected finite samples"
        others = [str(one.message) for one in warned if one.category is not AudioWarning]
        assert not others, f"expected no warnings but ours, got {others}"
        assert message.isprintable(), f"expected one line, got {message!r}"

    return name, run


@cache
def whole(folder: Path) -> dict[str, bytes]:
    """A quarter of a second of speech in files of every kind that is to be damaged."""
    clip = read_flac(CLIP)[8_000:12_000]
    vorbis = io.BytesIO()
    soundfile.write(vorbis, clip, 16_000, format="OGG", subtype="VORBIS")
    files = {"vorbis.ogg": vorbis.getvalue()}
    for name, (codec, rate) in KINDS.items():
        bit_rate = 64_000 if codec == "wmav2" else None
        path = encode(folder / name, at_rate(clip, rate), codec, rate=rate, bit_rate=bit_rate)
        files[name] = path.read_bytes()
        path.unlink()
    return files


def damaged(rng: np.random.Generator, folder: Path) -> tuple[str, bytes]:
    """A file that may be anything: its name says how it was made."""
    files = whole(folder)
    if rng.random() < 0.15:
        return headed(rng)
    name = str(rng.choice(list(files)))
    content = bytearray(files[name])
    damages = []
    for _ in range(rng.integers(1, 4)):
        damage = DAMAGES[rng.integers(len(DAMAGES))]
        content = damage(rng, content, files)
        damages.append(damage.__name__)
    if name.endswith(".ogg") and rng.random() < 0.8:
        content = bytearray(with_checksums(content))
        damages.append("with checksums")
    return f"{name} {' '.join(damages)}", bytes(content)


def headed(rng: np.random.Generator) -> tuple[str, bytes]:
    """A wav file whose header says anything, with any content."""
    fields = {
        "tag": int(rng.choice(TAGS)) if rng.random() < 0.6 else int(rng.choice([1, 3])),
        "channels": int(rng.choice([0, 1, 1, 2, 6, 9, 63, 64, 65, 255, 1024, 65535])),
        "rate": int(
            rng.choice([0, 1, 8_000, 16_000, 16_000, 10**6, 10**7, 2_130_706_432, 2**32 - 1])
        ),
        "bits": int(rng.choice([0, 1, 4, 8, 16, 16, 24, 32, 64, 128, 65535])),
        "size": int(rng.choice([0, 1, 100, 4_000, 2**31 - 1, 2**32 - 1])),
    }
    data = rng.bytes(int(rng.choice([0, 1, 2, 100, 5_000, 50_000])))
    align = fields["channels"] * fields["bits"] // 8
    header = struct.pack(
        "<IHHIIHH",
        16,
        *(fields["tag"], fields["channels"], fields["rate"]),
        int(rng.choice([0, 1, fields["rate"] * align % 2**32, 2**32 - 1])),
        int(rng.choice([0, 1, align % 2**16, 65535])),
        fields["bits"],
    )
    start = b"RIFF" + struct.pack("<I", (36 + fields["size"]) % 2**32) + b"WAVEfmt " + header
    content = start + b"data" + struct.pack("<I", fields["size"]) + data
    told = " ".join(f"{name} {value}" for name, value in fields.items())
    return f"wav {told}, {len(data)} bytes", content


def at(rng: np.random.Generator, content: bytearray) -> int:
    """A place in a file, half of the time in its header."""
    end = min(HEAD, len(content)) if rng.random() < 0.5 else len(content)
    return int(rng.integers(max(end, 1)))


def flip(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    for _ in range(rng.integers(1, 9)):
        if content:
            content[at(rng, content)] ^= 1 << int(rng.integers(8))
    return content


def replace(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    for _ in range(rng.integers(1, 9)):
        if content:
            content[at(rng, content)] = int(rng.integers(256))
    return content


def extreme(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    """A number of the header becomes one at the edge of its type."""
    return with_extreme(rng, content, at(rng, content))


def field(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    """The same, of a number behind a mark: rates, channels, sizes, durations, counts."""
    places = [content.find(mark) + len(mark) for mark in MARKS if mark in content]
    if places:
        content = with_extreme(rng, content, int(rng.choice(places)) + int(rng.integers(40)))
    return content


def with_extreme(rng: np.random.Generator, content: bytearray, start: int) -> bytearray:
    size = int(rng.choice([1, 2, 4, 8]))
    top = 1 << 8 * size
    value = (
        int(rng.integers(-2, 3))
        + [0, top >> 1, top, 1 << int(rng.integers(8 * size))][int(rng.integers(4))]
    )
    order = "little" if rng.random() < 0.5 else "big"
    content[start : start + size] = (value % top).to_bytes(size, order)  # type: ignore[arg-type]
    return content


def truncate(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    return content[: max(at(rng, content), 1)]


def drop(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    start = at(rng, content)
    del content[start : start + int(rng.integers(1, 200))]
    return content or bytearray(1)


def repeat(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    start = at(rng, content)
    part = content[start : start + int(rng.integers(1, 200))]
    content[start:start] = part * int(rng.integers(1, 9))
    return content


def splice(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    """The beginning of one file and the end of another."""
    other = bytearray(files[str(rng.choice(list(files)))])
    return content[: max(at(rng, content), 1)] + other[at(rng, other) :]


def scramble(rng: np.random.Generator, content: bytearray, files: dict[str, bytes]) -> bytearray:
    start = at(rng, content)
    n = len(content[start : start + int(rng.integers(1, 500))])
    content[start : start + n] = rng.bytes(n)
    return content


DAMAGES = [flip, replace, extreme, field, field, truncate, drop, repeat, splice, scramble]


def with_checksums(content: bytes) -> bytes:
    """The checksums of Ogg's pages put right, without which FFmpeg throws damaged pages away."""
    whole = bytearray(content)
    start = whole.find(b"OggS")
    while start >= 0:
        end = whole.find(b"OggS", start + 4)
        page = whole[start : end if end > 0 else len(whole)]
        page[22:26] = bytes(4)
        whole[start + 22 : start + 26] = ogg_checksum(page).to_bytes(4, "little")
        start = end
    return bytes(whole[: len(content)])


def ogg_checksum(page: bytes) -> int:
    rest = 0
    for byte in page:
        rest = rest << 8 & 0xFFFF_FFFF ^ OGG_TABLE[rest >> 24 ^ byte]
    return rest


def remainder(byte: int) -> int:
    rest = byte << 24
    for _ in range(8):
        rest = rest << 1 ^ (0x1_04C1_1DB7 if rest >> 31 else 0)
    return rest


OGG_TABLE = [remainder(byte) for byte in range(256)]
