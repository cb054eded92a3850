"""Downloads from a server that does what servers do: break off, ignore, refuse, lie, be away."""

import hashlib
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from asrmask import checkpoints
from asrmask.checkpoints import download, registry
from asrmask.errors import CheckpointError
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.whisper import Whisper

CONTENT = random.Random(0).randbytes(50_000)


class Site(ThreadingHTTPServer):
    """Serves `content`; `replies` say how, one a request, then as a good server does."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.replies = []
        self.ranges = []  # the Range header of each request
        self.n_sent = 0
        self.target = None
        self.wrong_targets = 0  # requests at whose time there was a target with wrong bytes

    @property
    def sha256(self):
        return hashlib.sha256(self.content).hexdigest()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/{self.sha256}/tiny.pt"

    def is_wrong(self):
        return self.target.exists() and self.target.read_bytes() != self.content

    def fetch(self, progress=None):
        return download.fetch(self.url, self.target, self.sha256, progress)

    def refusal(self):
        """The one line in which a download fails; it names the address, and leaves no target."""
        with pytest.raises(CheckpointError) as caught:
            self.fetch()
        line = str(caught.value)
        assert len(line.splitlines()) == 1
        assert self.url in line
        assert "got" in line
        assert "expected" in line
        assert not self.target.exists()
        return line


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        site = self.server
        site.ranges.append(self.headers["Range"])
        site.wrong_targets += site.is_wrong()
        reply = site.replies.pop(0) if site.replies else good
        reply(self)

    def send(self, status, body, headers=(), n=None):
        """The first n bytes of the body, or all."""
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.server.n_sent += len(body[:n])  # before the client can be done
        self.wfile.write(body[:n])

    def log_message(self, *_):
        pass


def good(to, n=None, shift=0):
    """All that is asked for; or the first n bytes of it, then the connection breaks off."""
    content = to.server.content
    asked = to.headers["Range"]
    start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
    if start and start >= len(content):
        return to.send_error(416)
    headers = {"Content-Length": len(content) - start}
    if asked:
        headers["Content-Range"] = f"bytes {start + shift}-{len(content) - 1}/{len(content)}"
    to.send(206 if asked else 200, content[start:], headers, n)


def breaks_off_after(n):
    return lambda to: good(to, n)


def another_range(to):
    good(to, shift=1)


def ignores_range(to):
    to.send(200, to.server.content, {"Content-Length": len(to.server.content)})


def wrong_bytes(to):
    to.send(200, to.server.content[::-1], {"Content-Length": len(to.server.content)})


def no_length(to):
    to.send(200, to.server.content)


def bad_length(to):
    to.send(200, to.server.content, {"Content-Length": "many"})


def status(code):
    return lambda to: to.send_error(code)


def redirects_to_itself(to):
    to.send(302, b"", {"Location": to.path, "Content-Length": 0})


def hangs_up(to):
    to.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "BLOCK", 1000)
    monkeypatch.setenv("no_proxy", "*")
    with Site() as site:
        site.target = tmp_path / "models" / "tiny.pt"
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        site.shutdown()
        thread.join()
    assert not site.wrong_targets
    assert not site.is_wrong()


@pytest.fixture
def part(site):
    """The file in which a download waits to be whole."""
    site.target.parent.mkdir()
    return site.target.with_name("tiny.pt.part")


@pytest.mark.parametrize(
    ("replies", "ranges"),
    [
        pytest.param([], [None], id="at once"),
        pytest.param([no_length], [None], id="of unknown length"),
        pytest.param([bad_length], [None], id="of nonsensical length"),
        pytest.param(
            [breaks_off_after(20_000), breaks_off_after(10_000)],
            [None, "bytes=20000-", "bytes=30000-"],
            id="broken off twice",
        ),
        pytest.param(
            [breaks_off_after(2000)] * 24,
            [None, *(f"bytes={n}-" for n in range(2000, 50_000, 2000))],
            id="broken off often",
        ),
        pytest.param(
            [breaks_off_after(20_000), ignores_range],
            [None, "bytes=20000-"],
            id="broken off, Range ignored",
        ),
        pytest.param(
            [breaks_off_after(20_000), another_range],
            [None, "bytes=20000-", "bytes=20000-"],
            id="broken off, another range sent",
        ),
        pytest.param([status(500), status(503), status(500)], [None] * 4, id="server error"),
        pytest.param([hangs_up, hangs_up], [None] * 3, id="hung up"),
    ],
)
def test_a_file_arrives_whole(site, replies, ranges):
    site.replies = list(replies)
    assert site.fetch() == site.target
    assert site.target.read_bytes() == CONTENT
    assert site.ranges == ranges
    assert not site.target.with_name("tiny.pt.part").exists()


def test_after_a_break_only_the_rest_is_sent(site):
    site.replies = [breaks_off_after(20_000)]
    site.fetch()
    assert site.n_sent == len(CONTENT)


def test_a_file_that_is_here_is_not_fetched_again(site):
    site.fetch()
    assert site.fetch().read_bytes() == CONTENT
    assert site.ranges == [None]


def test_progress_grows_to_the_whole(site):
    seen = []
    site.replies = [breaks_off_after(20_000)]
    site.fetch(lambda here, total: seen.append((here, total)))
    assert seen == sorted(set(seen))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert {total for _, total in seen} == {len(CONTENT)}


def test_progress_of_unknown_length_has_no_total(site):
    seen = []
    site.replies = [no_length]
    site.fetch(lambda here, total: seen.append((here, total)))
    assert seen[-1] == (len(CONTENT), None)


def test_an_interrupted_download_is_resumed_by_the_next_call(site):
    def interrupt(here, total):
        assert not site.target.exists()
        if here == 30_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        site.fetch(interrupt)
    assert not site.target.exists()
    assert site.fetch().read_bytes() == CONTENT
    assert site.ranges == [None, "bytes=30000-"]


def test_a_half_target_of_openai_whisper_is_resumed(site, part):
    site.target.write_bytes(CONTENT[:10_000])
    assert site.fetch().read_bytes() == CONTENT
    assert site.ranges == ["bytes=10000-"]


@pytest.mark.parametrize(("in_target", "in_part"), [(10_000, 30_000), (30_000, 10_000)])
def test_of_a_half_target_and_a_part_the_longer_is_resumed(site, part, in_target, in_part):
    site.target.write_bytes(CONTENT[:in_target])
    part.write_bytes(CONTENT[:in_part])
    assert site.fetch().read_bytes() == CONTENT
    assert site.ranges == ["bytes=30000-"]


@pytest.mark.parametrize("place", ["target", "part"])
def test_a_half_file_survives_a_failing_download_but_not_as_target(site, part, place):
    (part if place == "part" else site.target).write_bytes(CONTENT[:10_000])
    site.replies = [status(500)] * download.ATTEMPTS
    assert "HTTP 500" in site.refusal()
    assert part.read_bytes() == CONTENT[:10_000]


@pytest.mark.parametrize(
    ("old", "ranges"),
    [
        (b"x" * 10_000, ["bytes=10000-", None]),
        (b"x" * len(CONTENT), ["bytes=50000-", None]),
        (CONTENT + b"x", ["bytes=50001-", None]),
        (b"", [None]),
        (CONTENT, ["bytes=50000-"]),
    ],
    ids=["wrong", "wrong, full length", "too long", "empty", "whole"],
)
def test_an_old_part_is_completed_or_replaced(site, part, old, ranges):
    part.write_bytes(old)
    assert site.fetch().read_bytes() == CONTENT
    assert site.ranges == ranges
    assert not part.exists()


def test_wrong_bytes_are_refused_and_not_kept(site):
    site.replies = [wrong_bytes]
    line = site.refusal()
    assert f"wrong content, got sha256 {hashlib.sha256(CONTENT[::-1]).hexdigest()[:16]}" in line
    assert site.sha256[:16] in line
    assert not site.target.with_name("tiny.pt.part").exists()
    assert site.fetch().read_bytes() == CONTENT


def test_a_file_of_unknown_length_that_breaks_off_is_refused(site):
    site.replies = [lambda to: to.send(200, CONTENT, n=20_000)]
    assert "wrong content" in site.refusal()


@pytest.mark.parametrize(
    ("reply", "words", "n_requests"),
    [
        (status(404), "HTTP 404 Not Found", 1),
        (status(403), "HTTP 403 Forbidden", 1),
        (status(416), "HTTP 416", 1),
        (status(503), "HTTP 503 Service Unavailable", download.ATTEMPTS),
        (breaks_off_after(0), "the connection broke off", download.ATTEMPTS),
        (hangs_up, "closed connection", download.ATTEMPTS),
        (redirects_to_itself, "HTTP 302", None),
    ],
)
def test_a_server_that_does_not_serve_is_reported(site, reply, words, n_requests):
    site.replies = [reply] * 100
    assert words in site.refusal()
    assert n_requests in (None, len(site.ranges))


def test_a_server_that_is_away_is_reported(tmp_path):
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/tiny.pt"
        with pytest.raises(CheckpointError) as caught:
            download.fetch(url, tmp_path / "tiny.pt", "0" * 64)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert url in line
    assert "Connection refused" in line
    assert str(tmp_path) in line
    assert not (tmp_path / "tiny.pt").exists()


def test_a_place_that_cannot_hold_the_file_is_reported(site, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "tiny.pt").mkdir(parents=True)
    for target in (tmp_path / "file" / "tiny.pt", tmp_path / "folder" / "tiny.pt"):
        with pytest.raises(CheckpointError, match=r"^\S+tiny.pt: expected .*, got .*$") as caught:
            download.fetch(site.url, target, site.sha256)
        assert "\n" not in str(caught.value)
    assert site.ranges == []


@pytest.mark.parametrize("n_here", [0, 10_000])
def test_many_at_once_get_the_file_of_one_download(site, part, n_here):
    if n_here:
        site.target.write_bytes(CONTENT[:n_here])
    with ThreadPoolExecutor(4) as pool:
        fetched = [pool.submit(site.fetch) for _ in range(4)]
    assert {file.result().read_bytes() for file in fetched} == {CONTENT}
    assert len(site.ranges) == 1


# ---- by official name


@pytest.fixture
def official(site, tmp_path, monkeypatch):
    """The site serves a narrow random "tiny", in the official place of it."""
    dims = registry.dimensions("tiny") | {"n_audio_state": 12, "n_text_state": 12, "n_vocab": 99}
    torch.manual_seed(0)
    model = Whisper(ModelDimensions.of(dims))
    file = tmp_path / "made.pt"
    torch.save({"dims": dims, "model_state_dict": model.state_dict()}, file)
    site.content = file.read_bytes()
    monkeypatch.setattr(registry, "url", lambda name: site.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # rich takes them for a terminal
        monkeypatch.delenv(name, raising=False)
    site.target = tmp_path / "cache" / "whisper" / "tiny.pt"
    return model


def test_an_official_name_is_downloaded_once_and_loaded(site, official, capsys):
    for _ in range(2):
        model = checkpoints.load_model("tiny", device="cpu")
        for name, weight in official.state_dict().items():
            assert torch.equal(model.state_dict()[name], weight)
        assert model.alignment_heads == registry.alignment_heads("tiny")
    assert site.ranges == [None]
    assert site.target.read_bytes() == site.content
    assert capsys.readouterr() == ("", "")  # no bar where there is no terminal


def test_an_official_name_goes_to_download_root(site, official, tmp_path):
    site.target = tmp_path / "root" / "tiny.pt"
    checkpoints.load_model("tiny", download_root=str(tmp_path / "root"))
    assert site.target.read_bytes() == site.content
    assert not (tmp_path / "cache").exists()


def test_a_terminal_shows_the_name_and_the_size_on_standard_error(
    site, official, monkeypatch, capsys
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    checkpoints.load_model("tiny")
    shown = capsys.readouterr()
    assert "tiny" in shown.err
    assert "kB" in shown.err
    assert shown.out == ""


def test_the_bar_of_an_official_download_grows(site, official, monkeypatch):
    seen = []
    shown = nullcontext(lambda here, total: seen.append((here, total)))
    monkeypatch.setattr(checkpoints, "_progress_bar", lambda name: shown)
    site.replies = [breaks_off_after(9000)]
    checkpoints.load_model("tiny")
    assert len(seen) > 20
    assert seen == sorted(set(seen))
    assert seen[-1] == (len(site.content), len(site.content))


def test_wrong_bytes_under_an_official_name_are_not_loaded(site, official):
    site.replies = [wrong_bytes]
    with pytest.raises(CheckpointError, match="wrong content"):
        checkpoints.load_model("tiny")
    assert not site.target.exists()
