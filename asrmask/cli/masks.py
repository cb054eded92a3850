"""asrmask masks: draw the attention masks of a file under a padding policy."""

import argparse
from pathlib import Path

from asrmask.audio.constants import FRAMES_PER_SECOND, N_FRAMES, POSITIONS_PER_SECOND
from asrmask.cli.flags import MODEL, PADDING, add_flags
from asrmask.errors import OptionError, printable
from asrmask.model.policy import Policy

USAGE = "FILE [--padding POLICY] [--png FILE]"
PNG = "image to write (default: the name of the file with .masks.png)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="audio or video file, or - for standard input")
    add_flags(parser, [PADDING, *MODEL, ("png", "FILE", None, PNG)])


def run(args: argparse.Namespace) -> int:
    policy = Policy.parse(args.padding)
    name = "standard input" if args.file == "-" else printable(args.file)
    png = Path(args.png or f"{'stdin' if args.file == '-' else Path(args.file).stem}.masks.png")
    if not png.parent.is_dir():
        raise OptionError(f"--png must be in a folder that exists, got {png}")

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
    model = load_model(args.model, device="cpu", download_root=args.model_dir, adapter=args.adapter)
    spectrogram = Spectrogram(recording, model.dims.n_mels)
    start = (spectrogram.n_frames - 1) // N_FRAMES * N_FRAMES  # the last window: only it is padded
    window = spectrogram.window(start, spectrogram.n_frames - start, fill=policy.fill)
    result = decode(model, window, padding=policy, without_timestamps=True)
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    tokens = [tokenizer.decode([token]) for token in result.tokens] or ["(no text)"]

    visible = policy.visible(window.n_positions)
    planned, full = plan(policy, [visible]), plan(Policy(), [visible])
    computed_s, avoided_s = policy.padding_s(window.n_positions)
    start_s, end_s = start / FRAMES_PER_SECOND, spectrogram.n_frames / FRAMES_PER_SECOND
    n = start // N_FRAMES + 1
    print(f"{name}: {end_s:.2f} s, window {n} of {n}: {start_s:.2f} … {end_s:.2f} s")
    print(f"padding   {policy}")
    print(f"audio     {window.n_positions} of 1500 positions, {POSITIONS_PER_SECOND} a second")
    sink = f", and the last {policy.sink:g} s of the window" if policy.sink else ""
    print(f"visible   {visible} with the margin of {policy.margin:g} s{sink}")
    print(f"padding   {computed_s:.2f} s computed, {avoided_s:.2f} s avoided")
    print(f"text      {len(result.tokens)} tokens: {result.text}")
    if result.fallback is not None:
        print(f"          decoded again with full padding ({result.fallback})")
    costs = {"encoder": encoder_operations, "cross-attention, a token": token_operations}
    for label, operations in costs.items():
        mine, most = operations(model.dims, planned) / 1e9, operations(model.dims, full) / 1e9
        comparison = f"{most:.4g} G with full padding ({most / mine:.1f} ×)"
        print(f"{label}: {mine:.4g} G operations, {comparison}")
    images = pictures(planned, tokens)
    for picture in images:
        n_queries, n_keys = picture.cells.shape
        print(f"\n{picture.title}, {n_queries} queries × {n_keys} keys\n{text(picture)}")
    print("\n" + "  ".join(f"{c!r} {m}" for c, m in zip(CHARACTERS, MEANINGS, strict=True)))
    save(images, f"{name}: padding {policy}", png)
    print(f"picture: {printable(str(png))}")
    return 0
