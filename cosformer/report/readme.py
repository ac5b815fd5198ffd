"""`cosformer report`: measured rows into the tables of README.md and docs/, figures and a page."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cosformer import records
from cosformer.check import check_folder, check_new_file, check_new_folder
from cosformer.records import Row
from cosformer.report.figures import time_vs_length, token_time_vs_length
from cosformer.report.generation import generation_figure
from cosformer.report.mechanisms import mechanism_figure
from cosformer.report.page import page
from cosformer.report.reproduce import REPRODUCED
from cosformer.report.selection import renamed
from cosformer.report.study import study_figure
from cosformer.report.tables import TABLES
from cosformer.report.writing import write_whole

OPEN = re.compile(r"<!-- rows:(?P<name>\S*) -->\n")
CLOSE = "<!-- /rows -->"
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LAID_OUT = {
    "reproduced", "classifier", "study", "probes", "mechanisms", "training", "generation", "tokens",
}  # fmt: skip
"""Tables that the page lays out itself; it shows the others as the marked files have them."""

FIGURES: dict[str, tuple[str, Callable[[Sequence[Row], str], bytes]]] = {
    "time_vs_length.svg": ("ops-cpu", time_vs_length),
    "time_vs_length_cuda.svg": ("ops-cuda", token_time_vs_length),
    "mechanisms.svg": ("mechanisms-cpu", mechanism_figure),
    "mechanisms_cuda.svg": ("mechanisms-cuda", mechanism_figure),
    "generation_cuda.svg": ("generation-cuda", generation_figure),
    "study_lm.svg": ("study-lm", study_figure),
    "study_lm_16k.svg": ("study-lm", partial(study_figure, scale="16k")),
    "study_lm_base.svg": ("study-lm", partial(study_figure, scale="base")),
    "study_mlm.svg": ("study-mlm", study_figure),
}
"""File in docs/ -> the rows that it is drawn from, and the function that draws it."""
OPTIONAL = {
    "ops-cuda", "data-cpu", "learning-cuda", "study-lm", "study-mlm", "study-probes",
    *(f"{name}-{device}" for name in ("mechanisms", "training", "generation", "conversion")
      for device in ("cpu", "cuda")),
    *(f"reproduce-{name}" for name in (*REPRODUCED, "speed")),
}  # fmt: skip
"""Rows that not every machine can measure. Without them a block is empty and no figure drawn."""

README = Path("README.md")


@dataclass(frozen=True)
class Options:
    """Rewrite the tables of README.md and the figures of docs/ from measured rows, and write a page
    with all of them to look at: tables, curves, maps, and the rows behind every number."""

    results: Path = Path("results")
    """Folder of the rows, *.jsonl."""
    readme: Path = README
    """File whose blocks from <!-- rows:FILE/TABLE --> to <!-- /rows --> are made anew."""
    figures: Path = Path("docs")
    """Folder the figures are written to; blocks in its pages (*.md) are made anew, too. Where
    neither has such blocks, the page alone is written."""
    page: Path = Path("out/report.html")
    """The page that is written: all rows in one HTML file, which needs nothing else."""

    def __post_init__(self) -> None:
        check_folder("results", self.results)
        if self.readme != README and not self.readme.is_file():
            raise ValueError(f"readme must be a file, got {self.readme}")
        check_new_folder("figures", self.figures)
        check_new_file("page", self.page)


def run(options: Options) -> int:
    """Make everything first, write afterwards: an error leaves all files as they were."""
    rows = {path.stem: records.read(path) for path in sorted(options.results.glob("*.jsonl"))}
    texts = [options.readme] if options.readme.is_file() else []
    texts += sorted(options.figures.glob("*.md"))
    marked = {path: text for path in texts if OPEN.search(text := path.read_text("utf-8"))}
    made = {path: renew(text, rows).encode() for path, text in marked.items()}
    for name, (source, draw) in FIGURES.items():
        if not marked or _is_left_out(source, rows):
            continue
        path = options.figures / name
        made[path] = draw(_rows_of(source, rows), path.suffix[1:])
    sources = {name: _rows_of(name, rows) for name in rows if rows[name]}
    made[options.page] = page(sources, _further(marked.values(), rows)).encode()
    for path, content in made.items():
        print(f"{path}: {'written' if write_whole(path, content) else 'unchanged'}")
    return 0


def renew(text: str, rows: dict[str, list[Row]]) -> str:
    """The text with every marked block made anew; what lies outside the marks stays as it is."""
    parts, end = [], 0
    while mark := OPEN.search(text, end):
        close = text.find(CLOSE, mark.end())
        following = OPEN.search(text, mark.end())
        if close < 0 or (following and following.start() < close):
            raise ValueError(
                f"block {mark['name']!r} must be closed by {CLOSE}, found no such line"
            )
        made = table(mark["name"], rows)
        parts += [text[end : mark.end()], made, "\n" if made else ""]
        end = close
    return "".join(parts) + text[end:]


def table(name: str, rows: dict[str, list[Row]]) -> str:
    """The table `FILE/TABLE`: rows of results/FILE.jsonl, shaped by TABLES[TABLE].

    `FILE+FILE/TABLE` takes the rows of both files. Empty for rows that may be missing and are.
    """
    files, _, shape = name.partition("/")
    if shape not in TABLES:
        known = ", ".join(TABLES)
        raise ValueError(f"rows:{name} must be rows:FILE/TABLE with TABLE among {known}")
    sources = [source for source in files.split("+") if not _is_left_out(source, rows)]
    found = [row for source in sources for row in _rows_of(source, rows)]
    return TABLES[shape](found) if sources else ""


def _further(texts: Iterable[str], rows: dict[str, list[Row]]) -> dict[str, list[str]]:
    """Heading -> the tables below it that the page does not lay out itself."""
    found: dict[str, list[str]] = {}
    for text in texts:
        for mark in OPEN.finditer(text):
            if mark["name"].partition("/")[2] in LAID_OUT:
                continue
            if made := table(mark["name"], rows):
                *_, heading = ["", *HEADING.findall(text[: mark.start()])]
                found.setdefault(heading, []).append(made)
    return found


def _is_left_out(source: str, rows: dict[str, list[Row]]) -> bool:
    return source in OPTIONAL and not rows.get(source)


def _rows_of(source: str, rows: dict[str, list[Row]]) -> list[Row]:
    if not rows.get(source):
        known = ", ".join(name for name in rows if rows[name]) or "none"
        raise ValueError(f"no rows named {source!r} in the results folder; there are: {known}")
    return [renamed(row) for row in rows[source]]
