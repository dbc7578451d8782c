"""``docs/api``: the public interface in the words of its own docstrings, a page for each module.

Read from the source, not from what is imported: that needs neither torch nor an extra that is not installed.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

__all__ = ["FOLDER", "Definition", "Source", "documented", "modules", "pages"]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "api"
SOURCE = ROOT / "src"

FUNCTIONS = ("forebay", "forebay.optim", "forebay.testing", "forebay.catalogue")
RECORDS = (
    "forebay.budgets",
    "forebay.model",
    "forebay.trace",
    "forebay.machine",
    "forebay.plans",
    "forebay.treatments",
    "forebay.timeline",
    "forebay.memory",
    "forebay.reporting.run",
)
ERRORS = ("forebay.errors",)
INTEGRATIONS = "forebay.integrations"

HEAD = "<!-- written by scripts/docs from the docstrings; change those -->\n"

Statement = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Source:
    """One module as it is written."""

    module: str
    text: str
    tree: ast.Module

    @property
    def doc(self) -> str:
        """The docstring of the module."""
        return ast.get_docstring(self.tree) or ""

    @property
    def names(self) -> list[str]:
        """``__all__``, in its order."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and _target(node) == "__all__":
                return [str(name) for name in ast.literal_eval(node.value)]
        return []

    def lines(self, first: int, last: int) -> str:
        """The lines ``first`` to ``last`` (from 1, both included), as far to the left as they go."""
        return dedent("\n".join(self.text.splitlines()[first - 1 : last]))


@dataclass(frozen=True)
class Definition:
    """A public name, and where it is defined."""

    name: str
    source: Source
    node: Statement
    doc: str


@cache
def read(module: str) -> Source:
    """The source of a module. Raises ``FileNotFoundError`` where there is none."""
    stem = SOURCE / Path(*module.split("."))
    path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    return Source(module, text, ast.parse(text))


def modules() -> tuple[str, ...]:
    """The public modules, in the order of the index."""
    return (*FUNCTIONS, *_integrations(), *RECORDS, *ERRORS)


def documented(module: str) -> list[Definition]:
    """Every public name of a module, in the order of ``__all__``."""
    return [_found(module, name) for name in read(module).names]


def pages() -> dict[Path, str]:
    """Every page of ``docs/api`` with its text."""
    written = {FOLDER / f"{module}.md": _page(module) for module in modules()}
    return {FOLDER / "README.md": _index(), **written}


def _integrations() -> tuple[str, ...]:
    files = (SOURCE / Path(*INTEGRATIONS.split("."))).glob("*.py")
    names = sorted(f"{INTEGRATIONS}.{file.stem}" for file in files if file.stem != "__init__")
    return tuple(name for name in names if read(name).names)


def _found(module: str, name: str) -> Definition:
    """Where ``name`` is defined, by way of the modules that pass it on. Raises ``LookupError``."""
    source = read(module)
    for number, node in enumerate(source.tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Definition(name, source, node, ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) == name:
            return Definition(name, source, node, _comment(source.tree.body[number + 1 :]))
    for imported in ast.walk(source.tree):
        if isinstance(imported, ast.ImportFrom) and imported.module is not None:
            original = next((one.name for one in imported.names if (one.asname or one.name) == name), None)
            if original is not None:
                return _found(imported.module, original)
    raise LookupError(f"{module} says that it has {name}, and does not")


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _comment(behind: Sequence[ast.stmt]) -> str:
    """The string behind a constant, which says what it is."""
    first = behind[0] if behind else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return inspect.cleandoc(first.value.value)
    return ""


def _index() -> str:
    groups = (
        ("Functions and optimizers", FUNCTIONS),
        ("Under other programs", _integrations()),
        ("Records", RECORDS),
        ("Errors", ERRORS),
    )
    lines = [
        HEAD,
        "# The API",
        "",
        "The docstrings of everything public. Sizes are bytes, times seconds, rates per second,",
    ]
    lines += ['unless it says otherwise; sizes may be written `"24GiB"` where a `Size` is asked for.', ""]
    for title, names in groups:
        lines += [f"## {title}", "", "| module | what is in it |", "|---|---|"]
        lines += [f"| [`{name}`]({name}.md) | {_first(read(name).doc)} |" for name in names]
        lines.append("")
    return "\n".join(lines)


def _first(doc: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".").replace("|", "/")


def _page(module: str) -> str:
    parts = [HEAD, f"# {module}\n", f"{read(module).doc}\n"]
    for found in documented(module):
        elsewhere = found.source.module
        if elsewhere != module and elsewhere in modules():
            parts.append(f"## `{found.name}`\n\nSee [{elsewhere}]({elsewhere}.md#{found.name.lower()}).\n")
        else:
            parts.append(_section(found))
    return "\n".join(parts)


def _section(found: Definition) -> str:
    node, source = found.node, found.source
    if isinstance(node, ast.FunctionDef):
        return _told("##", found.name, _signature(source, node), found.doc)
    if isinstance(node, ast.ClassDef):
        methods = [_told("###", f"{node.name}.{name}", text, doc) for name, text, doc in _methods(source, node)]
        return "\n".join([_told("##", found.name, _class(source, node), found.doc), *methods])
    return _told("##", found.name, source.lines(node.lineno, node.end_lineno or node.lineno), found.doc)


def _told(level: str, name: str, code: str, doc: str) -> str:
    return f"{level} `{name}`\n\n```python\n{code}\n```\n" + (f"\n{doc}\n" if doc else "")


def _signature(source: Source, node: ast.FunctionDef) -> str:
    """The function as it is written, up to its body, with what says what kind of method it is."""
    kinds = [f"@{ast.unparse(one)}\n" for one in node.decorator_list if ast.unparse(one) in ("property", "classmethod")]
    head = source.lines(node.lineno, node.body[0].lineno - 1)
    return "".join(kinds) + head.rstrip().removesuffix(":")


def _class(source: Source, node: ast.ClassDef) -> str:
    """The class as it is written: its first lines, its fields with their comments, and how one is made."""
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign | ast.Assign)]
    body = [one for one in fields if not _target(one).startswith("_")]
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    lines = source.lines(first, node.body[0].lineno - 1).rstrip().splitlines()
    for field in body:
        text = source.lines(field.lineno, field.end_lineno or field.lineno)
        lines += [f"    {line}" for line in text.splitlines()]
    for one in made:
        lines += [f"    {line}" for line in _signature(source, one).splitlines()]
    return "\n".join(lines)


def _methods(source: Source, node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    for one in node.body:
        doc = ast.get_docstring(one) if isinstance(one, ast.FunctionDef) else None
        if isinstance(one, ast.FunctionDef) and doc and not one.name.startswith("_"):
            yield one.name, _signature(source, one), doc
