"""An observer's view of a chain made by hand, with an archive of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cairn.swarm_view import ObserverView
from coordinator.checkpoints.archive import Archive
from peer.node.peer_table import PeerEntry
from protocol.chain import Chain, ChainLimits, genesis_digest
from protocol.ids import Digest, PeerKey
from protocol.message_codec import MessageDecoder
from tests.support.coordinator_fakes import ChainMaker, make_spec, state

SPEC = make_spec(genesis={"digest": state(0).hex(), "size": 524_288})  # a checkpoint every 5 rounds


LIMITS = ChainLimits(max_update_windows=64, max_members=8)


class FakeNode:
    """An observer whose members have every checkpoint in `offered`."""

    def __init__(self, folder: Path, chain: Chain):
        self.chain = chain
        self.membership = SimpleNamespace(decoder=MessageDecoder(SPEC.run_id, SPEC.owner_key))
        self.bus = SimpleNamespace(subscribe=lambda *_: None)
        self.held: list[Digest] = []
        self.folder = folder
        self.network = SimpleNamespace(fetch_blob=self._fetch, providers=lambda state: [], peers=self)
        self.store = SimpleNamespace(path=lambda d: folder / "blob", has=lambda d: True, read_value=lambda name: None)
        (folder / "blob").write_bytes(b"blob")
        self.fetched: list[Digest] = []
        self.present: dict[PeerKey, PeerEntry] = {}

    def entries(self) -> dict[PeerKey, PeerEntry]:
        return self.present

    async def _fetch(self, digest: Digest, size, holders, *, deadline_seconds) -> None:
        self.fetched.append(digest)

    async def keep_checkpoint(self, state: Digest) -> None:
        self.held.append(state)


class Observed:
    def __init__(self, folder: Path, limits: ChainLimits = LIMITS):
        self.made = ChainMaker(SPEC)
        self.chain = Chain(SPEC.run_id, SPEC.genesis.name, limits)
        self.node = FakeNode(folder, self.chain)
        self.archive = Archive(folder / "checkpoints", SPEC)
        (folder / "genesis").write_bytes(b"0")
        self.archive.add(
            folder / "genesis", folder / "blob", round=0, state=state(0), record=genesis_digest(SPEC.run_id), tokens=0
        )  # fmt: skip
        self.view = ObserverView(cast(Any, self.node), SPEC, self.archive)

    def rounds(self, count: int, work: dict[int, int]) -> None:
        for _ in range(count):
            self.chain.add(self.made.add(work))

    async def archive_newest(self) -> None:
        newest = self.view.unarchived_checkpoint()
        assert newest is not None
        await self.view.archive(*newest)
