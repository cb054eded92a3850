"""asrmask masks: draw the attention masks of a file under a padding policy."""

import argparse
from pathlib import Path

from asrmask.audio.constants import POSITIONS_PER_SECOND
from asrmask.checkpoints.registry import DEFAULT
from asrmask.errors import OptionError, printable
from asrmask.model.policy import ALLOWED, Policy

USAGE = "FILE [--padding POLICY] [--png FILE]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="audio or video, or - for stdin")
    parser.add_argument("--padding", default="full", metavar="POLICY", help=ALLOWED)
    parser.add_argument("--model", default=DEFAULT, help="official name, or path of weights")
    parser.add_argument("--model_dir", metavar="DIR", help="where official models are kept")
    parser.add_argument(
        "--png", metavar="FILE", help="the picture to write (default: the file's name + .masks.png)"
    )


def run(args: argparse.Namespace) -> int:
    policy = Policy.parse(args.padding)
    name = "standard input" if args.file == "-" else printable(args.file)
    png = Path(args.png or f"{'stdin' if args.file == '-' else Path(args.file).stem}.masks.png")
    if not png.parent.is_dir():
        raise OptionError(f"--png must be a file in a folder that is there, got {png}")

    from asrmask.audio.constants import FRAMES_PER_SECOND, N_FRAMES
    from asrmask.audio.recording import Recording
    from asrmask.audio.spectrogram import Spectrogram
    from asrmask.checkpoints import load_model
    from asrmask.decoding.task import decode
    from asrmask.inspection.mask_pictures import CHARACTERS, MEANINGS, pictures, save, text
    from asrmask.model.cost import encoder_operations, token_operations
    from asrmask.model.encoding import plan
    from asrmask.tokenizer.tokenizer import get_tokenizer

    recording = Recording.open(args.file)
    recording.check_length(name)
    model = load_model(args.model, device="cpu", download_root=args.model_dir)
    spectrogram = Spectrogram(recording, model.dims.n_mels)
    start = (spectrogram.n_frames - 1) // N_FRAMES * N_FRAMES  # the last window: only it is padded
    window = spectrogram.window(start, spectrogram.n_frames - start, fill=policy.fill)
    result = decode(model, window, padding=policy, without_timestamps=True)
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    tokens = [tokenizer.decode([token]) for token in result.tokens] or ["(no text)"]

    visible = policy.visible(window.n_positions)
    planned, whole = plan(policy, [visible]), plan(Policy(), [visible])
    computed_s, avoided_s = policy.padding_s(window.n_positions)
    end_s, start_s = spectrogram.n_frames / FRAMES_PER_SECOND, start / FRAMES_PER_SECOND
    n_windows = start // N_FRAMES + 1
    print(
        f"{name}: {end_s:.2f} s, window {n_windows} of {n_windows}: {start_s:.2f} … {end_s:.2f} s"
    )
    print(f"padding   {policy}")
    print(f"audio     {window.n_positions} of 1500 positions, {POSITIONS_PER_SECOND} a second")
    print(f"visible   {visible} with the margin of {policy.margin:g} s")
    print(f"padding   {computed_s:.2f} s computed, {avoided_s:.2f} s avoided")
    print(f"text      {len(result.tokens)} tokens: {result.text}")
    if result.fallback is not None:
        print(f"          decoded again with all of the padding ({result.fallback})")
    for label, cost in (
        ("encoder", encoder_operations),
        ("cross-attention, a token", token_operations),
    ):
        mine, theirs = cost(model.dims, planned), cost(model.dims, whole)
        print(
            f"{label}: {mine / 1e9:.4g} G operations, {theirs / 1e9:.4g} G with all of the padding "
            f"({theirs / mine:.1f} ×)"
        )
    drawn = pictures(planned, tokens)
    for picture in drawn:
        n_queries, n_keys = picture.cells.shape
        print(f"\n{picture.title}, {n_queries} queries × {n_keys} keys")
        print(text(picture))
    print("\n" + "  ".join(f"{c!r} {m}" for c, m in zip(CHARACTERS, MEANINGS, strict=True)))
    save(drawn, f"{name}: padding {policy}", png)
    print(f"picture: {printable(str(png))}")
    return 0
