"""The identity on disk: read, or made on first use. It stands for the peer and its credits: nobody else may read it."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path

from peer.durable import flush_folder
from protocol.errors import IdentityError, os_reason
from protocol.identity import Identity, parse_key_file, to_key_file

log = logging.getLogger(__name__)

MAX_KEY_FILE = 4096
"""A key file is about 130 bytes; nothing longer is read."""

RESTORE_OR_RENEW = "restore it from a copy, or move it away and a new identity is made at the next start"


def load_or_make(path: Path | str) -> Identity:
    """Return the identity in `path`; make one there, durably and with mode 0600, when there is no such file.

    A key file that others can read is closed to them again, with a warning. Raises IdentityError, with the remedy, for
    a file that is damaged, not ours to read, or cannot be written.
    """
    path = Path(path).expanduser()
    try:
        return load(path, RESTORE_OR_RENEW)
    except FileNotFoundError:
        pass
    try:
        return _make(path)
    except FileExistsError:  # another process made it in between: its key is the identity
        return _load(path, RESTORE_OR_RENEW)
    except OSError as e:
        raise IdentityError(
            f"no identity can be written to {path}: {os_reason(e)}; free some disk, or name another folder"
        ) from None


def load(path: Path, remedy: str = "restore it from a copy, or name another file") -> Identity:
    """Return the identity in `path`, as `load_or_make` does. Raises FileNotFoundError, and IdentityError.

    `remedy` is for a file that is no key.
    """
    try:
        return _load(path, remedy)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise IdentityError(
            f"the key file {path} cannot be read: {os_reason(e)}; check who owns it, or name another file"
        ) from None


def _load(path: Path, remedy: str) -> Identity:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise IdentityError(f"{path} is not a file: {remedy}")
        if info.st_mode & 0o077:
            _close_to_others(path, fd, info)
        data = file.read(MAX_KEY_FILE + 1)
    try:
        if len(data) > MAX_KEY_FILE:
            raise IdentityError("it is too long for a key file")
        return parse_key_file(data.decode("ascii", errors="replace"))
    except IdentityError as e:
        raise IdentityError(f"{path}: {e}: {remedy}") from None


def _close_to_others(path: Path, fd: int, info: os.stat_result) -> None:
    """Make the file private, with a warning: the key may have been read already."""
    try:
        os.fchmod(fd, 0o600)
    except OSError:
        raise IdentityError(
            f"others can read the key file {path} (mode {stat.S_IMODE(info.st_mode):04o}) and it is not yours to "
            f"change: run `chmod 600 {path}` as its owner"
        ) from None
    log.warning(
        "others could read the key file %s (mode %04o): it is 0600 again; if anybody may have copied it, move it away "
        "and start again with a new key", path, stat.S_IMODE(info.st_mode),
    )  # fmt: skip


def _make(path: Path) -> Identity:
    """Make an identity. It is written to a draft and linked into place: a crash leaves no key file or a good one."""
    identity = Identity(secrets.token_bytes(32))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(to_key_file(identity).encode())
            file.flush()
            os.fsync(fd)
        os.link(draft, path)  # unlike rename, this fails when another process has written a key meanwhile
    finally:
        os.unlink(draft)
    flush_folder(path.parent)
    return identity
