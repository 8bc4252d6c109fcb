"""Peers on real connections reduce a round: each part comes out the same wherever it is made, and few bytes move."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.shard_reducer import ShardReducer
from peer.node.tasks import Tasks
from protocol.codec import make_codec
from protocol.ids import Digest, PeerKey, Round
from protocol.layout import Layout
from protocol.merkle import CHUNK
from protocol.message_codec import KeySigner
from protocol.messages import RoundRecord, Signed, UpdateHeader
from protocol.outer import Contribution
from protocol.reduce import Reduction
from protocol.reduce_plan import committees, shard_count
from protocol.rounds.events import BlobHeld, ShardReduced
from protocol.spec import CodecSpec, OuterSpec
from tests.support.swarm_world import RUN, Member, Pool
from tests.support.waiting import LIMIT, ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAYOUT = Layout.of({"a": (700, 1000), "b": (33,), "c": (900, 1300)})
SPEC = CodecSpec(kind="int8")
CODEC = make_codec(SPEC, LAYOUT)
REDUCTION = Reduction(make_codec(SPEC, LAYOUT))
PARENT = Digest(bytes(32))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(tmp_path_factory):
    made = Pool(tmp_path_factory.mktemp("pool"))
    await made.open()
    yield made
    await made.close()


def update(author: PeerKey) -> bytes:
    noise = torch.Generator().manual_seed(author[0])
    blob = CODEC.encode({t.name: torch.randn(t.shape, generator=noise) for t in LAYOUT.tensors})
    return CODEC.with_author(blob, author)


def header(member: Member, blob: Digest) -> Signed[UpdateHeader]:
    body = UpdateHeader(RUN, Round(0), PARENT, PARENT, 0, 0, 1 + member.key[0] % 3, 1, blob, CODEC.size, 5.0, b"")
    return KeySigner(member.identity).sign(body)


@dataclass
class Source:
    """A swarm as a source of slices, without relays."""

    fetch_blob: Any

    def providers(self, holders=(), *, state=None) -> list[PeerKey]:
        return list(holders)

    @property
    def relay(self) -> Source:
        return self

    def relays_from(self, author: PeerKey) -> list[PeerKey]:
        return []


class Driver:
    """One member's `ShardReducer`, over its own swarm and store."""

    def __init__(self, member: Member):
        self.member = member
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        tasks, source = Tasks(), Source(member.swarm.fetch_blob)
        updates = RoundBlobFetcher(
            member.store, source, CODEC, deadline_seconds=2 * LIMIT, post=self.answers.put_nowait, tasks=tasks,
        )  # fmt: skip
        self.reducing = ShardReducer(
            member.store, source, updates, REDUCTION, CODEC.size, OuterSpec(),
            post=self.answers.put_nowait, tasks=tasks,
        )  # fmt: skip


async def test_every_member_of_a_committee_makes_the_same_part_and_each_moves_its_share_of_bytes(
    pool: Pool, tmp_path: Path
):
    async with pool.borrow(4, tmp_path) as lent:
        blobs = {m.key: update(m.key) for m in lent}
        headers = [header(m, m.store.put(blobs[m.key])) for m in lent]
        ordered = tuple(sorted(headers, key=lambda h: h.author))
        record = KeySigner(lent[0].identity).sign(RoundRecord(RUN, Round(0), PARENT, PARENT, 0, ordered))
        parts = shard_count(4, CODEC.size)
        assert parts == 4 < CODEC.size // CHUNK
        seats = committees(PARENT, 0, record.body.contributors, parts, 2)
        drivers = {m.key: Driver(m) for m in lent}
        for part, committee in enumerate(seats):
            for key in committee:
                drivers[key].reducing.reduce(record, part, [k for k in committee if k != key])
        made: dict[int, set[Digest]] = {}
        for d in drivers.values():
            for _ in [c for c in seats if d.member.key in c]:
                answer = await ended(d.answers.get())
                assert isinstance(answer, ShardReduced) and answer.record == record.digest
                made.setdefault(answer.shard, set()).add(answer.blob)
        assert sorted(made) == list(range(parts)) and all(len(found) == 1 for found in made.values())
        # As one who has all of everything would make it.
        whole = [Contribution(h.author, h.body.windows, blobs[h.author]) for h in ordered]
        for part, (blob,) in made.items():
            one = next(m for m in lent if m.store.has(blob))
            assert one.store.read(blob) == REDUCTION.reduce(whole, OuterSpec(), parts, part)
        # A member fetched the chunks of its shards, of three updates, and not whole updates.
        for m in lent:
            mine = {i for p, seated in enumerate(seats) if m.key in seated for i in REDUCTION.chunks(parts, p)}
            room = 3 * sum(min(CHUNK, CODEC.size - i * CHUNK) for i in mine)
            assert m.swarm.bytes_down < room + 64 * 1024
            assert sum(a is not None for a in (m.store.in_progress(h.body.blob) for h in headers)) == 3

        # Everyone has every part in the end, from those who made it.
        for part, (blob,) in made.items():
            for d in drivers.values():
                if not d.member.store.has(blob):
                    d.reducing.fetch(blob, record, part, seats[part])
        for d in drivers.values():
            for _ in [c for c in seats if d.member.key not in c]:
                assert isinstance(await ended(d.answers.get()), BlobHeld)
            assert all(d.member.store.has(blob) for found in made.values() for blob in found)
        assert all(m.bad == [] for m in lent)
