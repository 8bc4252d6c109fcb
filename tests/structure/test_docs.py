"""The index lists every page of docs, its links lead somewhere, and the glossary names code that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROOT = DOCS.parent
MAX_TERMS = 60


def links(page: Path) -> set[Path]:
    """Return the pages that a page links to, without their anchors."""
    found = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in found}


def test_the_index_lists_every_page():
    pages = {p.resolve() for p in DOCS.rglob("*.md")}
    assert pages - links(DOCS / "index.md") == {DOCS / "index.md"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path):
    assert not [str(target) for target in links(page) if not target.exists()]


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
