"""Images built and run without an engine: a bare Debian by debootstrap, overlays, chroot, namespaces. Needs root.

Each process is the first of a process namespace, with its own mounts: they end with it, and it ends with the test.
Debian stands for every base: for `python:3.X-slim-SUITE` with its own Python, in a virtual environment at /usr/local;
for one with CUDA without CUDA.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.dockerfile import Stage, context_names, parse
from tests.support.waiting import wait_until
from tests.support.wheel import ROOT, copy_files

STEP_SECONDS = 3000.0
"""A step that installs torch takes long on a machine that does much else."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

OVER_CUDA = "bookworm"
"""The Debian that stands for a base with CUDA, which is an Ubuntu."""

ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")


def why_not() -> str:
    """Why no image can be built here; "" when one can."""
    if sys.platform != "linux":
        return "chroot and overlays are Linux's"
    if os.geteuid():
        return "needs root"
    if missing := [name for name in ("debootstrap", "unshare", "nsenter", "setpriv", "ip") if not shutil.which(name)]:
        return f"{', '.join(missing)} not here: make debootstrap"
    with tempfile.TemporaryDirectory() as folder:
        script = Place.made(Path(folder)).mount([ROOT])
        done = subprocess.run(["unshare", "--mount", "--net", "sh", "-c", script], capture_output=True, text=True)
    return f"no overlay in a mount namespace: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Layers:
    """A file system that is read only: folders of which the first hides the next."""

    folders: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": PATH})

    def find(self, path: str) -> Path:
        """Return the file at a path of the root, or a folder, which has to come from one layer."""
        found = [p for folder in self.folders if (p := folder / path.lstrip("/")).exists()]
        assert found and (found[0].is_file() or len(found) == 1), f"{path} is in {len(found)} layers"
        return found[0]


@dataclass(frozen=True)
class Image:
    """The product of a Dockerfile: files, and its last stage, which says how it is run."""

    layers: Layers
    stage: Stage

    @property
    def owner(self) -> tuple[int, int]:
        """Return the user and group that it runs as."""
        user = int(self.stage.last("USER"))
        for line in self.layers.find("/etc/passwd").read_text().splitlines():
            _, _, uid, gid, *_ = line.split(":")
            if int(uid) == user:
                return user, int(gid)
        raise AssertionError(f"user {user} is not in the image's /etc/passwd")


@dataclass(frozen=True)
class Place:
    """An empty folder for a root: what is written into it, and where it is mounted."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Place:
        for name in ("written", "work", "root"):
            (folder / name).mkdir(parents=True)
        return cls(folder)

    @property
    def written(self) -> Path:
        return self.folder / "written"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def mount(self, lower: Sequence[Path]) -> str:
        """Return the shell's line that mounts the root. Nothing waits for the disk: `volatile`."""
        options = f"volatile,lowerdir={':'.join(map(str, lower))},upperdir={self.written},workdir={self.folder}/work"
        return f"mount -t overlay overlay -o {options} {self.root}"

    def files_written(self) -> set[str]:
        """Return the files that are new, changed or removed, but for those in /tmp."""
        found = {str(p.relative_to(self.written)) for p in self.written.rglob("*") if p.is_symlink() or not p.is_dir()}
        return {name for name in found if not name.startswith("tmp/")}


def within(
    place: Place,
    layers: Layers,
    command: Sequence[str],
    *,
    owner: tuple[int, int] = (0, 0),
    cwd: str = "/",
    mounts: Mapping[str, Path] = {},
    network: int | None = None,
) -> list[str]:
    """Return the argument list that runs a command as process 1 of a root.

    `mounts`: folders by their path in the root, as Docker's --volume names them; `:ro` at its end makes it read only.
    `network`: the process whose network namespace it has; None: this one's.
    """
    root = place.root
    script = [
        "set -e",
        place.mount(layers.folders),
        f"mount -t proc proc {root}/proc",
        f"mount -t tmpfs -o mode=1777,size=64m shm {root}/dev/shm",
    ]
    for target, source in mounts.items():
        path, _, option = target.partition(":")
        script += [f"mkdir -p {root}{path}", f"mount --bind -o {option or 'rw'} {source} {root}{path}"]
    # Another user has no signal for its parent's end: it is set again, so that all ends with the test.
    user = f"setpriv --reuid {owner[0]} --regid {owner[1]} --clear-groups --pdeathsig KILL"
    script.append(f'exec chroot {root} {user} env -i -C {cwd} "$@"')
    variables = [f"{name}={value}" for name, value in layers.environment.items()]
    enter = [] if network is None else ["nsenter", f"--net=/proc/{network}/ns/net"]
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return [*ENDS_WITH_US, *enter, *unshare, "sh", "-c", "\n".join(script), "sh", *variables, *command]


