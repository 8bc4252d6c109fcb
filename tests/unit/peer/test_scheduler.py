"""The scheduler of a fetch, without any network: which actions follow from which events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

from peer.swarm.transfer.actions import (
    Action,
    Answer,
    CancelAll,
    CancelRequest,
    ChunkCheck,
    DropProvider,
    EndFetch,
    OpenBlob,
    Priority,
    QueryProvider,
    RequestChunk,
    RequestSlot,
    ReserveEarly,
)
from peer.swarm.transfer.chunk_stage import ACTIVE, EARLY, UNPROVED
from peer.swarm.transfer.frames import BlobOp, BlobReply, Lost, ReplyStatus, encode_size, refusal
from peer.swarm.transfer.scheduler import HEDGE_SECONDS, PROVIDERS, STALL_SECONDS, Scheduler
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK, blob_digest, blob_leaves, chunk_count
from tests.support.long_cases import long_cases

T = TypeVar("T")

ME, A, B = (Identity(bytes([n]) * 32).key for n in (1, 2, 3))
DATA = bytes(3 * CHUNK)
DIGEST, LEAVES = blob_digest(DATA), blob_leaves(DATA)
REFUSED = refusal(ReplyStatus.REFUSED, "not announced")
MISSING = refusal(ReplyStatus.MISSING, "not held here")


def given(data: bytes) -> BlobReply:
    return BlobReply(ReplyStatus.OK, data)


class Streams:
    """No latency is known."""

    def latency(self, peer: PeerKey, priority: Priority) -> float:
        return 0.0

    def loaded_latency(self, peer: PeerKey, priority: Priority) -> float:
        return 0.0

    def has_given(self, peer: PeerKey, priority: Priority) -> bool:
        return False


class Talk:
    """A scheduler and all its actions that are not yet answered."""

    def __init__(
        self,
        providers: Sequence[PeerKey] = (A,),
        digest: Digest = DIGEST,
        size: int = len(DATA),
        deadline: float = 60.0,
    ):
        self.now, self.size = 0.0, size
        self.scheduler = Scheduler(
            ME, providers, digest, size, chunks=None, streams=Streams(),
            has=lambda index: False, here=lambda: 0, chance=random.Random(0),
        )  # fmt: skip
        self.actions: list[Action] = self.scheduler.start(self.now, deadline)

    def tell(self, action: QueryProvider | RequestSlot | RequestChunk | OpenBlob | ReserveEarly, value: object) -> None:
        """Answer an action."""
        self.actions += self.scheduler.step(Answer(action.number, value), self.now)

    def wait(self) -> float:
        """Let the time pass until something is due; return the seconds."""
        before, self.now = self.now, max(self.now, self.scheduler.wake_at)
        self.actions += self.scheduler.step(None, self.now)
        return self.now - before

    def all_of(self, kind: type[T]) -> list[T]:
        return [a for a in self.actions if isinstance(a, kind)]

    def take(self, kind: type[T], **fields: object) -> T:
        """Return the first action of this kind with these fields, which counts as answered."""
        for action in self.actions:
            if isinstance(action, kind) and all(getattr(action, name) == value for name, value in fields.items()):
                self.actions.remove(action)
                return action
        raise AssertionError(f"no {kind.__name__} {fields} in {self.actions}")

    # -- what a driver does ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Let the first provider give the leaf hashes; all chunks are missing."""
        self.tell(self.take(OpenBlob, leaves=None), None)
        self.tell(self.take(QueryProvider, op=BlobOp.LEAVES), given(b"".join(LEAVES)))
        self.tell(self.take(OpenBlob, leaves=LEAVES), range(len(LEAVES)))

    def slots(self) -> None:
        """Give every slot at once."""
        while slots := self.all_of(RequestSlot):
            for slot in slots:
                self.actions.remove(slot)
                self.tell(slot, None)

    def chunk(self, outcome: ChunkCheck | BlobReply | Lost = ChunkCheck.STORED) -> RequestChunk:
        """Answer the first request for a chunk."""
        request = self.take(RequestChunk)
        self.tell(request, outcome)
        return request


def test_a_blob_of_one_chunk_needs_no_leaf_hashes():
    t = Talk(digest=blob_digest(b"x"), size=1)
    opening = t.take(OpenBlob)
    assert opening.leaves == [bytes(blob_digest(b"x"))] and not t.actions
    t.tell(opening, [0])
    t.slots()
    assert t.chunk().index == 0
    assert t.all_of(EndFetch) == [EndFetch()]


def test_a_blob_is_fetched_from_its_leaf_hashes_to_its_last_chunk():
    t = Talk()
    t.open()
    t.slots()
    got = {t.chunk().index for _ in range(3)}
    assert got == {0, 1, 2} and t.all_of(EndFetch) == [EndFetch()]


