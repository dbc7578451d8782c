"""Pieces of a page: every text is escaped, and the page asks for nothing that is not in it. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

__all__ = ["Fact", "bullet_list", "chart", "facts", "folded", "page", "section", "table"]


@dataclass(frozen=True)
class Fact:
    """One figure at the top of a page: its name, the figure, and a remark in small print."""

    name: str
    value: str
    remark: str = ""


def facts(all_of_them: Iterable[Fact]) -> str:
    """Figures side by side."""
    cells = (
        f"<div><dt>{escape(one.name)}</dt><dd>{escape(one.value)}"
        + (f"<small>{escape(one.remark)}</small>" if one.remark else "")
        + "</dd></div>"
        for one in all_of_them
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def bullet_list(sentences: Iterable[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """A table whose first column has names and the others figures, or ``words``. It scrolls where it is too wide."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    kind = ' class="words"' if words else ""
    # Focus lets the arrow keys scroll it.
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table{kind}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def section(title: str, *parts: str) -> str:
    """A headed part of the page."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def folded(summary: str, inside: str) -> str:
    """``inside``, shown when somebody asks."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def chart(name: str, caption: str) -> str:
    """The place of a chart: the script finds it by ``name``."""
    return f'<figure><div id="{escape(name)}"></div><figcaption class="soft">{escape(caption)}</figcaption></figure>'


def page(title: str, body: str, data: Any, scripts: Sequence[str]) -> str:
    """A whole page: ``data`` for its ``scripts``, which are files of ``assets``, in this order."""
    assets = files("forebay.reporting").joinpath("assets")

    def asset(name: str) -> str:
        return assets.joinpath(name).read_text(encoding="utf-8").strip()

    # Inside of a script element only "<" could end it, or begin a comment.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return Template(asset("page.html")).substitute(
        title=escape(title),
        style=asset("page.css"),
        body=body,
        data=embedded,
        script="\n".join(asset(name) for name in ("charts.js", *scripts)),
    )