def pip_settings() -> tuple[dict[str, str], dict[str, Path]]:
    """Return pip's settings on this machine as variables, and the folders that they name, to be mounted."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {"PIP_CONFIG_FILE": os.devnull, "PIP_ROOT_USER_ACTION": "ignore"}
    lines = shown.stdout.splitlines()
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):  # those of the environment win
        name, _, value = line.partition("=")
        if name.startswith((":env:.", "global.")):
            found["PIP_" + name.rpartition(".")[2].upper().replace("-", "_")] = " ".join(
                ast.literal_eval(value).split()
            )
    # An index that is not reached from here is left out after one try.
    found["PIP_RETRIES"] = "1"
    named = {Path(word.removeprefix("file://")) for value in found.values() for word in value.split()}
    folders = {path if path.is_dir() else path.parent for path in named if path.is_absolute() and path.exists()}
    # An index names files beside it.
    folders = {path.parent if path.name == "simple" else path for path in folders}
    mounts = {f"{path}:ro": path for path in folders - {Path("/dev"), CERTIFICATES.parent}}
    if CERTIFICATES.exists():
        # Beside the root's own, which a step that installs ca-certificates makes without those of this machine.
        found["PIP_CERT"] = f"/run/certificates/{CERTIFICATES.name}"
        mounts["/run/certificates:ro"] = CERTIFICATES.parent
    return found, mounts


class Roots:
    """Builds images in a temporary folder. Use with `with`: at the end nothing of it is left."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cairn-images-"))
        self.folder.chmod(0o755)
        self._settings, self._mounts = pip_settings()
        self._debian: dict[str, Layers] = {}
        self._made = 0

    def __enter__(self) -> Roots:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def place(self) -> Place:
        """Return a new, empty place."""
        self._made += 1
        return Place.made(self.folder / f"place{self._made}")

    def run(self, layers: Layers, command: Sequence[str], mounts: Mapping[str, Path] = {}) -> tuple[Layers, str]:
        """Run a command as root, with this machine's network and pip's settings; return what results and its output."""
        place = self.place()
        settings = replace(layers, environment={**layers.environment, **self._settings})
        arguments = within(place, settings, command, mounts={**self._mounts, **mounts})
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=STEP_SECONDS
        )
        output = done.stdout.decode(errors="replace")
        assert done.returncode == 0, f"{shlex.join(command)}: exit code {done.returncode}\n{output[-8000:]}"
        return replace(layers, folders=(place.written, *layers.folders)), output

    def debian(self, suite: str) -> Layers:
        """Return a bare Debian that starts no services, and in which dpkg does not wait for the disk."""
        if suite not in self._debian:
            base = debootstrap(suite, self.place())
            (base / "etc/dpkg/dpkg.cfg.d/docker-apt-speedup").write_text("force-unsafe-io\n")
            (base / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
            (base / "usr/sbin/policy-rc.d").chmod(0o755)
            if CERTIFICATES.exists():
                (base / CERTIFICATES.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(CERTIFICATES, base / CERTIFICATES.relative_to("/"))
            self._debian[suite] = Layers((base,))
        return self._debian[suite]

    def base(self, image: str) -> Layers:
        """Return what stands for the image of a registry."""
        if image.startswith("nvidia/cuda:"):
            return self.debian(OVER_CUDA)
        python = re.fullmatch(r"python:(3\.\d+)-slim-([a-z]+)", image)
        assert python, f"nothing stands for {image}"
        install = (
            "apt-get update && apt-get install -y --no-install-recommends python3-venv && python3 -m venv /usr/local"
        )
        layers, _ = self.run(self.debian(python[2]), ["sh", "-c", install])
        _, version = self.run(layers, ["python", "--version"])
        assert version.startswith(f"Python {python[1]}."), f"{image}: {python[2]} has {version.strip()}"
        return layers

    def build(self, dockerfile: Path) -> Image:
        """Return the image of a Dockerfile, built as `docker build` does in the repository's root."""
        stages = parse(dockerfile.read_text())
        made: dict[str, Layers] = {}
        for stage in stages:
            if stage.base not in made:
                made[stage.base] = self.base(stage.base)
            layers = made[stage.base]
            for word, rest in stage.steps:
                layers = self._after(layers, word, rest, made)
            made[stage.name] = layers
        return Image(made[""], stages[-1])

    def _after(self, layers: Layers, word: str, rest: str, made: Mapping[str, Layers]) -> Layers:
        if word == "RUN":
            return self.run(layers, ["sh", "-c", rest])[0]
        if word == "WORKDIR":
            return self.run(layers, ["mkdir", "-p", rest])[0]
        if word == "ENV":
            known = dict(layers.environment)
            for name, value in (pair.split("=", 1) for pair in rest.split()):
                known[name] = re.sub(r"\$([A-Z]+)", lambda m: layers.environment[m[1]], value)
            return replace(layers, environment=known)
        if word == "COPY":
            *options, source, target = rest.split()
            origin = made[options[0].removeprefix("--from=")].find(source) if options else self._context() / source
            return self.run(layers, ["cp", "-rT", "/copied", target], {"/copied:ro": origin})[0]
        return layers  # says how it is run

    def _context(self) -> Path:
        folder = self.folder / "context"
        if not folder.exists():
            names = context_names((ROOT / ".dockerignore").read_text())
            copy_files(folder, lambda path: path.parts[0] in names)
        return folder

    def volume(self, image: Image) -> Path:
        """Return a new volume, as an engine makes it: with what the image has there, and its owner."""
        place = self.place()
        source = image.layers.find(image.stage.last("VOLUME"))
        subprocess.run(["cp", "-aT", str(source), str(place.root)], check=True)
        return place.root


def debootstrap(suite: str, place: Place) -> Path:
    """Return a folder with a minimal Debian."""
    (place.folder / "nothing").mkdir()
    script = f"{place.mount([place.folder / 'nothing'])} && debootstrap --variant=minbase {suite} {place.root}"
    command = [*ENDS_WITH_US, "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STEP_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return place.written


@contextmanager
def loopback() -> Iterator[int]:
    """Make a network of loopback alone, whose ports are all free; yield the process that holds it."""
    command = [*ENDS_WITH_US, "unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout and holder.stdout.readline() == b"up\n"
            yield holder.pid
        finally:
            holder.kill()


class Container:
    """An image that runs with a volume. Use with `with`: at the end it is killed, if it still runs."""

    def __init__(
        self,
        roots: Roots,
        image: Image,
        arguments: Sequence[str],
        volume: Path,
        *,
        network: int,
        mounts: Mapping[str, Path] = {},
    ):
        self.image = image
        self.place = roots.place()
        self.output = self.place.folder / "output"
        home = image.stage.last("VOLUME")
        layers = replace(image.layers, environment={**image.layers.environment, "HOME": home})
        self._variables = [f"{name}={value}" for name, value in layers.environment.items()]
        command = within(
            self.place, layers, [*image.stage.words("ENTRYPOINT"), *arguments], owner=image.owner,
            cwd=image.stage.last("WORKDIR"), mounts={home: volume, **mounts}, network=network,
        )  # fmt: skip
        with open(self.output, "wb") as out:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        first = self._children()
        self._process.kill()  # and with it all of its process namespace
        self._process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first), "the end of its processes")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return self.output.read_text(errors="replace")

    def _children(self) -> list[str]:
        pid = self._process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if self.running else []

    def _first(self) -> int:
        """Return the process that is 1 inside."""
        first = wait_until(self._children, "the container's first process")[0]
        root = Path(f"/proc/{first}/root")
        wait_until(lambda: root.readlink() != Path("/"), "its root")
        return int(first)

    def execute(self, command: Sequence[str], seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as `docker exec` does."""
        user, group = map(str, self.image.owner)
        enter = ["nsenter", "--target", str(self._first()), "--mount", "--pid", "--net", "--root", "--wd"]
        enter += ["--setuid", user, "--setgid", group, "env", "-i", *self._variables]
        return subprocess.run(
            [*ENDS_WITH_US, *enter, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )

    def healthy(self) -> bool:
        """Return whether the image's health check succeeds."""
        assert self.running, self.log()
        return self.execute(self.image.stage.words("HEALTHCHECK")).returncode == 0

    def stop(self, seconds: float) -> int:
        """Stop it as `docker stop` does; return its exit code."""
        os.kill(self._first(), signal.Signals[self.image.stage.last("STOPSIGNAL")])
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Wait for its end; return its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs\n{self.log()}") from None