def test_of_a_blob_that_is_here_nothing_is_requested():
    t = Talk()
    t.tell(t.take(OpenBlob, leaves=None), [])
    assert t.actions == [EndFetch()]


def test_a_few_chunks_are_requested_before_their_hashes_are_known():
    t = Talk([A, B])
    t.tell(t.take(OpenBlob), None)
    t.tell(t.take(ReserveEarly), None)
    t.slots()
    assert [r.peer for r in t.all_of(RequestChunk)] == [A] * EARLY
    assert not t.all_of(OpenBlob)


def test_who_gives_no_leaf_hashes_in_time_is_asked_beside_the_next():
    t = Talk([A, B])
    t.tell(t.take(OpenBlob), None)
    assert [q.peer for q in t.all_of(QueryProvider)] == [A]
    assert t.wait() == HEDGE_SECONDS
    asked = t.all_of(QueryProvider)
    assert [q.peer for q in asked] == [A, B]
    t.tell(asked[1], given(b"".join(LEAVES)))
    t.tell(t.take(OpenBlob), range(len(LEAVES)))
    assert CancelRequest(asked[0].number) in t.actions
    t.tell(asked[0], Lost("late"))  # a cancelled request has no effect
    assert t.all_of(RequestSlot) and t.scheduler.reasons()[A] == "not asked yet"


def test_a_refusal_is_asked_again_more_and_more_rarely_until_the_deadline():
    t = Talk(deadline=10.0)
    t.open()
    t.slots()
    waits: list[float] = []
    while not t.all_of(EndFetch):
        while t.all_of(RequestChunk):
            t.chunk(REFUSED)
        t.slots()
        waits.append(t.wait())
    pauses = [w for w in waits if w > 0.021]
    assert 20 < len(pauses) < 40 and pauses[0] < 0.08 and max(pauses) <= 0.6
    assert t.all_of(EndFetch) == [EndFetch("not in 10 s")] and t.now == 10.0
    assert t.scheduler.reasons() == {A: "not announced"}


def test_what_was_refused_at_the_same_time_counts_once():
    t = Talk()
    t.open()
    t.slots()
    for _ in range(3):
        t.chunk(MISSING)
    t.slots()
    assert not t.all_of(EndFetch) and not t.all_of(RequestChunk)


def test_without_any_provider_left_the_fetch_fails():
    t = Talk()
    t.open()
    for _ in range(50):
        t.slots()
        while t.all_of(RequestChunk):
            t.chunk(MISSING)
        if t.all_of(EndFetch):
            break
        t.wait()
    assert t.all_of(EndFetch) == [EndFetch("no provider is left")] and t.now < 5
    assert Talk([]).actions == [OpenBlob(1, len(DATA), None)]


def test_a_stream_that_broke_is_used_again_and_a_hostile_one_is_not():
    t = Talk()
    t.open()
    slot = t.take(RequestSlot)
    t.tell(slot, Lost("the stream broke"))
    t.wait()
    t.slots()
    t.chunk(Lost("a reply of 4 GiB", hostile=True))
    assert t.all_of(DropProvider) == [DropProvider(A, "a reply of 4 GiB")]
    assert t.all_of(EndFetch)


def test_a_wrong_chunk_is_reported_if_its_sender_has_the_same_size():
    t = Talk([A, B])
    t.open()
    t.slots()
    first = t.take(RequestChunk, peer=A)
    t.tell(first, ChunkCheck.WRONG)
    query = t.take(QueryProvider, op=BlobOp.SIZE)
    assert query.peer == A and not t.all_of(DropProvider)
    t.tell(query, given(encode_size(len(DATA))))
    assert [d.peer for d in t.all_of(DropProvider)] == [A]
    while first.index not in {r.index for r in t.all_of(RequestChunk) if r.peer == B}:
        assert t.wait() < 1
        t.slots()


def test_a_wrong_chunk_of_a_blob_of_another_size_is_not_its_senders_fault():
    t = Talk()
    t.open()
    t.slots()
    t.chunk(ChunkCheck.WRONG)
    t.tell(t.take(QueryProvider, op=BlobOp.SIZE), given(encode_size(len(DATA) + 1)))
    assert not t.all_of(DropProvider) and t.all_of(EndFetch)
    assert "another size" in t.scheduler.reasons()[A]


def test_a_stated_size_that_is_wrong_ends_the_fetch():
    t = Talk()
    t.open()
    t.slots()
    t.chunk(ChunkCheck.WRONG_SIZE)
    assert t.all_of(EndFetch) == [EndFetch(f"its size is not the {len(DATA):,} bytes that were stated")]


