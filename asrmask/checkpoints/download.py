"""Fetching a file that is known by its sha256: resumed, verified, whole or not at all."""

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
ATTEMPTS = 4  # connections that may break off in a row without bringing anything
TIMEOUT_S = 30

# called with the bytes that are here and the bytes there will be (None: the server does not say)
Progress = Callable[[int, int | None], None]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def fetch(url: str, target: Path, sha256: str, progress: Progress | None = None) -> Path:
    """`target`, once it holds exactly the bytes of that hash.

    A file is at `target` only when it is whole and verified; what has come so far waits beside it
    with the ending .part, and the next call goes on from there.
    """
    try:
        if _is_whole(target, sha256):  # before the lock: the folder may be read-only
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        return _locked(url, target, sha256, progress)
    except OSError as error:
        raise CheckpointError(f"{target}: expected a place to download to, got {error}") from None


def _is_whole(target: Path, sha256: str) -> bool:
    try:
        # asked once: another process may take the file away between two questions
        if not stat.S_ISREG(target.stat().st_mode):
            raise CheckpointError(f"{target}: expected a file, got something else")
        return sha256_of(target) == sha256
    except FileNotFoundError:
        return False


def _locked(url: str, target: Path, sha256: str, progress: Progress | None) -> Path:
    with FileLock(f"{target}.lock"):
        if _is_whole(target, sha256):  # another process brought it while this one waited
            return target
        part = target.with_name(target.name + ".part")
        if target.exists():
            # another program's interrupted download: go on with it, or with what is longer
            if part.exists() and part.stat().st_size >= target.stat().st_size:
                target.unlink()
            else:
                os.replace(target, part)
        resumed = part.exists()
        _complete(url, part, progress)
        if sha256_of(part) != sha256 and resumed:
            part.unlink()  # its beginning was not of this file
            _complete(url, part, progress)
        got = sha256_of(part)
        if got != sha256:
            part.unlink()
            raise CheckpointError(
                f"{url}: wrong content, got sha256 {got[:16]}…, expected {sha256[:16]}…"
            )
        os.replace(part, target)
    return target


def _complete(url: str, part: Path, progress: Progress | None) -> None:
    """Bring `part` to the length that the server announces, over several connections if need be."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _connection(url, part, before, progress):
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
        progressed = part.exists() and part.stat().st_size > before
        failures = 0 if progressed else failures + 1
        if failures == ATTEMPTS:
            raise CheckpointError(
                f"{url}: cannot be downloaded, got {one_line(reason)}; expected a network "
                f"connection, or the file in {part.parent}"
            )


def _connection(url: str, part: Path, offset: int, progress: Progress | None) -> bool:
    """One request for what is missing; True when everything announced has come."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and offset:  # nothing is missing, or the part is too long
            error.close()
            return True
        raise
    with response:
        if response.status != 206:
            offset = 0  # the server sends the whole file
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            raise http.client.HTTPException(f"another range than the one from byte {offset}")
        total = None if response.length is None else offset + response.length
        here = offset
        with part.open("ab" if offset else "wb") as file:
            while block := response.read(BLOCK):
                file.write(block)
                here += len(block)
                if progress:
                    progress(here, total)
    return total is None or here >= total
