"""How this Cairn was installed, and what brings it up to date: `plan` decides from facts that `find_facts` gathers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from cairn import ROOT
from protocol.errors import CairnError
from protocol.extras import DISTRIBUTION
from protocol.python_command import START

if TYPE_CHECKING:
    from importlib.metadata import Distribution

IMAGE_VARIABLE = "CAIRN_IMAGE"
"""Set in our container images, to the image's name."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts by which it is known how Cairn was installed.

    `checkout`: the sources that it runs from, if it is not a package of the environment. `image`: the container image
    that it is part of. `is_tool_of_uv`: the environment is one of `uv tool`. `installer`: who wrote the package ("pip",
    "uv"). `direct_url`: where the package came from by PEP 610; None: not known. `has_source`: that place, if it is a
    folder, exists. `uv`: the program, if it is found; `has_pip`: whether the environment has pip.
    """

    python: str
    checkout: Path | None = None
    image: str = ""
    is_tool_of_uv: bool = False
    installer: str = "pip"
    direct_url: dict[str, Any] | None = None
    has_source: bool = True
    uv: str | None = None
    has_pip: bool = True


@dataclass(frozen=True, slots=True)
class UpgradePlan:
    """The source of a newer Cairn, the commands that install it, in order, and whether the source is a folder."""

    source: str
    commands: tuple[tuple[str, ...], ...]
    is_folder: bool


def plan(facts: Facts) -> UpgradePlan:
    """Return how to upgrade. Raises CairnError, with the command to run instead, where this Cairn cannot do it."""
    if facts.image:
        raise CairnError(
            f"this Cairn is part of the image {facts.image}, which stays as it is: build or pull a newer image "
            "(docker/README.md), and start a container from it with the same volume"
        )
    if facts.checkout is not None:
        where = shlex.quote(str(facts.checkout))
        raise CairnError(
            f"this Cairn runs from its sources in {facts.checkout}: run `git -C {where} pull`, and then `make -C "
            f"{where} .venv/.installed` if it was set up by make"
        )
    if facts.direct_url is None:
        # Not from a package index: nobody owns the name there yet, so whoever took it would run code here.
        raise CairnError(
            "this Cairn's source is not known: install it again from your clone (`git pull`, then `pipx install "
            "--force .`)"
        )
    source, is_folder = _source(facts.direct_url, facts.has_source), "dir_info" in facts.direct_url
    again = ("--reinstall-package", DISTRIBUTION)
    if facts.is_tool_of_uv:
        return UpgradePlan(source, (_by_uv(facts.uv, "tool", "upgrade", *again, DISTRIBUTION),), is_folder)
    if facts.installer == "uv" or not facts.has_pip:
        only = ("--upgrade-package", DISTRIBUTION)
        command = _by_uv(facts.uv, "pip", "install", "--python", facts.python, *only, *again, source)
        return UpgradePlan(source, (command,), is_folder)
    pip = (facts.python, "-m", "pip", "install")
    # pip keeps a package whose version has not changed, which that of a folder or repository has not often.
    commands = ((*pip, "--upgrade", source), (*pip, "--force-reinstall", "--no-deps", source))
    return UpgradePlan(source, commands, is_folder)


def _source(direct_url: dict[str, Any], has_source: bool) -> str:
    """Return what to install from, in pip's words. Raises CairnError when it cannot have become newer, or is gone."""
    url = str(direct_url.get("url", ""))
    if isinstance(vcs := direct_url.get("vcs_info"), dict):
        revision = f"@{vcs['requested_revision']}" if vcs.get("requested_revision") else ""
        inside = f"#subdirectory={direct_url['subdirectory']}" if direct_url.get("subdirectory") else ""
        return f"{vcs.get('vcs', 'git')}+{url}{revision}{inside}"
    if "dir_info" in direct_url:
        folder = unquote(urlsplit(url).path)
        if not has_source:
            raise CairnError(f"this Cairn was installed from {folder}, which is gone: install it again from a checkout")
        return folder
    raise CairnError(
        f"this Cairn was installed from the file {url}, which does not change: install a newer file in the same manner"
    )


