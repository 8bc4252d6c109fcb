"""A `NodeWorld` with the coordinator of its run: a real observer, archive and service, which real clients ask."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from cairn.swarm_view import ObserverView
from coordinator.authoring.resolve import SPEC
from coordinator.checkpoints.archive import Archive
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.evaluations import EvaluationLog
from coordinator.checkpoints.settings import CheckpointSettings
from coordinator.service import Coordinator, CoordinatorConfig
from peer.coordinator_client import CoordinatorClient
from peer.node.node import Node
from protocol.identity import to_key_file
from protocol.invite import Invite
from protocol.message_codec import KeySigner
from protocol.messages import Directive
from protocol.spec import sign_spec
from tests.support.node_world import NodeWorld
from tests.support.specs import OWNER


class CoordinatedWorld(NodeWorld):
    """`serve` before peers start; the coordinator may be stopped, and served again at the same address."""

    def __init__(self, folder: Path, **fields: Any):
        super().__init__(folder, **fields)
        self.invite: Invite | None = None
        self.view: ObserverView
        self.coordinator: Coordinator
        self._keeping: asyncio.Task[None] | None = None
        self._clients: list[CoordinatorClient] = []

    @property
    def archive(self) -> Archive:
        """The archived states."""
        home = self.folder / "observer"
        return Archive(home / "checkpoints", self.spec, spec_envelope=sign_spec(OWNER, self.spec).encoded)

    async def serve(self) -> None:
        """Start the coordinator, at the addresses that it had before."""
        home, port = self.folder / "observer", 0 if self.invite is None else self.invite.coordinators[0].port
        archive = self.archive
        self.view = view = ObserverView(self.observe(), self.spec, archive)
        settings = CheckpointSettings.model_validate({"evaluation": {"every": 0}})
        archiver = CheckpointArchiver(archive, EvaluationLog(home), self.spec, view, settings)
        config = CoordinatorConfig(home, listen_host="127.0.0.1", listen_port=port, page_host="127.0.0.1", page_port=0)
        self.coordinator = Coordinator(config, self.spec, sign_spec(OWNER, self.spec).encoded, OWNER, view, archiver)
        await self.coordinator.start()
        self._keeping = asyncio.create_task(view.keep_archive())
        self.invite = self.coordinator.invite()
        (home / "owner.key").write_text(to_key_file(OWNER))
        (home / "invite").write_text(f"{self.invite}\n")
        (home / "run").mkdir(exist_ok=True)
        (home / "run" / SPEC).write_bytes(sign_spec(OWNER, self.spec).encoded)

    async def stop_serving(self) -> None:
        """Stop the coordinator, as Ctrl-C does."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
            await self.coordinator.stop()
            self.nodes["observer"].leave()
            await self.running.pop("observer")

    def start(self, name: str) -> Node:
        node = super().start(name)
        assert self.invite is not None
        node.membership.client = CoordinatorClient(self.invite, timeout=5.0, attempts=1)
        self._clients.append(node.membership.client)
        return node

    async def command(self, *words: str, answer: str = "") -> str:
        """Run a `cairn` command with this answer on its standard input; return all that it prints."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cairn", *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate(answer.encode())
        return said.decode()

    async def order(self, run_status: str) -> None:
        """Let the owner pause, end or resume the run."""
        newest = self.view.directive
        sequence = 1 if newest is None else newest.body.sequence + 1
        directive = KeySigner(OWNER).sign(Directive(self.spec.run_id, sequence, run_status=run_status))
        await self.coordinator.control.accept(directive.encoded)

    async def left(self, name: str) -> None:
        """Wait until a peer has ended by itself."""
        await self.running.pop(name)

    async def close(self) -> None:
        for name in self.running:
            self.nodes[name].leave()
        await self.stop_serving()
        await super().close()
        for client in self._clients:
            await client.close()
