"""What a Markdown page is made of, as far as tests and ``scripts/docs`` ask. As GitHub reads it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

__all__ = ["Block", "anchors", "blocks", "commands", "dead_links", "links", "stale"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+).+?\1", re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what is in it, and from where to where that is in the page (characters)."""

    language: str
    body: str
    start: int
    end: int


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for found in _FENCE.finditer(text):
        yield Block(found[1], found[2], found.start(2), found.end(2))


def commands(text: str) -> list[str]:
    """The commands of all ``console`` blocks, without their prompt."""
    lines = (line for block in blocks(text) if block.language == "console" for line in block.body.splitlines())
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def links(text: str) -> list[str]:
    """The targets of all links and images, but for those inside of code."""
    return _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """What a link to a heading of the page can name: letters, digits, hyphens and underscores, spaces as hyphens; the
    second of two that are alike ends in -1."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"\]\([^)]*\)", "]", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dead_links(page: Path) -> list[str]:
    """The links of a page to files that are not there, or to headings that the file does not have. What begins with a
    scheme (``https:``) is not asked for."""
    text = page.read_text(encoding="utf-8")
    return [link for link in links(text) if not re.match(r"[a-z]+:", link) and not _leads(page, link)]


def stale(folder: Path, made: Mapping[Path, str]) -> list[str]:
    """The names of files of ``folder`` that are not what is ``made``, those that are missing and those too many among
    them, with the first lines in which they differ."""
    there = {path: path.read_text(encoding="utf-8") for path in folder.glob("*")}
    return [
        f"{path.name}: {_first_difference(there.get(path, ''), made.get(path, ''))}"
        for path in sorted(there | made)
        if there.get(path) != made.get(path)
    ]


def _first_difference(old: str, new: str) -> str:
    pairs = zip_longest(old.splitlines(), new.splitlines(), fillvalue="")
    return next((f"{one!r}, made {two!r}" for one, two in pairs if one != two), "they end differently")


def _leads(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    return not anchor or (target.suffix == ".md" and anchor in anchors(target.read_text(encoding="utf-8")))