def test_before_a_provider_has_given_a_chunk_few_are_requested():
    data = bytes(20 * CHUNK)
    t = Talk([A, B], blob_digest(data), len(data))
    t.tell(t.take(OpenBlob), range(20))
    t.slots()
    assert len([r for r in t.all_of(RequestChunk) if r.peer == A]) == UNPROVED
    t.chunk()
    t.slots()
    assert len([r for r in t.all_of(RequestChunk) if r.peer == A]) > UNPROVED


CROWD = [Identity(bytes([9, n]) * 16).key for n in range(2 * PROVIDERS)]


def test_when_all_of_the_first_providers_fail_the_next_are_asked():
    """Keys that nobody can dial, however many are named first, do not hide a provider that can be."""
    t = Talk([*CROWD, A], deadline=600.0)
    answers = {BlobOp.LEAVES: b"".join(LEAVES), BlobOp.HAVE: b"\xff"}
    while not t.all_of(EndFetch):
        while t.actions and not t.all_of(EndFetch):
            match action := t.actions.pop(0):
                case QueryProvider(peer=peer, op=op):
                    t.tell(action, given(answers[op]) if peer == A else Lost("routing: not found"))
                case RequestSlot(peer=peer):
                    t.tell(action, None if peer == A else Lost("routing: not found"))
                case RequestChunk():
                    t.tell(action, ChunkCheck.STORED)
                case OpenBlob(leaves=leaves):
                    t.tell(action, range(len(LEAVES)) if leaves == LEAVES else None)
        if not t.all_of(EndFetch):
            t.wait()
    assert t.all_of(EndFetch) == [EndFetch()] and t.now < 120


@pytest.mark.parametrize("count", [ACTIVE, *long_cases(PROVIDERS)])
def test_providers_that_only_put_us_off_make_room_for_others(count: int):
    t = Talk([B, *CROWD[:count], A], deadline=600.0)
    t.open()
    t.slots()
    while A not in {r.peer for r in t.all_of(RequestChunk)}:
        assert not t.all_of(EndFetch) and t.now < count / ACTIVE * STALL_SECONDS + 1
        while t.all_of(RequestChunk):
            t.chunk(REFUSED)
        t.wait()
        for opening in t.all_of(OpenBlob):  # after the turn: what is here is kept
            t.actions.remove(opening)
            t.tell(opening, range(len(LEAVES)))
        t.slots()
    assert t.all_of(CancelAll) and t.now >= STALL_SECONDS


def answer_all(t: Talk, answers: dict[BlobOp, dict[PeerKey, BlobReply]], holders: set[PeerKey]) -> None:
    """Answer each query from `answers` and each chunk from `holders`; all else is lost."""
    while t.actions and not t.all_of(EndFetch):
        match action := t.actions.pop(0):
            case QueryProvider(peer=peer, op=op):
                t.tell(action, answers[op].get(peer, Lost("the stream broke")))
            case RequestSlot(peer=peer):
                t.tell(action, None if peer in holders or peer in answers[BlobOp.HAVE] else Lost("the stream broke"))
            case RequestChunk(peer=peer):
                t.tell(action, ChunkCheck.STORED if peer in holders else refusal(ReplyStatus.ABSENT, "not here yet"))
            case OpenBlob(leaves=leaves):
                count = chunk_count(t.size)
                t.tell(action, range(count) if leaves is not None and len(leaves) == count else None)
            case ReserveEarly():
                t.tell(action, None)


@pytest.mark.parametrize("leechers", [1, ACTIVE - 1, ACTIVE + 3])
def test_a_seeder_whose_streams_broke_is_asked_again_while_others_only_wait_for_it(leechers: int):
    data = bytes(12 * CHUNK)
    t = Talk([*CROWD[:leechers], A], blob_digest(data), len(data), deadline=7200.0)
    have = dict.fromkeys(CROWD, given(bytes(2)))
    answers = {BlobOp.LEAVES: {A: given(b"".join(blob_leaves(data)))}, BlobOp.HAVE: have}
    while t.now < 60:  # longer than its requests are repeated
        answer_all(t, answers, set())
        assert not t.all_of(EndFetch)
        t.wait()
    have[A] = given(b"\xff\x0f")
    while not t.all_of(EndFetch):
        answer_all(t, answers, {A})
        if not t.all_of(EndFetch):
            assert t.now < 180
            t.wait()
    assert t.all_of(EndFetch) == [EndFetch()]


