"""The pages: every command is known, every link leads somewhere, every policy and public name has its place."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer

from forebay.cli.main import app
from forebay.planners import PLANNERS
from pages import api
from pages.markdown import anchors, blocks, commands, dead_links, links, stale
from pages.printed import ONE_RUN, PageError, Session, printed, settled

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
COMMANDS = [line for page in DOCS for line in commands(page.read_text(encoding="utf-8")) if line.startswith("forebay ")]


# What is written is so


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert dead_links(page) == []


def test_every_page_is_in_the_index() -> None:
    index = set(links((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in DOCS} - {"README.md"} - index == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_known(command: str) -> None:
    program, verb, *arguments = shlex.split(command, comments=True)
    group = typer.main.get_command(app)
    if verb.startswith("--"):
        assert verb in {name for parameter in group.params for name in parameter.opts}
    else:
        known = group.commands[verb]  # type: ignore[attr-defined]
        assert program == "forebay" and known.make_context(verb, arguments).params


def test_every_policy_is_described() -> None:
    """In a row of a table."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS)
    one = r"(?:`[\w-]+`|\[`[\w-]+`\]\(policies/[\w-]+\.md\))"
    rows = re.findall(rf"^\| ({one}(?:, {one})*) \|", pages, re.MULTILINE)
    described = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    assert set(PLANNERS) - set(described) == set()


def test_stale_pages_are_named(tmp_path: Path) -> None:
    for name in ("same", "changed", "extra"):
        (tmp_path / name).write_text(f"{name}\nold\n")
    made = {tmp_path / "same": "same\nold\n", tmp_path / "changed": "changed\nnew\n", tmp_path / "missing": "new\n"}
    assert stale(tmp_path, made) == [
        "changed: 'old', made 'new'",
        "extra: 'extra', made ''",
        "missing: '', made 'new'",
    ]


# The API


def test_the_api_is_as_the_docstrings_say() -> None:
    assert stale(api.FOLDER, api.pages()) == [], "run scripts/docs"


@pytest.mark.parametrize("module", api.modules())
def test_public_names_say_what_they_are(module: str) -> None:
    said = {found.name: found.doc for found in api.documented(module)}
    assert [name for name, doc in said.items() if not doc and not name.endswith("_SCHEMA")] == []


def test_public_functions_say_what_they_raise() -> None:
    silent = [
        found.name
        for module in ("forebay", "forebay.testing")
        for found in api.documented(module)
        if isinstance(found.node, ast.FunctionDef) and not re.search(r"\b[Rr]aise[sd]?\b", found.doc)
    ]
    assert silent == [], "say what it raises, or that it raises nothing"


def test_public_functions_say_what_shapes_their_tensors_have() -> None:
    silent = [
        found.name
        for module in ("forebay", "forebay.testing", *(name for name in api.modules() if ".integrations." in name))
        for found in api.documented(module)
        if isinstance(found.node, ast.FunctionDef) and _has_tensors(found.node) and "shape" not in found.doc
    ]
    assert silent == []


def _has_tensors(node: ast.FunctionDef) -> bool:
    """Whether a function gives tensors back, or is given a batch of them."""
    returned = "" if node.returns is None else ast.unparse(node.returns)
    given = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    return "torch.Tensor" in returned or not given.isdisjoint({"batch", "batches"})


def test_records_name_their_fields() -> None:
    unsaid = []
    for module in api.RECORDS:
        for found in api.documented(module):
            if not isinstance(found.node, ast.ClassDef) or not _is_record(found.node):
                continue
            text = found.doc + found.source.doc
            fields = [str(ast.unparse(one.target)) for one in found.node.body if isinstance(one, ast.AnnAssign)]
            unsaid += [f"{found.name}.{name}" for name in fields if not _said(name, text)]
    assert unsaid == []


def _is_record(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list)


def _said(name: str, text: str) -> bool:
    """Whether a docstring has the field, as it is or in words."""
    in_words = all(re.search(rf"\b{word}", text, re.IGNORECASE) for word in name.split("_"))
    return name == "schema" or in_words or re.search(rf"\b{name}\b", text) is not None


# The tools


def test_a_page_is_read_as_github_reads_it() -> None:
    text = (
        "# One `two`, three!\n\n## Same\n\n## Same\n\n[a](b.md#c) `[no](x)` ![i](p.png)\n\n```md\n# no\n[no](y)\n```\n"
    )
    assert anchors(text) == {"one-two-three", "same", "same-1"}
    assert links(text) == ["b.md#c", "p.png"]
    assert [(block.language, block.body) for block in blocks(text)] == [("md", "# no\n[no](y)\n")]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# There\n")
    page = tmp_path / "page.md"
    page.write_text("# Top\n[1](other.md) [2](other.md#there) [3](#top) [4](https://example.org/x) [5](gone.md)\n")
    assert dead_links(page) == ["gone.md"]
    page.write_text("[1](other.md#not-there) [2](#nor-here)\n")
    assert dead_links(page) == ["other.md#not-there", "#nor-here"]


PAGE = "```python\nx = 1\n```\n\nand\n\n```python\nprint(x)\n```\n\n```text\nold\n```\n"


def test_what_is_printed_takes_the_place_of_what_was(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert printed(page) == PAGE.replace("old", "1")
    page.write_text(PAGE.partition("\n\n```text")[0] + "\n")
    with pytest.raises(PageError, match="no text block"):
        printed(page)


def test_figures_of_one_run_do_not_count() -> None:
    page = f"1\n{ONE_RUN}\n```text\nA title\nstep 3 ms\n  kind    5\n```\n2\n"
    assert settled(page) == f"1\n{ONE_RUN}\n```text\nA title\n```\n2\n"
    assert settled(page.replace(ONE_RUN, "")) == page.replace(ONE_RUN, "")


def test_a_command_that_fails_is_told() -> None:
    block = next(blocks("```console\n$ forebay plan no-such-model\n```\n"))
    with pytest.raises(PageError, match="exit code 2"):
        Session().run(block)
    block = next(blocks("```console\n$ ls\n```\n"))
    with pytest.raises(PageError, match="a command is written"):
        Session().run(block)
