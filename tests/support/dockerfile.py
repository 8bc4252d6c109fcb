"""Dockerfiles and .dockerignore, read strictly: an instruction or a form that Cairn's do not use is a ValueError."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_WORDS = r'\[("[^"]*"(, )?)+\]'
"""JSON: neither `$` is replaced in it nor a shell started."""

FORMS = {
    "RUN": r"[^-\[](?!.*<<).*",
    "COPY": r"(--from=[a-z]+ )?[\w./]+ /[\w./]*",
    "ENV": r"[A-Z_]+=[^\s\"']+( [A-Z_]+=[^\s\"']+)*",
    # A name would have to be looked up by the engine; some refuse one, as they cannot tell whether it is root.
    "USER": r"[1-9]\d*",
    "WORKDIR": r"/[\w./]*",
    "VOLUME": r"/[\w./]+",
    "EXPOSE": r"\d+(/udp)?( \d+(/udp)?)*",
    "HEALTHCHECK": rf"(--(interval|timeout|start-period|retries)=\d+[sm]? )+CMD {_WORDS}",
    "STOPSIGNAL": r"SIG[A-Z]+",
    "ENTRYPOINT": _WORDS,
    "CMD": _WORDS,
}
"""The arguments of each instruction that may stand in a stage."""


@dataclass(frozen=True)
class Stage:
    """A part that begins with FROM: its base is an image, or an earlier stage."""

    name: str
    base: str
    steps: tuple[tuple[str, str], ...]
    """Instructions and their arguments."""

    def last(self, word: str) -> str:
        """Return the arguments of the last instruction of this name. Raises KeyError."""
        return dict(self.steps)[word]

    def words(self, word: str) -> list[str]:
        """Return the command of ENTRYPOINT, CMD or HEALTHCHECK."""
        return json.loads(self.last(word)[self.last(word).index("[") :])


def parse(text: str) -> list[Stage]:
    """Return the stages of a Dockerfile. The last one is the image."""
    defaults: dict[str, str] = {}
    found: list[Stage] = []
    for word, rest in _instructions(text):
        if word == "ARG" and not found and (m := re.fullmatch(r"([A-Z]+)=(\S+)", rest)):
            defaults[m[1]] = m[2]
        elif word == "FROM" and (m := re.fullmatch(r"(\$[A-Z]+|[\w./:-]+)( AS ([a-z]+))?", rest)):
            found.append(Stage(m[3] or "", defaults[m[1][1:]] if m[1].startswith("$") else m[1], ()))
        elif found and word in FORMS and re.fullmatch(FORMS[word], rest):
            last = found.pop()
            found.append(Stage(last.name, last.base, (*last.steps, (word, rest))))
        else:
            raise ValueError(f"not an instruction that is known here: {word} {rest}")
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    without_comments = re.sub(r"^#.*\n", "", text, flags=re.M)
    for line in re.sub(r"\\\n\s*", "", without_comments).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def context_names(dockerignore: str) -> set[str]:
    """Return the files and folders of the repository that are sent to the engine."""
    nothing, *lines = (line for line in dockerignore.splitlines() if not line.startswith("#"))
    kept = {line[1:] for line in lines if re.fullmatch(r"![\w.]+", line)}
    if nothing != "*" or len(lines) != len(kept) + 1 or lines[-1] != "**/__pycache__":
        raise ValueError("not a .dockerignore that leaves all out but some names")
    return kept
