"""Check the English of docstrings, comments and Markdown pages: `python -m tools.prose [PATH...]`.

Each finding names the file, the line, the rule and the sentence. `findings_in` holds the rules. Code, tables, literal
blocks, headings and quotations are not prose: they are masked or left out before a rule is applied. Other strings of
some words are messages (errors, log lines, descriptions), which need not be sentences: only their words are checked.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_WORDS = 30
"""Words in one sentence; 25 is the aim. A quotation and a piece of code count as one word each."""

LEAD_IN_WORDS = 6
"""A sentence of at most this length that ends with a colon introduces a list and is read as a heading."""

MESSAGE_WORDS = 4
"""A string in code that has this many words is a message to people."""

SUFFIXES = (".md", ".proto", ".py")
SKIPPED = re.compile(r"\.|build$|templates$|demo-run$|.*\.egg-info$|.*_pb2")
"""Names of folders and files without prose of ours: hidden, built and generated ones, and templates of pages."""

RELATIVE = re.compile(
    r"(?:(?:about|after|at|before|by|for|from|in|of|on|over|since|than|through|to|until|with)\s+)?"
    r"(?:who|whom|whose|whoever|what|whatever|which|whichever|whether|where|wherever)\b",
    re.I,
)
"""The opening of a statement such as "Who has announced knows ..." or "Of whom nothing came ..."."""

AUXILIARY = re.compile(r"(?:are|can|could|did|does|had|has|is|may|must|should|was|were|will|would)\b", re.I)
"""The opening of a statement without a subject ("Has a lock.") or an inverted conditional ("Should it fail, ...")."""

NO_VERB = re.compile(
    r"(?:an?|all|any|as|at|because|by|each|every|for|from|his|how|if|in|its?|many|most|no|none|not|of|on|only|or|other"
    r"|others|such|than|that|the|their|then|there|these|they|this|those|through|to|when|with|without)\b",
    re.I,
)
"""The opening of a function's docstring that is no imperative."""

BANNED = {
    r"so (?:many|long|often)\b(?!.*\bthat\b)": "give the number or the duration, or write 'as long as'",
    r"anew|afresh": "from scratch, again",
    r"told(?! apart)": "notified, received; or name the sender",
    r"hears?|heard(?! from)": "receives, received",
    r"whereabouts": "coordinator address record",
    r"amendments?": "directive",
    r"errands?": "job",
    r"fellows?": "peer, member",
    r"let(?:s|ting)? go": "release",
    r"asides?": "quarantine, yield; or say what happens instead",
    r"lack(?:s|ed|ing)?": "is missing, has no",
    r"standing": "directives in force, balance, rank",
    r"(?<!style )sheets?": "manifest",
    r"thereof|whereof|wherein|whereupon|therein|thereby": "begin a sentence of its own",
}
"""Private and archaic words, as patterns, with the ordinary ones."""

_BANNED = [(re.compile(rf"\b(?:{pattern})\b", re.I), remedy) for pattern, remedy in BANNED.items()]
_END = re.compile(r"(?<=[.!?])[)\]*_]*\s+(?=\S)")
_NO_END = re.compile(r"(?:\b(?:e\.g|i\.e|vs|cf)\.|\.\.\.[)\]]*)$")
_WORD = re.compile(r"\S*[A-Za-z0-9]\S*")
_MASKED = re.compile(r"``.+?``|`[^`]+`|\"[^\"]+\"")
_LINK = re.compile(r"\]\([^)]*\)|\[(?=[^\]]*\]\()|<!--.*?-->|^\*\*[^*]+[.:]\*\*|\*\*")
_PYTHON = re.compile(
    r"""[rbfuRBFU]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"|#(?P<comment>[^\n]*)",
    re.S,
)
_DIRECTIVE = re.compile(r"\s*(?:noqa|fmt:|type:|pyright:|ruff:|pragma|!)|\W*$|\s*[-=]{2,}")
_COLUMNS = re.compile(r"\S {3,}\S")
_BULLET = re.compile(r"(?:[-*+]|\d+[.)])\s+")

Lines = Sequence[tuple[int, str]]
"""Lines of text, each with its number in the file."""


@dataclass(frozen=True)
class Paragraph:
    """Adjacent lines of prose. `opens_function`: it is the first of a function's docstring."""

    lines: Lines
    opens_function: bool = False


@dataclass(frozen=True)
class Finding:
    """One sentence that breaks one rule."""

    path: str
    line: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.sentence}"


