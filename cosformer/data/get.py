"""`cosformer data get NAME …`: download published data sets, verified, in the form tasks read."""

import hashlib
import lzma
import sys
from dataclasses import dataclass
from pathlib import Path

from cosformer.check import check_new_folder
from cosformer.data import fetch
from cosformer.data.known import CONTENTS, SETS, SOURCES, Source, require_known
from cosformer.tasks import files

POSITIONAL = "names"
WORDS = {"names": SOURCES}


@dataclass(frozen=True)
class Options:
    """Download data sets, check them and put them where tasks look for them.

    cosformer data get wikitext2 imdb
    """

    names: tuple[str, ...] = ()
    """Data sets; cosformer data list shows them."""
    data: Path | None = None
    """Folder for the files; COSFORMER_DATA, else one in the user's cache, if not given."""
    mirror: str | None = None
    """Address of a folder that has the published files, instead of where they were published."""
    force: bool = False
    """Download again what is already there."""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(f"names must be one or more of {', '.join(SOURCES)}, got none")
        require_known(self.names)
        for name in self.names:
            if name not in SOURCES:
                raise ValueError(
                    f"names must be of data sets with a published source ({', '.join(SOURCES)}), "
                    f"got {name!r}: put {' and '.join(SETS[name][0])} into the data folder "
                    f"yourself, or train on a table of your own"
                )


def run(options: Options) -> int:
    """Fetch one set after the other; an error leaves those before it in place."""
    where = check_new_folder("data", files.folder(options.data))
    for name in options.names:
        for source in SOURCES[name]:
            missing = [f for f in source.files if options.force or not (where / f).exists()]
            if not missing:
                print(f"{name}: {', '.join(source.files)} already there")
                continue
            get(source, where, missing, options.mirror)
            print(f"{name}: {', '.join(missing)} written to {where}")
    return 0


def get(source: Source, where: Path, wanted: list[str], mirror: str | None = None) -> None:
    """Download, verify, convert and write the wanted files of one source."""
    file_name = source.url.rsplit("/", 1)[1]
    url = source.url if mirror is None else f"{mirror.rstrip('/')}/{file_name}"
    # a name of its own: three sets have a file train.txt
    download = where / "downloads" / f"{Path(source.files[0]).name.split('.')[0]}-{file_name}"
    try:
        resumed = fetch.fetch(url, download, _show)
        try:
            contents = _converted(source, download, wanted)
        except ValueError:
            if not resumed:
                raise
            # the two halves may be of different versions: once more from the beginning
            download.unlink()
            fetch.fetch(url, download, _show)
            contents = _converted(source, download, wanted)
    except fetch.Interrupted as error:
        raise OSError(f"{url}: {error}") from None
    except fetch.Unreachable as error:
        raise OSError(
            f"{error}. Without a network: download {source.url} elsewhere, serve its folder, "
            f"as by python -m http.server, and give its address as --mirror; or copy "
            f"{', '.join(source.files)} from a machine that has them into {where}"
        ) from None
    finally:
        download.unlink(missing_ok=True)
        if download.parent.is_dir() and not any(download.parent.iterdir()):
            download.parent.rmdir()
    for name, content in contents.items():
        with files.replacing(where / name) as file:
            file.write(lzma.compress(content) if name.endswith(".xz") else content)


def _converted(source: Source, download: Path, wanted: list[str]) -> dict[str, bytes]:
    """What the files are to hold, found to be what it should be."""
    if source.md5 is not None:
        with download.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != source.md5:
            raise ValueError(f"{source.url} must have the md5 {source.md5}, got {found}")
    contents = {name: source.convert(download, name) for name in wanted}
    for name, content in contents.items():
        if (
            name in CONTENTS
            and (found := hashlib.sha256(content).hexdigest()) != CONTENTS[name].sha256
        ):
            raise ValueError(
                f"{source.url} must give {name} the sha256 {CONTENTS[name].sha256}, got {found}; "
                f"nothing is written"
            )
    return contents


def _show(have: int, total: int | None) -> None:
    if sys.stderr.isatty():
        whole = "" if total is None else f" of {total / 1e6:,.1f}"
        print(f"\r  {have / 1e6:,.1f}{whole} MB", end="", file=sys.stderr)
        if have == total:
            print(file=sys.stderr)
