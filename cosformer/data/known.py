"""The files that tasks read: what must be in them, and where the published ones come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cosformer.data import convert
from cosformer.tasks import arena, files, tables, text

PYTORCH = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data"


@dataclass(frozen=True)
class Content:
    """What an unpacked file holds."""

    sha256: str
    lines: int


_CONTENTS = """
c20b61b9688e5fe7d802031496273dd31097fd16e5621ee185e079247d006b9a    1587 aan_docs_4k.jsonl.xz
9da823c2e612e06c415caa87574cf817ea8c8ef26993c893fc0393f43d2ec755    5569 aan_pairs.tsv.xz
2275f0c515a2693025b2f2ad432422b11f22208e89c8ce0d6712eb823c384896   12601 amazon_stars_13k.tsv.xz
5e045a453681825a4d79b24c5e9a27e97bbf937d5f755e5121ba584df02fe06e    9595 cola.tsv.xz
2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8 1128023 enwik8.xz
9f3325d19604b670143277cd0656e95d5c4f3d08e6cb8879fc908068965a1803   25001 imdb_test.tsv.xz
8ac0ec7f89100cc93ca69851b63d79497958114e46cca132267eb8fab28ada58   25001 imdb_train.tsv.xz
4daf3449934483b197e16c410de39361d07d73b86ef3550664914a9b73a94f82   20001 mnli_20k.tsv.xz
aaeb1948aad3f5b9dacfe37efbfeab565fa090c8a7a223a72262f208984b3d24    5802 mrpc.tsv.xz
1020f7d893261ab65c4896f287553cfb2acc0003e668925db241aff323a372f2    9601 qqp_10k.tsv.xz
0cdb656baff42b6a3a2c63e52dc798171ef9e0b15581f83521f385e9f8149845    2768 rte.tsv.xz
2c49896572c792da3d71617ed6591491dc86145695ba89c376230d5d90a510b9  109715 snli_100k.tsv.xz
e957764d70fae32fdb4c57afa828c84848db10f3a17d9ad0045fb8ded08f93b8   70043 sst2.tsv.xz
86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed   40000 tinyshakespeare.txt.xz
d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0    4358 wikitext2_test.txt.xz
9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f   36718 wikitext2_train.txt.xz
f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8    3760 wikitext2_valid.txt.xz
"""
CONTENTS: dict[str, Content] = {
    name: Content(sha256, int(lines))
    for sha256, lines, name in map(str.split, _CONTENTS.strip().splitlines())
}
"""File -> its content. Packers differ, so that what counts is what is in it."""


@dataclass(frozen=True)
class Source:
    """A published file, and the files that we make of it."""

    url: str
    files: tuple[str, ...]
    convert: Callable[[Path, str], bytes] = convert.as_it_is
    """From the download and the name of one of `files` to what this is to hold."""
    md5: str | None = None
    """MD5 of the download, where the checksum of its content is not known."""


SOURCES: dict[str, tuple[Source, ...]] = {
    "wikitext2": tuple(
        Source(f"{PYTORCH}/wikitext-2/{split}.txt", (f"wikitext2_{split}.txt.xz",))
        for split in ("train", "valid", "test")
    ),
    "tinyshakespeare": (
        Source(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            ("tinyshakespeare.txt.xz",),
        ),
    ),
    "enwik8": (
        Source("https://mattmahoney.net/dc/enwik8.zip", ("enwik8.xz",), convert.member_of_zip),
    ),
    "imdb": (
        Source(
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            ("imdb_train.tsv.xz", "imdb_test.tsv.xz"),
            convert.reviews,
        ),
    ),
    "image": (
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            (arena.PICTURES,),
            convert.grey_pictures,
            md5="c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
}
"""Data set -> what is downloaded for it."""


def _sets() -> dict[str, tuple[tuple[str, ...], str]]:
    found = {name: (tuple(files.values()), line) for name, (files, line) in text.TEXTS.items()}
    found |= {name: (tuple(s.files.values()), s.summary) for name, s in tables.KNOWN.items()}
    found["retrieval"] = ((arena.PAIRS, arena.DOCUMENTS), "does one paper cite another")
    found["image"] = ((arena.PICTURES,), "CIFAR-10 in grey, 10 classes")
    return found


SETS: Mapping[str, tuple[tuple[str, ...], str]] = _sets()
"""Data set -> its files, and one line."""


def require_known(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in SETS:
            raise ValueError(f"names must be among {', '.join(SETS)}, got {name!r}")


def require_files(name: str, data: Path | str | None) -> None:
    """Raise unless the data folder has all files of a data set."""
    for file in SETS[name][0]:
        files.require(files.folder(data) / file, name)