def findings_in(paragraph: Paragraph, path: str) -> Iterator[Finding]:
    """Yield what is wrong with the sentences of one paragraph."""
    for number, (line, shown, masked) in enumerate(sentences(paragraph.lines)):
        words = len(_WORD.findall(masked))
        opening = masked.lstrip("([_*")
        statement = not masked.endswith("?") and not (masked.endswith(":") and words <= LEAD_IN_WORDS)
        rules = []
        if words > MAX_WORDS:
            rules.append(f"{words} words, at most {MAX_WORDS}")
        if statement and RELATIVE.match(opening):
            rules.append("opens with a free relative")
        elif statement and AUXILIARY.match(opening):
            rules.append("has no subject, or is an inverted conditional")
        elif paragraph.opens_function and number == 0 and NO_VERB.match(opening):
            rules.append("a function opens with a verb: Return, Raise, Yield, ...")
        yield from (Finding(path, line, rule, shown) for rule in [*rules, *banned_in(masked)])


def banned_in(masked: str) -> Iterator[str]:
    """Yield a rule for each banned word in a sentence."""
    return (f"{found[0]!r}: {remedy}" for pattern, remedy in _BANNED if (found := pattern.search(masked)))


def sentences(lines: Lines) -> Iterator[tuple[int, str, str]]:
    """Yield each sentence: the line that it begins on, its text, and the text with code and quotations masked."""
    starts, text = [], ""
    for _, line in lines:
        starts.append(len(text))
        text += line.strip() + " "
    # Masks keep the length, so that a place in the masked text is the same place in the text.
    masked = _MASKED.sub(lambda m: "X" * len(m[0]), text)
    masked = _LINK.sub(lambda m: " " * len(m[0]), masked)
    begin = 0
    for end in [*(m.end() for m in _END.finditer(masked)), len(masked)]:
        part = masked[begin:end]
        if end < len(masked) and _NO_END.search(part.rstrip()):
            continue
        if _WORD.search(part):
            first = begin + len(part) - len(part.lstrip())
            yield lines[bisect_right(starts, first) - 1][0], text[begin:end].strip(), part.strip()
        begin = end


def paragraphs(lines: Lines, *, opens_function: bool = False) -> Iterator[Paragraph]:
    r"""Yield the paragraphs of a text, without headings, tables and literal blocks.

    A block is literal if it is indented outside a list, fenced by ```, or follows a line with click's mark \b. A line
    with three spaces in a row is a row of a table.
    """
    held: list[tuple[int, str]] = []
    fenced = unwrapped = listed = False
    for number, line in [*lines, (0, "")]:
        text = line.strip()
        bullet = _BULLET.match(text)
        literal = (line.startswith("  ") and not listed) or _COLUMNS.search(text) is not None
        if text.startswith("```"):
            fenced = not fenced
        unwrapped = bool(text) and (unwrapped or text == "\b")
        code = fenced or unwrapped or literal or text.startswith(("#", "|", "```", "!", "<", ">>>"))
        if code or bullet or not text:
            if held:
                yield Paragraph(tuple(held), opens_function)
                opens_function = False
            held = []
            listed = not fenced and (bullet is not None or (listed and not text))
        if code or not text:
            continue
        held.append((number, text[bullet.end() :] if bullet else text))
        listed = bullet is not None or (listed and line.startswith(" "))


