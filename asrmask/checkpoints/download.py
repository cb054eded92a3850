"""Download a file with a known SHA-256: resumable, verified and atomic."""

import hashlib
import http.client
import os
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from asrmask.errors import CheckpointError, one_line

BLOCK = 2**20  # bytes read at a time
ATTEMPTS = 4  # give up after this many connections in a row that brought no data
TIMEOUT_S = 30

# called with the bytes received so far and the total (None: unknown)
Progress = Callable[[int, int | None], None]


def wrong_sha256(source: object, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: wrong content, got sha256 {got[:16]}…, expected {expected[:16]}…"
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def fetch(url: str, target: Path, sha256: str, progress: Progress | None = None) -> Path:
    """Download `url` to `target` unless a file with that hash is there already. Returns `target`.

    The file appears at `target` only when complete and verified. Partial downloads are kept beside
    it with the suffix .part, and the next call resumes them.
    """
    try:
        if not _is_complete(target, sha256):  # before the lock: the folder may be read-only
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock"):
                if not _is_complete(target, sha256):  # another process may have downloaded it
                    _fetch_locked(url, target, sha256, progress)
    except OSError as error:
        raise CheckpointError(f"{target}: expected a writable path, got {error}") from None
    return target


def _is_complete(target: Path, sha256: str) -> bool:
    try:
        # a single stat: another process may remove the file between two calls
        if not stat.S_ISREG(target.stat().st_mode):
            raise CheckpointError(f"{target}: expected a file, got something else")
        return sha256_of(target) == sha256
    except FileNotFoundError:
        return False


def _fetch_locked(url: str, target: Path, sha256: str, progress: Progress | None) -> None:
    part = target.with_name(target.name + ".part")
    if target.exists():  # another program's interrupted download: resume from the longer file
        os.replace(max(part, target, key=_size), part)
        target.unlink(missing_ok=True)
    for _ in range(2 if part.exists() else 1):  # again if the resumed part was from another file
        _download(url, part, progress)
        got = sha256_of(part)
        if got == sha256:
            os.replace(part, target)
            return
        part.unlink()
    raise wrong_sha256(url, got, sha256)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _download(url: str, part: Path, progress: Progress | None) -> None:
    """Download into `part` until it has the announced length, reconnecting if necessary."""
    failures = 0
    while failures < ATTEMPTS:
        n_before = _size(part)
        try:
            if _request(url, part, n_before, progress):
                return
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"HTTP {error.code} {error.reason}"
            if error.code < 500:
                raise CheckpointError(
                    f"{url}: expected a file to download, got {one_line(reason)}"
                ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", None) or error or type(error).__name__)
        failures = 0 if _size(part) > n_before else failures + 1
    raise CheckpointError(
        f"{url}: cannot be downloaded, got {one_line(reason)}; expected a network connection, or "
        f"the file in {part.parent}"
    )


def _request(url: str, part: Path, offset: int, progress: Progress | None) -> bool:
    """Request the missing bytes once. Returns True if all announced bytes have arrived."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and offset:  # the part is complete or too long
            error.close()
            return True
        raise
    with response:
        if response.status != 206:
            offset = 0  # the server sends the file from its start
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            raise http.client.HTTPException(f"another range than the one from byte {offset}")
        total = None if response.length is None else offset + response.length
        with part.open("ab" if offset else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                offset += len(block)
                if progress:
                    progress(offset, total)
    return total is None or offset >= total
