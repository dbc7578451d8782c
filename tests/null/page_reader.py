"""A page read back, for who asks what is in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

__all__ = ["Page"]

VOID = {"meta", "br"}


class Page(HTMLParser):
    """A page read back: its tags, its text, its tables; complains about tags that are not closed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.headings: list[str] = []
        self.rows: list[list[str]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag in ("h1", "h2"):
            self.headings.append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts[-1] += data
            return
        if "style" in self.open:
            return
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] in ("h1", "h2"):
            self.headings[-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])

    def row(self, *start: str) -> list[str]:
        """The first row that begins so."""
        return next(row for row in self.rows if row[: len(start)] == list(start))
