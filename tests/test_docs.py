"""The documentation is true to the tree: its generated parts, its links, and every page that code names. Owns no prose."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vnext.options import reader

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import house  # noqa: E402  (needs the path above)
import write_docs  # noqa: E402

PAGES = [*write_docs.pages(), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "perf" / "README.md"]
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)")
NAMED = re.compile(r"(?<![\w./-])docs/([\w-]+\.md)(?:#([\w-]+))?")
LONG_PAGES = {"replay-guide.md", "log-format.md"}
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", write_docs.pages(), ids=lambda page: page.name)
def test_generated_parts_are_as_the_script_writes_them(page: Path, request: pytest.FixtureRequest) -> None:
    """With --rewrite they are written."""
    text = write_docs.written(page.read_text())
    if request.config.getoption("--rewrite"):
        page.write_text(text)
    assert page.read_text() == text, "python scripts/write_docs.py writes it"


def test_every_generator_has_its_page() -> None:
    named = [name for page in write_docs.pages() for name in re.findall(r"^<!-- generated: ([\w-]+) -->$", page.read_text(), re.M)]
    assert sorted(named) == sorted(write_docs.PARTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    wrong = [f"{file}#{anchor}" for file, anchor in LINK.findall(FENCED.sub("", page.read_text())) if not leads(page, file, anchor)]
    assert wrong == []


def leads(page: Path, file: str, anchor: str) -> bool:
    target = (page.parent / file).resolve() if file else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-") for heading in headings}


def test_pages_that_the_tree_names_exist() -> None:
    """`docs/x.md` and `docs/x.md#anchor`, in code, help, errors and comments."""
    assert [f"{name} names docs/{file}#{anchor}" for name, file, anchor in named_pages() if not leads(ROOT / "docs" / "x", file, anchor)] == []


def named_pages() -> Iterator[tuple[str, str, str]]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in listed:
        path = ROOT / name
        if name.startswith("tests/"):
            continue  # what they make up
        if path.suffix in {".py", ".md", ".sh", ".c", ".cpp", ".h", ".cu", ".cuh", ".js", ".service", ".yml", ".txt"} and path.is_file():
            yield from ((name, file, anchor) for file, anchor in NAMED.findall(path.read_text()))


def test_every_page_is_in_the_list() -> None:
    listed = set(re.findall(r"\(([\w-]+\.md)", (ROOT / "docs" / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} == listed


FILE = re.compile(r"(?<![\w./-])(?:vnext|tests|scripts|perf|cuda|examples)/[\w./-]*\w")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OF_OTHERS = {"--head", "--ulimit", "--init", "--shm-size", "--stop-timeout", "--index-url", "--grep"}  # Ray's, Docker's, pip's, git's


def test_files_that_pages_name_exist() -> None:
    made_up = re.compile("DATE|dist/")
    named = {(page.name, file) for page in write_docs.pages() for file in FILE.findall(page.read_text()) if not made_up.search(file)}
    assert sorted(f"{page} names {file}" for page, file in named if not (ROOT / file).exists()) == []


def test_options_that_pages_name_exist() -> None:
    """Somewhere among the options of a command, a script or a test."""
    listed = "".join(write_docs.PARTS[name]() for name in ("engine-options", "server-options", "other-options", "replay-commands"))
    sources = "".join(path.read_text() for folder in ("scripts", "perf", "tests", "vnext") for path in (ROOT / folder).rglob("*.py"))
    known = {*OPTION.findall(listed), *OPTION.findall(sources), *OF_OTHERS}
    named = {(page.name, option) for page in write_docs.pages() for option in OPTION.findall(page.read_text())}
    assert sorted(f"{page} names {option}" for page, option in named if option not in known) == []


COMMAND = re.compile(r"^    (?:\$ )?(vnext(?:-replay)? .+?)(?:  .*| 2>&1.*| \|.*)?$", re.MULTILINE)


@pytest.mark.parametrize("page", write_docs.pages(), ids=lambda page: page.name)
def test_commands_that_pages_show_parse(page: Path) -> None:
    """Those of indented code; an explanation stands two blanks behind a command, and what may be left out in brackets."""
    for line in COMMAND.findall(page.read_text()):
        program, *words = shlex.split(re.sub(r"\[[^]]*\]", "", line))
        if program == "vnext":
            reader.parse(words)
        else:
            write_docs.replay.parser(words[0]).parse_args(words)


def test_records_name_no_folder_of_a_machine() -> None:
    named = re.compile(r'"command": "(?:[^"]* )?/')
    assert [path.name for path in (ROOT / "perf" / "records").rglob("*.json") if named.search(path.read_text())] == []


# ---- bounds ------------------------------------------------------------------------------------------------------


def test_pages_are_short() -> None:
    """What exceeds a bound repeats another page, tells what was, or explains what a docstring says better."""
    pages = [*(ROOT / "docs").glob("*.md")]
    texts = {page.name: len(house.by_hand(page).encode()) for page in pages}
    assert sum(page.stat().st_size for page in pages) <= house.DOCS_BYTES
    assert sum(texts.values()) <= house.BY_HAND_BYTES
    assert {name: size for name, size in texts.items() if size > house.PAGE_BYTES and name not in LONG_PAGES} == {}


def test_readme_and_changelog_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= house.README_LINES
    assert (ROOT / "CHANGELOG.md").stat().st_size <= house.CHANGELOG_BYTES