def _by_uv(uv: str | None, *arguments: str) -> tuple[str, ...]:
    if uv is None:
        raise CairnError(f"uv, which installed this Cairn, is not found: run `uv {shlex.join(arguments)}`")
    return (uv, *arguments)


def find_facts() -> Facts:
    """Return the facts about the Cairn that runs."""
    here, prefix = Path(__file__).resolve().parent, Path(sys.prefix)
    package = _package()
    direct_url = _direct_url(package) if package is not None else None
    is_installed = (
        package is not None
        and Path(str(package.locate_file("cairn"))).resolve() == here  # so also of an egg-info beside the sources
        and not (ROOT / ".git").exists()
        and not _is_editable(direct_url)
    )
    folder = unquote(urlsplit(str((direct_url or {}).get("url", ""))).path)
    return Facts(
        sys.executable,
        checkout=None if is_installed else ROOT,
        image=os.environ.get(IMAGE_VARIABLE, "")[:100],
        is_tool_of_uv=(prefix / "uv-receipt.toml").exists(),
        installer=((package.read_text("INSTALLER") if package is not None else None) or "pip").strip(),
        direct_url=direct_url,
        has_source=Path(folder).is_dir(),
        uv=shutil.which("uv"),
        has_pip=util.find_spec("pip") is not None,
    )  # fmt: skip


def _is_editable(direct_url: dict[str, Any] | None) -> bool:
    about = (direct_url or {}).get("dir_info")
    return isinstance(about, dict) and bool(about.get("editable"))


def installed_commit() -> str:
    """Return the commit that the package was installed from; "" if that is not known. The file is read each time."""
    package = _package()
    vcs = (_direct_url(package) or {}).get("vcs_info") if package is not None else None
    return str(vcs.get("commit_id", ""))[:10] if isinstance(vcs, dict) else ""


def _package() -> Distribution | None:
    from importlib import metadata  # takes 10 ms, which no command's help has to spend

    try:
        return metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _direct_url(package: Distribution) -> dict[str, Any] | None:
    """Return the record of PEP 610; None without one. Raises CairnError for one that cannot be read."""
    text = package.read_text("direct_url.json")
    try:
        value = None if text is None else json.loads(text)
    except ValueError:
        value = []
    if value is not None and not isinstance(value, dict):
        raise CairnError(f"direct_url.json of the package {DISTRIBUTION} is damaged: install it again by hand")
    return value


# -- what runs from it -------------------------------------------------------------------------------------------------


def processes_of(prefix: Path, processes: Iterable[tuple[int, Sequence[str]]]) -> dict[int, str]:
    """Return the Cairns among these processes (id, arguments) that run by the Python of an environment.

    Trainers and the like only where no command of theirs is found.
    """
    commands, parts = {}, {}
    for pid, arguments in processes:
        remaining = list(arguments[1:])
        while remaining and remaining[0].startswith("-") and remaining[0] not in ("-m", "-c"):
            remaining.pop(0)
        if remaining[:2] == ["-c", START]:
            remaining[:2] = ["-m"]
        is_module = remaining[:1] == ["-m"]
        if len(remaining) > is_module and arguments[0].startswith(f"{prefix}{os.sep}"):
            name = remaining[1] if is_module else Path(remaining[0]).name
            if name == "cairn":
                commands[pid] = " ".join(["cairn", *remaining[1 + is_module :][:2]])
            elif is_module and name.partition(".")[0] in ("peer", "coordinator"):
                parts[pid] = name
    return commands or parts


def running_processes() -> Iterable[tuple[int, Sequence[str]]]:
    """Yield the id and the arguments of each process but this one, as far as they may be read."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            except OSError:
                continue