def test_who_alone_has_the_leaf_hashes_is_asked_for_them_again_while_others_put_us_off():
    t = Talk([A, B], deadline=7200.0)
    answers = {BlobOp.LEAVES: {B: REFUSED}, BlobOp.HAVE: {}}
    while t.now < 60:
        answer_all(t, answers, set())
        t.wait()
    answers[BlobOp.LEAVES][A] = given(b"".join(LEAVES))
    while not t.all_of(EndFetch):
        answer_all(t, answers, {A})
        if not t.all_of(EndFetch):
            assert t.now < 120
            t.wait()
    assert t.all_of(EndFetch) == [EndFetch()]


def test_one_that_gives_leaf_hashes_after_it_was_given_up_is_waited_for_though_all_others_fail():
    t = Talk([A, B], deadline=7200.0)
    while t.now < 60:
        answer_all(t, {BlobOp.LEAVES: {B: REFUSED}, BlobOp.HAVE: {}}, set())
        t.wait()
    while not any(a.leaves for a in t.all_of(OpenBlob)):
        for query in t.all_of(QueryProvider):
            t.actions.remove(query)
            t.tell(query, given(b"".join(LEAVES)) if query.peer == A else REFUSED)
        t.wait()
    checked = t.take(OpenBlob)  # the check takes a while
    end = t.now + 60
    while t.now < end:
        answer_all(t, {BlobOp.LEAVES: {}, BlobOp.HAVE: {}}, set())
        assert not t.all_of(EndFetch)
        t.wait()
    t.tell(checked, range(len(LEAVES)))
    answer_all(t, {BlobOp.LEAVES: {}, BlobOp.HAVE: {}}, {A, B})
    assert t.all_of(EndFetch) == [EndFetch()]


@pytest.mark.parametrize("count", [2, ACTIVE, PROVIDERS])
def test_when_all_have_failed_the_fetch_fails_soon_though_each_would_be_asked_again(count: int):
    data = bytes(12 * CHUNK)
    t = Talk(CROWD[:count], blob_digest(data), len(data), deadline=7200.0)
    t.tell(t.take(OpenBlob), range(12))
    while not t.all_of(EndFetch):
        answer_all(t, {BlobOp.HAVE: {}}, set())
        if not t.all_of(EndFetch):
            t.wait()
    assert t.all_of(EndFetch) == [EndFetch("no provider is left")] and t.now < 2 * count


def test_a_long_check_of_what_is_on_disk_is_no_stall():
    t = Talk([A, *CROWD], deadline=600.0)
    t.now += 2 * STALL_SECONDS
    t.actions += t.scheduler.step(None, t.now)
    assert not t.all_of(CancelAll)
    t.tell(t.take(OpenBlob), range(len(LEAVES)))
    t.slots()
    assert t.all_of(RequestChunk) and not t.all_of(CancelAll)


def test_while_chunks_arrive_no_provider_is_replaced():
    data = bytes(20 * CHUNK)
    t = Talk([B, *CROWD], blob_digest(data), len(data), deadline=600.0)
    t.tell(t.take(OpenBlob), range(20))
    for _ in range(10):
        t.slots()
        t.chunk()
        t.now += STALL_SECONDS / 2
        t.wait()
    assert not t.all_of(CancelAll)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_scheduler_waits_for_something_until_it_is_over(seed: int):
    """A driver that answers at random, with all outcomes there are, comes to an end by the deadline."""
    chance = random.Random(seed)
    data = bytes(12 * CHUNK)
    t = Talk([A, B], blob_digest(data), len(data), deadline=30.0)
    failures: list[BlobReply | Lost] = [Lost("the stream broke"), REFUSED, MISSING]
    failures += [refusal(s, s.name) for s in (ReplyStatus.ABSENT, ReplyStatus.BUSY)]
    for _ in range(5000):
        if t.all_of(EndFetch):
            return
        open_ones = [a for a in t.actions if not isinstance(a, CancelRequest | CancelAll | DropProvider | EndFetch)]
        if not open_ones or chance.random() < 0.2:
            t.wait()
            continue
        action = chance.choice(open_ones)
        t.actions.remove(action)
        match action:
            case RequestSlot():
                t.tell(action, None if chance.random() < 0.9 else Lost("the stream broke"))
            case RequestChunk():
                stored = chance.choice([ChunkCheck.STORED] * 9 + [ChunkCheck.WRONG])
                t.tell(action, chance.choice([stored, *failures]))
            case QueryProvider(op=op):
                data_of = {
                    BlobOp.SIZE: encode_size(len(data)),
                    BlobOp.LEAVES: b"".join(blob_leaves(data)),
                    BlobOp.HAVE: chance.randbytes(2),
                }
                t.tell(action, given(data_of[op]) if chance.random() < 0.7 else chance.choice(failures))
            case OpenBlob(leaves=leaves):
                t.tell(action, range(12) if leaves is not None and chance.random() < 0.8 else None)
            case ReserveEarly():
                t.tell(action, None)
    pytest.fail("it goes on for ever")
