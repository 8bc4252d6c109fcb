"""The wheel of this checkout, and environments in which it is installed as somebody else would have it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_files(to: Path, kept: Callable[[Path], bool] = lambda path: True) -> None:
    """Copy the repository's files that git tracks or would add; `kept` may leave some out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and kept(Path(name)):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes((ROOT / name).read_bytes())


def build_wheel(folder: Path) -> Path:
    """Return a wheel of this checkout, built in an empty folder."""
    source, out = folder / "source", folder / "wheel"
    # A copy: building leaves `build` and `*.egg-info` behind, whose files would be in the next wheel.
    copy_files(source)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), ".", cwd=source)
    (made,) = out.glob("*.whl")
    return made


@dataclass(frozen=True)
class Installed:
    """A virtual environment with Cairn from a wheel. It sees our dependencies, and neither the checkout nor pip.

    Its commands run in `cwd`, a folder elsewhere.
    """

    folder: Path
    cwd: Path

    @property
    def packages(self) -> Path:
        """Return the folder of its own packages."""
        (found,) = (self.folder / "lib").glob("python*/site-packages")
        return found

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the installed console script with these arguments."""
        return [str(self.folder / "bin" / "cairn"), *map(str, arguments)]

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the variables of a process of this environment."""
        return _without_checkout() | {"OMP_NUM_THREADS": "1"} | changes

    def cairn(self, *arguments: str | Path, **environment: str) -> str:
        """Run a command to its end and return its output. An exit code other than 0 is an AssertionError."""
        return self._output(self.command(*arguments), environment)

    def python(self, code: str, **environment: str) -> str:
        """Run a program with its Python and return the output."""
        return self._output([str(self.folder / "bin" / "python"), "-c", code], environment)

    def _output(self, command: Sequence[str], environment: dict[str, str]) -> str:
        done = subprocess.run(
            command, cwd=self.cwd, env=self.environment(**environment), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def install(wheel: Path, folder: Path, hidden: Sequence[str] = ()) -> Installed:
    """Install a wheel into a new virtual environment in an empty folder.

    `hidden`: modules of the dependencies that it shall not have.
    """
    made = Installed(folder / "venv", folder / "elsewhere")
    made.cwd.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made.folder)], check=True, timeout=120)
    _pip("--python", str(made.folder / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    # A path in a .pth file is searched, but its own .pth files are not read: no editable install comes along.
    lines = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    lines += [f"import sys; sys.modules[{name!r}] = None" for name in hidden]
    (made.packages / "dependencies.pth").write_text("\n".join(lines) + "\n")
    return made


def _without_checkout() -> dict[str, str]:
    """Return this process's variables without those that lead Python to the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _pip(*arguments: str, cwd: Path) -> None:
    # With a checkout on its path, pip 26 takes the wheel's version for installed.
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], cwd=cwd, env=_without_checkout(), capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