def of_python(source: str) -> Iterator[Paragraph]:
    """Yield the prose of a module: docstrings, strings that stand under a name, and comments."""
    for first, text, opens_function in _strings(ast.parse(source)):
        lines = text.splitlines()
        indent = min((len(t) - len(t.lstrip()) for t in lines[1:] if t.strip()), default=0)
        dedented = [t if i == 0 else t[indent:] for i, t in enumerate(lines)]
        yield from paragraphs(list(enumerate(dedented, first)), opens_function=opens_function)
    yield from _comments(source)


def _strings(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield each string that is a statement: its line, its text, and whether it is the docstring of a function."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for i, node in enumerate(getattr(tree, block, ())):
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value, i == 0 and block == "body" and _is_imperative(tree)
            yield from _strings(node)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the messages in a module's code, each with its line; X stands for what an f-string fills in."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inner.update(id(node.value) for node in nodes if isinstance(node, ast.Expr))  # docstrings: see `_strings`
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in inner:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            if len(text.split()) >= MESSAGE_WORDS:
                yield node.lineno, " ".join(text.split())


def _is_imperative(node: ast.AST) -> bool:
    """Return whether a docstring of this node must open with a verb: a function's, but no property's or test's."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
        return False
    return not any(ast.unparse(d).endswith(("property", ".setter", "fixture")) for d in node.decorator_list)


def _comments(source: str) -> Iterator[Paragraph]:
    """Yield the comments of a module; lines of comment below each other are one text."""
    held: list[tuple[int, str]] = []
    column, number, at = -1, 1, 0
    for found in _PYTHON.finditer(source):
        comment = found["comment"]
        if comment is None:
            continue
        number, at = number + source.count("\n", at, found.start()), found.start()
        start = source.rfind("\n", 0, at) + 1
        here = at - start if not source[start:at].strip() else -1
        if held and (here < 0 or here != column or number != held[-1][0] + 1):
            yield from paragraphs(held)
            held = []
        if not _DIRECTIVE.match(comment):
            held.append((number, comment.removeprefix(" ")))
        column = here
    yield from paragraphs(held)


def of_proto(source: str) -> Iterator[Paragraph]:
    """Yield the comments of a Protocol Buffers file; lines of comment below each other are one text."""
    held: list[tuple[int, str]] = []
    for number, line in enumerate(source.splitlines(), 1):
        code, mark, comment = line.partition("//")
        if held and (not mark or code.strip()):
            yield from paragraphs(held)
            held = []
        if mark:
            held.append((number, comment.removeprefix(" ")))
    yield from paragraphs(held)


def of_markdown(source: str) -> Iterator[Paragraph]:
    """Yield the prose of a Markdown page."""
    return paragraphs(list(enumerate(source.splitlines(), 1)))


def check(path: Path) -> list[Finding]:
    """Return the findings in one file."""
    read = {".py": of_python, ".md": of_markdown, ".proto": of_proto}[path.suffix]
    source = path.read_text(encoding="utf-8")
    found = [f for p in read(source) for f in findings_in(p, str(path))]
    if path.suffix == ".py" and "tests" not in path.parts:  # tests have sentences that others wrote
        said = (sentence for message in messages(source) for sentence in sentences([message]))
        found += [Finding(str(path), line, rule, shown) for line, shown, masked in said for rule in banned_in(masked)]
    return sorted(found, key=lambda f: f.line)


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that paths name: themselves, and in folders all that hold prose and are not generated."""
    for path in paths:
        if path.is_file():
            yield path
        for folder, inner, names in os.walk(path):
            inner[:] = sorted(name for name in inner if not SKIPPED.match(name))
            prose = (name for name in sorted(names) if name.endswith(SUFFIXES) and not SKIPPED.match(name))
            yield from (Path(folder) / name for name in prose)


def main(arguments: Sequence[str]) -> int:
    """Print every finding, and their number by rule; return the exit code."""
    found = [finding for path in files(Path(a) for a in arguments or ["."]) for finding in check(path)]
    for finding in found:
        print(finding)
    if found:
        by_rule = Counter(re.sub(r"^\d+ ", "", f.rule) for f in found)
        print(f"\n{len(found)} findings: " + "; ".join(f"{n} x {rule}" for rule, n in by_rule.most_common()))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
