"""A docstring names what is there: each identifier in backticks is a name that its reader can find.

A plain name is one of the module, or of a module of ours that it imports, or a class or module of the product. So a
renamed parameter or constant leaves no docstring behind.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import keyword
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "peer", "coordinator", "cairn")
FILES = dict.fromkeys(sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py") if "_pb2" not in p.name))
QUOTED = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
ALWAYS = {*dir(builtins), *keyword.kwlist, "self"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings that are statements: docstrings, also those that stand under a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@cache
def words_of(path: Path) -> frozenset[str]:
    """Return all names in a module's code, and the words of its strings (keys, columns, options)."""
    docs = {id(d) for d in docstrings(tree_of(path))}
    found = set[str]()
    for node in ast.walk(tree_of(path)):
        texts = [getattr(node, f, None) for f in ("id", "attr", "name", "arg", "module", "asname")]
        if isinstance(node, ast.Constant) and id(node) not in docs:
            texts.append(node.value)
        found.update(w for t in texts if isinstance(t, str) for w in re.findall(r"\w+", t))
    return frozenset(found)


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Return what a module defines: functions, classes, their fields and attributes, constants."""
    found = {path.stem}
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                found.add(node.attr)
    return frozenset(found)


@cache
def everywhere() -> frozenset[str]:
    """Return the product's classes, modules and packages."""
    classes = (n.name for p in FILES for n in ast.walk(tree_of(p)) if isinstance(n, ast.ClassDef))
    return frozenset([*classes, *(p.stem for p in FILES), *(p.parent.name for p in FILES)])


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p in FILES), None)


def imported_by(path: Path) -> set[str]:
    """Return what the modules define that a module imports; for a package, what its modules define."""
    modules = [p for p in FILES if p.parent == path.parent] if path.name == "__init__.py" else []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        modules += [p for n in names if (p := file_of(n)) is not None]
    return {name for module in modules for name in defined_in(module)}


def is_file_or_library(name: str) -> bool:
    first, _, last = name.rpartition(".")
    if last in ("py", "proto"):
        return any(p.name == name for folder in PACKAGES for p in (ROOT / folder).rglob(f"*.{last}"))
    return last in ("toml", "json", "jsonl", "safetensors") or importlib.util.find_spec(name.split(".")[0]) is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_names_in_docstrings_exist(package: str):
    stale = []
    for path in (p for p in FILES if p.is_relative_to(ROOT / package)):
        known = words_of(path) | everywhere() | ALWAYS | imported_by(path)
        for doc in docstrings(tree_of(path)):
            for name in QUOTED.findall(str(doc.value)):
                first, _, last = name.rpartition(".")
                # Of a dotted name, the owner is named too: the last part may be of any module.
                elsewhere = bool(first) and any(last in defined_in(p) for p in FILES)
                if last not in known and not elsewhere and not is_file_or_library(name):
                    stale.append(f"{path.relative_to(ROOT)}:{doc.lineno}: `{name}`")
    assert not stale, "\n".join(["names in docstrings that are nowhere:", *stale])
