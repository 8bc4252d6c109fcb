"""Blobs come whole and true from whoever gives them: from many holders, slow, frozen, lying and forbidding ones too."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from dataclasses import replace

import pytest
import pytest_asyncio

from peer.store import Store
from peer.swarm import BlobFetchError
from peer.swarm.transfer.frames import BlobOp, BlobRequest, ReplyStatus, encode_size, parse_reply_prefix, parse_request
from peer.swarm.transfer.streams import StreamLimits
from peer.swarm.transport import call_name
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, blob_digest, blob_leaves, tree_hash
from tests.support.swarm_world import IMPATIENT, RUN, Member, Pool, members
from tests.support.waiting import LIMIT, NEVER, ended, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(tmp_path_factory):
    made = Pool(tmp_path_factory.mktemp("pool"))
    await made.open()
    yield made
    await made.close()


def data_of(chunks: float, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(int(chunks * CHUNK))


@pytest.mark.parametrize("chunks", [0, 0.1, 1, 1.5, 9.3])
async def test_a_blob_of_any_size_arrives_whole(pool, tmp_path, chunks):
    data = data_of(chunks)
    async with pool.borrow(2, tmp_path) as (a, b):
        digest = a.store.put(data)
        await b.fetch(digest, len(data), [a])
        assert b.store.read(digest) == data
        assert b.bad == [] and b.swarm.bytes_down >= len(data) <= a.swarm.bytes_up
        served = len(a.served)
        await b.fetch(digest, len(data), [a])  # it is there: nobody is asked
        assert len(a.served) == served


async def test_several_holders_share_the_work_and_small_blobs_pass_big_ones(pool, tmp_path):
    big, small = data_of(120), data_of(0.2, 1)
    # Nobody gives up a chunk that is held: who was held too long would be asked for little later.
    patient = StreamLimits(open_seconds=NEVER, reply_seconds=NEVER)
    async with pool.borrow(4, tmp_path, streams=patient) as (a, b, c, d):
        digest = [m.store.put(big) for m in (a, b, c)][0]
        quick = a.store.put(small)
        passed, all_asked = asyncio.Event(), asyncio.Event()

        def holding():
            """Hold every chunk of the big one until the small one is through.

            Then one is given at a time: a peer that gets little of a core gives as much as the others.
            """
            turn = asyncio.Lock()

            async def held(blob: Digest, requester) -> None:
                if blob == digest:
                    if all(m.served for m in (a, b, c)):
                        all_asked.set()
                    await passed.wait()
                    async with turn:
                        await asyncio.sleep(0.03)

            return held

        a.serve_refusal, b.serve_refusal, c.serve_refusal = holding(), holding(), holding()
        fetching = asyncio.ensure_future(d.fetch(digest, len(big), [a, b, c], seconds=NEVER))
        await ended(all_asked.wait())
        await d.fetch(quick, len(small), [a], seconds=LIMIT)  # sooner than a held chunk is given up
        assert not fetching.done()
        passed.set()
        await fetching
        assert d.store.read(digest) == big
        assert min(m.served.count(digest) for m in (a, b, c)) >= 10


async def test_peers_that_fetch_the_same_blob_give_each_other_what_they_have(pool, tmp_path):
    data = data_of(60)
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest = a.store.put(data)

        async def slowly(blob: Digest, requester) -> None:
            await asyncio.sleep(0.02)

        a.serve_refusal = slowly
        await asyncio.gather(
            b.fetch(digest, len(data), [a, c], seconds=LIMIT), c.fetch(digest, len(data), [a, b], seconds=LIMIT)
        )
        assert b.store.read(digest) == data == c.store.read(digest)
        assert b.served.count(digest) > 5 and c.served.count(digest) > 5
        assert a.served.count(digest) < 2 * 60
        assert b.bad == c.bad == []


async def test_two_fetches_of_one_blob_at_once_both_end_well(pool, tmp_path):
    data = data_of(20)
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest = a.store.put(data)
        b.store.put(data)
        await asyncio.gather(c.fetch(digest, len(data), [a]), c.fetch(digest, len(data), [b]))
        assert c.store.read(digest) == data


# -- holders that fail ---------------------------------------------------------------------------------------------


async def test_a_refusal_is_asked_again_until_it_is_lifted(pool, tmp_path):
    data = data_of(0.5)
    async with pool.borrow(2, tmp_path) as (a, b):
        digest = a.store.put(data)
        allowed = asyncio.Event()
        a.serve_refusal = lambda blob, requester: None if allowed.is_set() else "not announced"
        fetching = asyncio.ensure_future(b.fetch(digest, len(data), [a]))
        await until(lambda: len(a.served) >= 2, "it is asked again")
        assert not fetching.done() and not b.store.has(digest)
        allowed.set()
        await ended(fetching)
        assert b.bad == []


async def test_a_refusal_that_stays_is_the_reason_given_at_the_deadline(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):
        digest = a.store.put(b"secret")
        a.serve_refusal = lambda blob, requester: "not announced"
        began = time.monotonic()
        with pytest.raises(BlobFetchError, match="not announced") as e:
            await ended(b.fetch(digest, 6, [a], seconds=3))
        assert e.value.reasons == {a.key: "not announced"}
        assert time.monotonic() - began > 2.5 and len(a.served) < 50


async def test_who_does_not_hold_it_is_given_up_soon_and_nobody_is_a_reason_too(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):
        with pytest.raises(BlobFetchError, match="not held"):
            await ended(b.fetch(blob_digest(b"x"), 1, [a], seconds=NEVER))
        with pytest.raises(BlobFetchError, match="nobody"):
            await ended(b.fetch(blob_digest(b"x"), 1, [], seconds=NEVER))
        with pytest.raises(BlobFetchError, match="nobody"):
            await ended(b.fetch(blob_digest(b"x"), 1, [b], seconds=NEVER))


async def test_a_holder_that_is_not_there_costs_little_when_another_is(tmp_path):
    data = data_of(5)
    limits = replace(IMPATIENT, streams=StreamLimits(open_seconds=NEVER, reply_seconds=NEVER))
    async with members(3, tmp_path, limits=limits) as (a, b, c):
        digest = a.store.put(data)
        await b.swarm.stop()
        await ended(c.fetch(digest, len(data), [b, a], seconds=NEVER))


async def test_a_frozen_holder_does_not_hold_up_the_others(pool, tmp_path):
    data = data_of(12)
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest, thaw = [m.store.put(data) for m in (a, b)][0], asyncio.Event()
        b.serve_refusal = lambda blob, requester: thaw.wait()
        await ended(c.fetch(digest, len(data), [b, a], seconds=NEVER))
        assert c.bad == []  # slow is not hostile
        thaw.set()


async def test_a_holder_that_freezes_alone_ends_at_the_deadline_of_its_replies(pool, tmp_path):
    async with pool.borrow(2, tmp_path, streams=StreamLimits(open_seconds=30, reply_seconds=1)) as (a, b):
        digest, thaw = a.store.put(b"x"), asyncio.Event()
        a.serve_refusal = lambda blob, requester: thaw.wait()
        with pytest.raises(BlobFetchError, match="no answer in"):
            await ended(b.fetch(digest, 1, [a], seconds=NEVER))
        thaw.set()


async def test_a_wrong_chunk_drops_its_sender_at_once_and_the_blob_still_comes(pool, tmp_path):
    data = data_of(20)
    async with pool.borrow(4, tmp_path) as (a, b, c, d):
        digest = [m.store.put(data) for m in (a, b, c)][0]
        real = b.store.read_chunk
        lies = []

        def one_bit(blob: Digest, index: int) -> bytes:
            lies.append(index)
            chunk = bytearray(real(blob, index))
            chunk[-1] ^= 1
            return bytes(chunk)

        b.store.read_chunk = one_bit
        await d.fetch(digest, len(data), [b, a, c])
        assert d.store.read(digest) == data
        assert [peer for peer, _ in d.bad] == [b.key] and "chunk" in d.bad[0][1]
        assert len(lies) <= 5


async def test_an_interrupted_fetch_goes_on_where_it_stopped_also_after_a_restart(pool, tmp_path):
    data = data_of(30)
    async with pool.borrow(2, tmp_path) as (a, b):
        digest = a.store.put(data)
        left = [22]

        def so_many(blob, requester):
            left[0] -= 1
            return None if left[0] > 0 else "enough for now"

        a.serve_refusal = so_many
        fetching = asyncio.ensure_future(b.fetch(digest, len(data), [a], seconds=NEVER))

        def has_most() -> bool:
            blob = b.store.in_progress(digest)
            return left[0] < 0 and blob is not None and blob.left <= 12

        await until(has_most, "no more is given")
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        b.store.close()
        b.store = Store(b.store.folder, 1 << 40)
        await b.swarm.stop()
        await b.start_over(b.swarm.transport)
        a.serve_refusal = lambda blob, requester: None
        before = b.swarm.bytes_down
        await b.fetch(digest, len(data), [a])
        assert b.store.read(digest) == data
        assert 9 * CHUNK <= b.swarm.bytes_down - before <= 12 * CHUNK


async def test_a_holder_killed_in_the_middle_is_replaced(tmp_path):
    data = data_of(80)
    async with members(3, tmp_path) as (a, b, c):
        digest = [m.store.put(data) for m in (a, b)][0]
        a.serve_refusal = b.serve_refusal = lambda blob, requester: asyncio.sleep(0.01)
        fetching = asyncio.ensure_future(c.fetch(digest, len(data), [a, b], seconds=LIMIT))
        await until(lambda: len(a.served) >= 10)
        os.kill(a.daemon.pid, 9)
        await fetching
        assert c.store.read(digest) == data and c.bad == []


# -- lies about sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [-1, 1, CHUNK, -CHUNK, 100 * CHUNK])
async def test_a_wrong_size_in_a_header_fails_and_blames_no_honest_holder(pool, tmp_path, lie):
    data = data_of(2.5)
    async with pool.borrow(2, tmp_path) as (a, b):
        digest = a.store.put(data)
        with pytest.raises(BlobFetchError, match="size"):
            await b.fetch(digest, len(data) + lie, [a])
        assert b.bad == [] and not b.store.has(digest)


# -- a peer that breaks the framing --------------------------------------------------------------------------------


async def hostile(member: Member, answer) -> None:
    """Have this member answer blob requests with the bytes of `answer(op, index)` from now on."""

    async def serve(peer, reader, writer) -> None:
        while True:
            request = parse_request(await reader.readexactly(44))
            out = answer(request.op, request.index)
            if out is None:
                return
            writer.write(out)
            await writer.drain()

    await member.swarm.transport.accept_streams(call_name(RUN, "blob"), serve)


def reply(status: int, data: bytes, length: int | None = None) -> bytes:
    return struct.pack(">BI", status, len(data) if length is None else length) + data


@pytest.mark.parametrize(
    "lie",
    [
        lambda op, index: reply(0, b"x", 2**32 - 1),
        lambda op, index: reply(0, b"x", CHUNK + 1),
        lambda op, index: reply(3, b"x", 201),
        lambda op, index: reply(77, b""),
        lambda op, index: b"GET / HTTP/1.1\r\n\r\n" * 10,
    ],
    ids=["4 GiB", "a chunk and one", "a long reason", "an unknown status", "another protocol"],
)
async def test_replies_that_break_the_framing_are_cut_off_before_they_are_read(pool, tmp_path, lie):
    data = data_of(3)
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest = a.store.put(data)
        await hostile(b, lie)
        await c.fetch(digest, len(data), [b, a])
        assert c.store.read(digest) == data
        assert [peer for peer, _ in c.bad] == [b.key]


@pytest.mark.parametrize(
    "lie",
    [
        lambda op, index: reply(0, b""),
        lambda op, index: reply(0, b"\xff" * CHUNK),
        lambda op, index: reply(0, b"\xff" * 8),
        lambda op, index: reply(2, b""),
        lambda op, index: reply(5, b"go away"),
        lambda op, index: reply(3, b"\x1b[2J\xff\x00"),
        lambda op, index: None,
        lambda op, index: reply(0, b"x" * 10, 200_000),
    ],
    ids=["empty", "noise", "a huge size", "always absent", "bad request", "control codes", "hangs up", "half a reply"],
)
async def test_nonsense_from_one_holder_does_not_keep_the_blob_from_coming(pool, tmp_path, lie):
    data = data_of(3)
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest = a.store.put(data)
        await hostile(b, lie)
        await c.fetch(digest, len(data), [b, a])
        assert c.store.read(digest) == data
        assert a.key not in [peer for peer, _ in c.bad]
        other = a.store.put(data + b"!")
        await c.fetch(other, len(data) + 1, [b, a])


async def test_inner_nodes_passed_off_as_leaves_blame_no_honest_holder(pool, tmp_path):
    """The tree over [h(0,1), h(2,3)] has the root of the tree over four leaves: only the size tells them apart."""
    data = data_of(4)
    leaves = blob_leaves(data)
    inner = [bytes(tree_hash(leaves[:2])), bytes(tree_hash(leaves[2:]))]
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest = a.store.put(data)
        assert tree_hash(inner) == digest

        def lie(op: int, index: int) -> bytes:
            if op == BlobOp.SIZE:
                return reply(0, (2 * CHUNK).to_bytes(8, "big"))
            return reply(0, b"".join(inner)) if op == BlobOp.LEAVES else reply(0, data[:CHUNK])

        await hostile(b, lie)
        with pytest.raises(BlobFetchError):  # as the author of a header may say, who is in it with the holder
            await c.fetch(digest, 2 * CHUNK, [b, a])
        assert [peer for peer, _ in c.bad] == [b.key]
        await c.fetch(digest, len(data), [b, a])
        assert c.store.read(digest) == data
        assert [peer for peer, _ in c.bad] == [b.key]


async def test_garbage_requests_end_their_own_stream_only(pool, tmp_path):
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest = a.store.put(b"abc")
        good = BlobRequest(BlobOp.SIZE, digest).encode()
        for garbage in (b"\0" * 44, b"\xff" * 44, os.urandom(44), good[:1] + b"x" + good[2:], good[:36] + b"\xff" * 8):
            reader, writer = await b.swarm.open_blob_stream(a.key, 30)
            writer.write(good + garbage + good)
            answer = await ended(reader.read(-1))
            status, length = parse_reply_prefix(answer[:5], 8)
            assert (status, length, answer[5:13]) == (ReplyStatus.OK, 8, encode_size(3))
            assert answer[13] == ReplyStatus.BAD_REQUEST
            writer.close()
        for op in (BlobOp.CHUNK, BlobOp.LEAVES, BlobOp.HAVE):  # no such chunk, no such page: an answer, not an error
            reader, writer = await b.swarm.open_blob_stream(a.key, 30)
            writer.write(BlobRequest(op, digest, 1000).encode())
            prefix = await ended(reader.readexactly(5))
            assert prefix[0] == (ReplyStatus.BAD_REQUEST if op is BlobOp.CHUNK else ReplyStatus.OK)
            writer.close()
        await c.fetch(digest, 3, [a])


async def test_streams_are_bounded_idle_ones_end_and_who_does_not_read_is_cut_off(pool, tmp_path):
    data = data_of(8)
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest = a.store.put(data)
        streams = [await b.swarm.open_blob_stream(a.key, 30) for _ in range(10)]
        told = [asyncio.ensure_future(r.read(1)) for r, _ in streams]
        await until(lambda: sum(t.done() for t in told) >= 2, "two are refused")
        taken = [s for s, t in zip(streams, told, strict=True) if not t.done()]
        assert len(taken) == 8 and [t.result() for t in told if t.done()] == [bytes([ReplyStatus.BUSY])] * 2
        for t in told:
            t.cancel()
        await c.fetch(digest, len(data), [a])  # others are served meanwhile
        # One asks for much and never reads: after the write deadline its stream is gone.
        _, writer = taken[0]
        writer.write(b"".join(BlobRequest(BlobOp.CHUNK, digest, n % 8).encode() for n in range(400)))
        await until(lambda: not a.swarm.server.unanswered(), "all are gone: the others were idle")
        assert a.swarm.bytes_up < 300 * CHUNK
        for _, writer in streams:
            writer.close()


async def test_all_strangers_together_have_but_a_part_of_the_streams(pool, tmp_path, monkeypatch):
    data = data_of(3)
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest, server = a.store.put(data), a.swarm.server
        server.limits = replace(server.limits, strangers=2, streams=4)
        server.is_known = lambda peer: peer == c.key
        busy = asyncio.Event()
        streams = []
        for there in (1, 2, 2):
            streams.append(await b.swarm.open_blob_stream(a.key, 30))
            await until(lambda n=there: len(server.unanswered()) == n)
        assert await ended(streams[0][0].read()) == b"", "of the idle ones the first makes room for the third"
        await until(lambda: len(server.unanswered()) == 2)
        server.serve_refusal = lambda digest, peer: None if peer == c.key else waits(busy)
        for _, writer in streams[1:]:
            writer.write(BlobRequest(BlobOp.CHUNK, digest, 0).encode())
        await until(lambda: server.unanswered() == [1, 1])
        reader, last = await b.swarm.open_blob_stream(a.key, 30)
        assert await ended(reader.read(1)) == bytes([ReplyStatus.BUSY]), "none of the strangers' rests"
        await c.fetch(digest, len(data), [a])
        busy.set()
        for _, writer in [*streams, (reader, last)]:
            writer.close()


async def waits(event: asyncio.Event) -> None:
    await event.wait()


async def test_frames_refuse_what_they_must():
    request = BlobRequest(BlobOp.HAVE, blob_digest(b""), 7)
    assert parse_request(request.encode()) == request
    for prefix in (struct.pack(">BI", 0, 9), struct.pack(">BI", 3, 201), struct.pack(">BI", 6, 0)):
        with pytest.raises(MalformedError):
            parse_reply_prefix(prefix, 8)


# -- slices --------------------------------------------------------------------------------------------------------


async def test_only_the_chunks_that_are_wanted_are_fetched_and_those_are_served_to_others(pool, tmp_path):
    data = data_of(9.5)
    async with pool.borrow(3, tmp_path) as (a, b, c):
        digest = a.store.put(data)
        before = b.swarm.bytes_down
        await b.fetch(digest, len(data), [a], chunks=[0, 4, 9])
        assert b.swarm.bytes_down - before < 3 * CHUNK
        assert not b.store.has(digest) and b.store.used_bytes == int(2.5 * CHUNK)
        asked = len(a.served)
        await b.fetch(digest, len(data), [a], chunks=[4, 9])  # they are there: nobody is asked
        assert len(a.served) == asked
        # Of two who hold it in parts, each gives what it has.
        await c.fetch(digest, len(data), [b], chunks=[4])
        arriving = c.store.in_progress(digest)
        assert arriving is not None and arriving.read_chunk(4) == data[4 * CHUNK : 5 * CHUNK]
        assert b.served.count(digest) > 0 and len(a.served) == asked
        with pytest.raises(BlobFetchError):
            await c.fetch(digest, len(data), [b], seconds=1, chunks=[4, 5])
        await c.fetch(digest, len(data), [b, a])
        assert c.store.read(digest) == data and c.bad == []


async def test_slices_of_one_blob_that_are_fetched_at_once_end_well_each(pool, tmp_path):
    data = data_of(12)
    async with pool.borrow(2, tmp_path) as (a, b):
        digest = a.store.put(data)
        wanted = [[0, 1, 2], [0, 2, 3, 4], [0, 11], list(range(12))]
        await asyncio.gather(*(b.fetch(digest, len(data), [a], chunks=chunks) for chunks in wanted))
        assert b.store.read(digest) == data  # the last of them was all of it
