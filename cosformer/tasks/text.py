"""Text to learn from: a file, a folder, a known data set, or what comes with Python itself."""

import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from cosformer.check import check_whole
from cosformer.tasks import files
from cosformer.tasks.base import SPLITS

TEXTS: dict[str, tuple[dict[str, str], str]] = {
    "wikitext2": (
        {split: f"wikitext2_{split}.txt.xz" for split in SPLITS},
        "WikiText-2: Wikipedia articles, words between blanks",
    ),
    "enwik8": ({"": "enwik8.xz"}, "enwik8: the first 100 million bytes of Wikipedia"),
    "tinyshakespeare": ({"": "tinyshakespeare.txt.xz"}, "a million bytes of Shakespeare"),
}
"""Name -> split -> file ("": one file, cut), and one line."""
FROM_PYTHON = {
    "python": "Python's reference manual and library sources, on every machine",
    "manual": "Python's reference manual and the library's docstrings, on every machine",
}
"""Names of texts that need no file. They differ from one version of Python to another."""
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
SHARES = {"train": 0.9, "valid": 0.05, "test": 0.05}
"""How one file is cut: from its beginning, in this order."""
LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__", "dist-packages"}


def load(
    text: str, data: Path | str | None = None, held_out: int | None = None
) -> dict[str, bytes]:
    """Split -> text. `text` is a name, or the path of a file or folder.

    `held_out`: the last so many bytes of one file are both validation and test, and all before
    them is to learn from; None: a tenth of the file is held out, a half of it for each.
    """
    if held_out is not None:
        return _cut_end(_whole(text, data), held_out)
    if text in FROM_PYTHON:
        return _split_documents(_python() if text == "python" else _manual())
    if text in TEXTS:
        where = files.folder(data)
        known = TEXTS[text][0]
        for name in known.values():
            files.require(where / name, text)
        found = {split: files.read_bytes(where / name) for split, name in known.items()}
        return found if "" not in found else cut(found[""])
    path = Path(text)
    if path.is_file():
        return cut(files.read_bytes(path))
    if text and path.is_dir():
        return _folder(path)
    known_names = ", ".join([*FROM_PYTHON, *TEXTS])
    raise ValueError(
        f"text (--data) must be a file or folder, or one of {known_names}; got {text!r}, "
        f"which {'is neither' if text and path.exists() else 'does not exist'}"
    )


def cut(text: bytes) -> dict[str, bytes]:
    """A text in three parts, as those who publish numbers on such files cut it."""
    ends = [round(len(text) * share) for share in (SHARES["train"], 1 - SHARES["test"], 1)]
    parts = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    if not all(parts):
        raise ValueError(
            "text (--data) must be long enough for three parts, to train, validate and test, "
            f"got {len(text)} bytes"
        )
    return dict(zip(SHARES, parts, strict=True))


def _whole(text: str, data: Path | str | None) -> bytes:
    """A text that is one file."""
    if name := TEXTS.get(text, ({}, ""))[0].get(""):
        return files.read_bytes(files.require(files.folder(data) / name, text))
    if text in (*TEXTS, *FROM_PYTHON) or not Path(text).is_file():
        raise ValueError(f"text must be one file where held_out is given, got {text!r}")
    return files.read_bytes(Path(text))


def _cut_end(text: bytes, held_out: int) -> dict[str, bytes]:
    check_whole("held_out", held_out, 1)
    if held_out >= len(text):
        raise ValueError(f"held_out must be below the text's {len(text)} bytes, got {held_out}")
    end = text[-held_out:]
    return {"train": text[:-held_out], "valid": end, "test": end}


def _folder(path: Path) -> dict[str, bytes]:
    """Files named after the splits if there are such, else all texts below, file by file."""
    below = [
        p
        for p in sorted(path.rglob("*"))
        if files.plain_suffix(p) in TEXT_SUFFIXES and not p.is_dir()
    ]
    named = {p.name.split(".")[0]: p for p in below if p.parent == path}
    if set(SPLITS) <= named.keys():
        return {split: files.read_bytes(named[split]) for split in SPLITS}
    if not below:
        raise ValueError(
            f"text must be a folder with files of {', '.join(TEXT_SUFFIXES)}, got {path}"
        )
    return _split_documents((str(p.relative_to(path)), files.read_bytes(p)) for p in below)


def _split_documents(documents: Iterable[tuple[str, bytes]]) -> dict[str, bytes]:
    """Whole documents to splits by their name, so that a new one moves no other."""
    parts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for name, content in documents:
        number = hashlib.sha256(name.encode()).digest()[0] % 20
        parts[{0: "valid", 1: "test"}.get(number, "train")].append(content)
    found = {split: b"\n".join(contents) for split, contents in parts.items()}
    if not all(found.values()):  # too few documents for that
        return cut(b"\n".join(content for split in SPLITS for content in parts[split]))
    return found


def _python() -> Iterator[tuple[str, bytes]]:
    yield from _topics()
    for path in _library("*.py", deep=True):
        yield path.name, path.read_bytes()


def _manual() -> Iterator[tuple[str, bytes]]:
    yield from _topics()
    for path in _library("*.py", deep=False):
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        if docstrings := [each for each in found if each]:
            yield path.name, "\n\n".join(docstrings).encode()


def _topics() -> Iterator[tuple[str, bytes]]:
    from pydoc_data.topics import topics

    for name, content in sorted(topics.items()):
        yield name, content.encode()


def _library(pattern: str, *, deep: bool) -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = root.rglob(pattern) if deep else root.glob(pattern)
    return sorted(p for p in found if not LEFT_OUT & set(p.relative_to(root).parts))
