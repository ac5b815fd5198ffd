"""An HTML page as a test sees it."""

import json
from collections import Counter
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "input", "br"}
"""Elements that have no end."""


class Page(HTMLParser):
    """Counts the elements of a page; every one that needs an end must have it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: Counter[str] = Counter()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[int]] = []
        """The rows behind each number, as numbers of `data["rows"]`."""
        self.texts: list[str] = []
        self._blocks: dict[str, str] = {}
        self._block: str | None = None
        self.feed(text)

    @property
    def data(self) -> dict[str, Any]:
        """What the script draws from."""
        return json.loads(self._blocks["data"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.count[tag] += 1
        self.open += [tag] if tag not in VOID else []
        self.links += [given[name] for name in ("src", "href", "xlink:href") if given.get(name)]
        self.ids += [given["id"]] if "id" in given else []
        if "data-rows" in given:
            self.rows.append([int(number) for number in given["data-rows"].split()])
        self._block = given.get("id", "") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._block = None

    def handle_data(self, data: str) -> None:
        if self._block is None:
            self.texts.append(data)
        else:
            self._blocks[self._block] = data
