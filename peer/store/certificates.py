"""Certificates on disk: one file each, in the order of their rounds, each with a checksum of its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from peer.durable import flush_folder, write_durably
from peer.store.disk import disk, remove
from protocol.ids import Digest, Round, sha256

log = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{13})-([0-9a-f]{64})")


class CertificateFiles:
    """The certificates in a folder. There may be several of one round: the branches of a fork."""

    def __init__(self, folder: Path, scratch: Path):
        self._folder = folder
        self._scratch = scratch

    def append(self, data: bytes, round: Round, digest: Digest) -> None:
        """Keep a certificate of a record named `digest`. Idempotent; durable when it returns."""
        path = self._folder / f"{round:013d}-{digest.hex()}"
        if path.exists():
            return
        with disk(f"writing the certificate of round {round}"):
            write_durably(path, [sha256(data), data], scratch=self._scratch)

    def read(self) -> Iterator[bytes]:
        """Yield all certificates, by round, then digest. One that fails its checksum is removed, with a warning."""
        for path, round, _ in self._entries():
            with disk(f"reading the certificate of round {round}"):
                content = path.read_bytes()
                if sha256(content[32:]) != content[:32]:
                    remove(path)
                    log.warning("the certificate of round %d on disk was damaged and is removed: others have it", round)
                    continue
            yield content[32:]

    def drop(self, unwanted: Callable[[Round, Digest], bool]) -> int:
        """Remove the certificates whose round and record `unwanted` accepts; return their number."""
        with disk("removing old certificates"):
            old = [path for path, round, digest in self._entries() if unwanted(round, digest)]
            for path in old:
                remove(path)
            if old:
                flush_folder(self._folder)
        return len(old)

    def _entries(self) -> list[tuple[Path, Round, Digest]]:
        with disk("listing the certificates"):
            names = sorted(p.name for p in self._folder.iterdir())
        matches = [(n, m) for n in names if (m := _NAME.fullmatch(n))]
        return [(self._folder / n, Round(int(m[1])), Digest.parse(m[2])) for n, m in matches]
