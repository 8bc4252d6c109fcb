"""Count the places that touch a private attribute of another package.

`python -m tests.structure.private_attributes` lists them, with `--write` it stores the counts as the new bounds.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

Nodes = Sequence[ast.AST]
"""All of a file's syntax tree."""

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("protocol", "peer", "coordinator", "cairn", "benchmarks", "tests")
BOUNDS = Path(__file__).with_name("private_attributes.json")
"""For each folder the number of such places that it may have at most. The numbers may only shrink."""

OWN = {"self", "cls"}
PUBLIC = {"_exit"}
"""`os._exit` is documented."""

BY_NAME = {"getattr", "setattr", "delattr", "hasattr"}
"""Functions, and methods of `monkeypatch`, that are given the name of an attribute as a string."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in {"_", *PUBLIC}


def defined(nodes: Nodes) -> set[str]:
    """Return the private names that a file defines: of functions, classes, variables, fields and attributes of self."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def touched(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each private attribute of something else than `self`, `cls` or `super()`.

    That is `x._name`, the import of `_name`, and `_name` as a string for getattr, setattr and monkeypatch.
    """
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and _last_name(node.func) in BY_NAME:
            for given in node.args[:2]:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    name = given.value.split(".")[-1]
                    if is_private(name) and name.isidentifier():
                        yield node.lineno, name


def _last_name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in OWN


def foreign(files: Iterable[tuple[str, Nodes]]) -> dict[str, list[str]]:
    """Return for each folder the places, as "path:line name", where a name is touched that is not the package's own.

    A file of the product may touch what any file of its folder defines; a test or benchmark only what it defines
    itself.
    """
    nodes = dict(files)
    own = {path: defined(of_file) for path, of_file in nodes.items()}
    of_folder: dict[str, set[str]] = defaultdict(set)
    for path, names in own.items():
        of_folder[str(Path(path).parent)] |= names
    found: dict[str, list[str]] = defaultdict(list)
    for path, of_file in sorted(nodes.items()):
        folder = str(Path(path).parent)
        may = own[path] if path.startswith(("tests/", "benchmarks/")) else of_folder[folder]
        found[folder] += [f"{path}:{line} {name}" for line, name in sorted(touched(of_file)) if name not in may]
    return {folder: places for folder, places in sorted(found.items()) if places}


def of_the_project() -> dict[str, list[str]]:
    """Return `foreign` of all files that are not generated."""
    paths = [p for f in FOLDERS for p in sorted((ROOT / f).rglob("*.py")) if "_pb2" not in p.name]
    return foreign((str(p.relative_to(ROOT)), list(ast.walk(ast.parse(p.read_text())))) for p in paths)


def main() -> None:
    places = of_the_project()
    if "--write" in sys.argv:
        BOUNDS.write_text(json.dumps({folder: len(found) for folder, found in places.items()}, indent=1) + "\n")
        return
    for found in places.values():
        print("\n".join(found))
    for file, count in Counter(p.split(":")[0] for found in places.values() for p in found).most_common():
        print(f"{count:5} {file}")
    print(f"{sum(map(len, places.values())):5} in all")


if __name__ == "__main__":
    main()
