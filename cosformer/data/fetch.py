"""One file over HTTP: resumed where an earlier attempt stopped, never half at its final name."""

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there and the bytes in all, if the server tells."""
CHUNK = 1 << 20
SECONDS = 30.0
"""A server that says nothing for so long is taken for gone."""


class Unreachable(OSError):
    """There is no network, or no such file."""


class Interrupted(OSError):
    """The connection ended before the file did; what came is kept for the next attempt."""


def fetch(url: str, path: Path, progress: Progress | None = None) -> bool:
    """Download `url` to `path`; True if an unfinished download was continued.

    What has come lies beside `path` as `.NAME.partial` until all is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "cosformer"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            resumed = answer.status == 206 and _starts_at(answer, have)
            if have and answer.status == 206 and not resumed:
                partial.unlink()  # not the part that was asked for
                return fetch(url, path, progress)
            total = _total(answer, have if resumed else 0)
            _receive(answer, partial, have if resumed else 0, total, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # more than the server has: of another version
            partial.unlink()
            return fetch(url, path, progress)
        raise Unreachable(f"{url} was refused: {error.code} {error.reason}") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"{url} cannot be reached: {reason}") from None
    os.replace(partial, path)
    return resumed


def _receive(
    answer: http.client.HTTPResponse,
    partial: Path,
    have: int,
    total: int | None,
    progress: Progress | None,
) -> None:
    is_cut_off = False
    with partial.open("ab" if have else "wb") as file:
        try:
            while chunk := answer.read(CHUNK):
                have += file.write(chunk)
                if progress is not None:
                    progress(have, total)
        except http.client.IncompleteRead as error:  # whether the server tells a total or not
            have += file.write(error.partial)
            is_cut_off = True
        file.flush()
        os.fsync(file.fileno())
    if is_cut_off or total not in (None, have):
        of = "" if total is None else f" of {total:,}"
        raise Interrupted(
            f"the connection ended after {have:,}{of} bytes; the same command goes on from there"
        )


def _starts_at(answer: http.client.HTTPResponse, place: int) -> bool:
    found = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return found is not None and int(found[1]) == place


def _total(answer: http.client.HTTPResponse, have: int) -> int | None:
    length = answer.headers.get("Content-Length")
    return None if length is None else have + int(length)
