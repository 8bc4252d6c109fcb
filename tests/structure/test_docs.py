"""Index and site list every page of docs, links and anchors lead somewhere, the glossary names code that exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from protocol.errors import CairnError
from tests.support.command_line import invite_on_stdin, parsed  # noqa: F401
from tests.support.guides import Block, blocks, missing

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROOT = DOCS.parent
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
MAX_TERMS = 60
MAX_WORDS = 25_000
"""In all pages but results; fine-tuning takes a thousand of them."""

LITERAL = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n)+|`[^`\n]+`")
"""Blocks and pieces of code, which have no links."""


def links(page: Path) -> set[tuple[Path, str]]:
    """Return the files that a page links to or shows, each with the anchor, if any."""
    found = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", LITERAL.sub("", page.read_text()))
    return {((page.parent / target).resolve() if target else page, anchor) for target, anchor in found}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as both GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    return [
        f"{target}#{anchor}"
        for target, anchor in sorted(links(page))
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]


def navigated(nav: Any) -> Iterator[str]:
    """Yield the pages of a part of mkdocs.yml's `nav`, in order."""
    match nav:
        case str():
            yield nav
        case list():
            for part in nav:
                yield from navigated(part)
        case dict():
            for part in nav.values():
                yield from navigated(part)


COMMAND = re.compile(r"^ {4}(?:\.venv/bin/|sudo )?cairn ([a-z].*)$", re.M)
MEANINGS = {"N": "7", "ROUND": "7", "KEY": "0" * 64, "KEY...": "0" * 64, "FIELD=VALUE...": "target_tokens=1024"}


def words_of(line: str) -> list[str]:
    """Return a command line as a reader may type it: the first of alternatives, with all that is optional."""
    typed = re.split(r" +# | < ", line)[0].replace("[", "").replace("]", "")
    return [MEANINGS.get(word, word.split("|")[0]) for word in shlex.split(typed)]


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_cairn_has_every_command_line_that_a_page_shows(page: Path):
    for line in COMMAND.findall(page.read_text()):
        try:
            parsed(words_of(line))
        except (click.ClickException, CairnError, KeyError) as e:
            # A file or folder of the reader's is not here.
            assert re.search("does not exist|there is no file", str(e)), f"cairn {line}: {e!r}"


def test_a_command_line_that_cairn_does_not_have_is_found():
    (line,) = COMMAND.findall("    cairn peer join INVITE [--nome NAME]     # a comment\n")
    with pytest.raises(click.UsageError, match="--nome"):
        parsed(words_of(line))


def test_blocks_of_a_guide_are_found_with_their_kinds():
    page = "# A\n## B\n\n    no\n\n<!--run-->\n\n    one\n\n      two\n\nText.\n\n<!--shows-->\n\n    three\n## C\n"
    assert blocks(page) == [Block("B", "run", "one\n\n  two\n"), Block("B", "shows", "three\n")]


def test_what_a_guide_shows_stands_in_this_order_with_other_numbers_and_is_missed_where_it_is_not():
    printed = "first\nround 17  loss 1.5\nat 10:20:30\nlast\n"
    assert missing("round 3 loss 2.25\nat 00:00:00\nl...\n", printed) == []
    assert missing("at 00:00:00\nround 3 loss 2.25\n", printed) == ["round 3 loss 2.25"]
    assert missing("round three\n", printed) == ["round three"]


def test_every_marked_block_of_the_pages_is_of_a_known_kind():
    """So that none is left out, mistyped: `tests/e2e/test_guides_e2e.py` follows all of the guides."""
    marked = {page.name: len(re.findall(r"^<!--(?!-)", page.read_text(), re.M)) for page in PAGES}
    assert {name: n for name, n in marked.items() if n} == {
        name: len(blocks((DOCS / name).read_text())) for name in ("finetuning.md", "owner.md", "volunteer.md")
    }


def test_the_index_lists_every_page():
    index, results = DOCS / "index.md", DOCS / "results/README.md"
    assert set(PAGES) - {target for page in (index, results) for target, _ in links(page)} == {index}


def test_the_site_has_every_page_once():
    pages = list(navigated(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: `one`\n[a](page.md#a-page-one) [b](other.md) ![c](c.png) [d](#d) [e](https://host/x.md)\n"
    )
    assert broken(page) == [f"{tmp_path}/c.png#", f"{tmp_path}/other.md#", f"{page}#d"]


@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed: `make docs`")
def test_the_site_is_built_can_be_searched_and_loads_nothing_from_other_hosts(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    made = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")} - {"404.html"}
    # mkdocs makes a folder's index of its README.
    assert made == {re.sub(r"README$", "index", str(p.relative_to(DOCS).with_suffix(""))) + ".html" for p in PAGES}
    texts = [found["text"] for found in json.loads((tmp_path / "search/search_index.json").read_text())["docs"]]
    assert any("pseudo-gradient" in text for text in texts)
    for page in made:
        loaded = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"?([^\s\">]+)", (tmp_path / page).read_text()
        )
        assert len(loaded) > 3 and not [address for address in loaded if re.match(r"(?:https?:)?//", address)], page


def test_the_pages_stay_short():
    """As `cat docs/*.md | tr -s ' \\n' '\\n\\n' | grep -vE '^[|:-]+$' | grep -c .` counts, with folders but results."""
    words = [w for p in PAGES if p.parent.name != "results" for w in re.split(r"[ \n]+", p.read_text())]
    assert len([w for w in words if w and not re.fullmatch(r"[|:-]+", w)]) <= MAX_WORDS


def test_the_glossary_is_short_and_names_code_that_exists():
    rows = re.findall(r"^\| (?!term|---)([^|]+) \|[^|]+\| ([^|]+) \|$", (DOCS / "glossary.md").read_text(), re.M)
    assert 40 <= len(rows) <= MAX_TERMS
    for term, code in rows:
        place, *classes = re.findall(r"`([^`]+)`", code)
        assert (ROOT / place).exists(), f"{term}: {place}"
        for name in classes:
            assert re.search(rf"^class {name}\b", (ROOT / place).read_text(), re.M), f"{term}: {name} in {place}"


def test_every_test_that_the_threats_name_exists():
    """With its control: a name that nobody has is found."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "threats.md").read_text())
    assert len(named) >= 20
    assert not [f"{file}::{name}" for file, name in named if not _has_test(file, name)]
    assert not _has_test("tests/structure/test_docs.py", "test_that_nobody_wrote")


def _has_test(file: str, name: str) -> bool:
    place = ROOT / file
    return place.exists() and re.search(rf"^(async )?def {name}\(", place.read_text(), re.M) is not None
