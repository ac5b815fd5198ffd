"""`cosformer data get` against a server on this machine: whole, verified files or none."""

import gzip
import hashlib
import io
import lzma
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from cosformer.data import convert, fetch, known
from cosformer.data.known import Content, Source
from cosformer.tasks import files

PUBLISHED = dict(known.SOURCES)
"""As they are without the server below."""
TEXT = "".join(f"line {n}\n" for n in range(5000)).encode()


class Server(ThreadingHTTPServer):
    """Serves `content` at every path; what it was asked for is in `asked`."""

    content, with_ranges = TEXT, True
    cut_after = None
    """Break off each answer after so many bytes."""
    is_chunked = False
    """Whether the length of an answer is not told before."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.url = [], f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        content, missing = self.server.content, "missing" in self.path
        start = int(asked[len("bytes=") : -1]) if asked and self.server.with_ranges else 0
        if missing or start >= len(content):
            return self.send_error(404 if missing else 416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.server.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            return self.send_chunks(content[start:])
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = None if self.server.cut_after is None else start + self.server.cut_after
        self.wfile.write(content[start:end])
        self.close_connection = True
        return None

    def send_chunks(self, content):
        """Pieces of 500 bytes; one that is cut off has no end."""
        for at in range(0, len(content), 500):
            piece = content[at : at + 500]
            self.wfile.write(b"%x\r\n%b" % (len(piece), piece))
            if at + 500 == self.server.cut_after:
                break
            self.wfile.write(b"\r\n")
        else:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *_):
        """No lines on stderr."""


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def small(server, monkeypatch):
    """The set tinyshakespeare is TEXT, and comes from the server."""
    source = Source(f"{server.url}/data/input.txt", ("tinyshakespeare.txt.xz",))
    monkeypatch.setitem(known.SOURCES, "tinyshakespeare", (source,))
    content = Content(hashlib.sha256(TEXT).hexdigest(), TEXT.count(b"\n"))
    monkeypatch.setitem(known.CONTENTS, "tinyshakespeare.txt.xz", content)


GET = ("data", "get", "tinyshakespeare", "--data")


def there(tmp_path):
    return sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))


def assert_whole(tmp_path):
    """The text is there, and nothing else."""
    assert there(tmp_path) == ["tinyshakespeare.txt.xz"]
    assert lzma.decompress((tmp_path / "tinyshakespeare.txt.xz").read_bytes()) == TEXT


def test_a_set_is_fetched_once_and_can_be_checked(tmp_path, server, shell):
    shell.shows(*GET, tmp_path)
    assert_whole(tmp_path)
    assert "already there" in shell.shows(*GET, tmp_path)
    assert server.asked == [None]
    shell.shows(*GET, tmp_path, "--force")
    assert server.asked == [None, None]
    assert "5,000 lines" in shell.shows("data", "check", "--data", tmp_path)


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path, server, shell):
    server.cut_after = 1000
    assert f"after 1,000 of {len(TEXT):,} bytes" in shell.refuses(*GET, tmp_path)
    assert not (tmp_path / "tinyshakespeare.txt.xz").exists()
    server.cut_after = None
    shell.shows(*GET, tmp_path)
    assert server.asked == [None, "bytes=1000-"]
    assert_whole(tmp_path)


def test_what_ends_too_early_is_no_whole_file_though_its_length_was_not_told(
    tmp_path, server, shell
):
    server.is_chunked, server.cut_after = True, 1000
    assert "after 1,000 bytes" in shell.refuses(*GET, tmp_path)
    server.cut_after = None
    shell.shows(*GET, tmp_path)
    assert server.asked == [None, "bytes=1000-"]
    assert_whole(tmp_path)


@pytest.mark.parametrize("what", ["no ranges", "too much", "other version"])
def test_what_cannot_be_continued_starts_anew(tmp_path, server, what, shell):
    partial = tmp_path / "downloads" / ".tinyshakespeare-input.txt.partial"
    partial.parent.mkdir()
    partial.write_bytes(b"x" * (len(TEXT) + 5 if what == "too much" else 1000))
    server.with_ranges = what != "no ranges"
    shell.shows(*GET, tmp_path)
    assert_whole(tmp_path)


def test_a_wrong_checksum_leaves_nothing(tmp_path, server, shell):
    server.content = TEXT.replace(b"line 7\n", b"line 8\n")
    assert "must give tinyshakespeare.txt.xz the sha256" in shell.refuses(*GET, tmp_path)
    assert there(tmp_path) == []


def test_without_a_network_the_way_out_is_told(tmp_path, server, shell):
    message = shell.refuses(*GET, tmp_path, "--mirror", "http://127.0.0.1:1")
    for part in ("cannot be reached", "--mirror", "copy tinyshakespeare.txt.xz", str(tmp_path)):
        assert part in message
    elsewhere = (tmp_path, "--mirror", f"{server.url}/missing")
    assert "was refused: 404" in shell.refuses(*GET, *elsewhere)
    assert there(tmp_path) == []
    shell.shows(*GET, tmp_path, "--mirror", f"{server.url}/elsewhere/")


def test_every_source_is_encrypted_on_its_way_and_makes_files_that_tasks_read():
    assert PUBLISHED.keys() == set(files.FETCHED)
    for name, sources in PUBLISHED.items():
        made = [file for source in sources for file in source.files]
        assert sorted(made) == sorted(known.SETS[name][0])
        for source in sources:
            assert source.url.startswith("https://")
            assert source.md5 or all(file in known.CONTENTS for file in source.files)


def _tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_reviews_become_a_table(tmp_path):
    members = {"train/neg/0_3.txt": b"bad", "train/pos/10_9.txt": b"tabs\tgo", "README": b"x"}
    members |= {"train/pos/2_7.txt": "gréat".encode(), "train/unsup/0_0.txt": b"no label"}
    members |= {"test/pos/0_8.txt": b"other split"}
    members = {f"aclImdb/{name}": content for name, content in members.items()}
    found = convert.reviews(_tar(tmp_path / "x.tar.gz", members), "imdb_train.tsv.xz").decode()
    assert found == "label\trating\tid\ttext\n1\t7\t2\tgréat\n1\t9\t10\ttabs go\n0\t3\t0\tbad\n"


def test_colour_pictures_become_grey_ones(tmp_path):
    records = np.random.default_rng(0).integers(0, 10, (12, 1 + 3 * 1024), np.uint8)
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    members = {f"cifar/{n}": records[2 * i : 2 * i + 2].tobytes() for i, n in enumerate(names)}
    path = _tar(tmp_path / "x.tar.gz", members)
    with np.load(io.BytesIO(convert.grey_pictures(path, "cifar10_gray.npz"))) as found:
        assert found["x_train"].shape == (10, 32, 32)
        assert found["y_test"].tolist() == records[10:, 0].tolist()
        red, green, blue = records[3, 1:].reshape(3, 32, 32)[:, 5, 6].tolist()
        assert found["x_train"][3, 5, 6] == round(0.299 * red + 0.587 * green + 0.114 * blue)
    short = {**members, "cifar/test_batch.bin": b"short"}
    wrong = {"must hold data_batch_1.bin": {"a": b""}, "in y.tar.gz must have 3073 bytes": short}
    for message, members in wrong.items():
        with pytest.raises(ValueError, match=message):
            convert.grey_pictures(_tar(tmp_path / "y.tar.gz", members), "")
    path.write_bytes(gzip.compress(b"no tar"))
    with pytest.raises(ValueError, match="must be a whole tar"):
        convert.grey_pictures(path, "")


MALFORMED = {
    "pos/best.txt": "must have reviews as 12_7.txt, got 'aclImdb/train/pos/best",
    "neg/1_.txt": "must have reviews as 12_7.txt, got 'aclImdb/train/neg/1_",
    "pos/1_9.txt": "'aclImdb/train/pos/1_9.txt' in x.tar.gz must be UTF-8",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_member_is_named(tmp_path, name):
    path = _tar(tmp_path / "x.tar.gz", {f"aclImdb/train/{name}": b"\xff"})
    with pytest.raises(ValueError, match=MALFORMED[name]):
        convert.reviews(path, "imdb_train.tsv.xz")


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "LIMIT", 10**6)
    members = {f"aclImdb/train/unsup/{n}_0.txt": b"x" * 600_000 for n in range(2)}
    with pytest.raises(ValueError, match=r"x.tar.gz must unpack to .* 1,000,000 .* got 1,200,000"):
        convert.reviews(_tar(tmp_path / "x.tar.gz", members), "imdb_train.tsv.xz")


def test_a_member_up_to_a_size_is_taken_out_of_a_zip(tmp_path, monkeypatch):
    path, content = tmp_path / "x.zip", b"x" * 10**7
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", content)
    assert convert.member_of_zip(path, "enwik8.xz") == content
    with pytest.raises(ValueError, match="must be a zip with other"):
        convert.member_of_zip(path, "other.xz")
    monkeypatch.setattr(convert, "LIMIT", 10**6)
    with pytest.raises(ValueError, match=r"x.zip must unpack to .* 1,000,000 .* got 1,000,001"):
        convert.member_of_zip(path, "enwik8.xz")


def test_a_download_has_its_final_name_only_when_whole(tmp_path, server):
    seen = []
    fetch.fetch(f"{server.url}/x", tmp_path / "x", lambda *_: seen.append(there(tmp_path)))
    assert seen == [[".x.partial"]]
    assert there(tmp_path) == ["x"]
