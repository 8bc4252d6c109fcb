"""The announcements of an observer: updates that a round left out, late ones, and invalid ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cairn.announcements import AUTHORS, PER_AUTHOR, Announcements
from protocol.chain import Chain
from protocol.directives import ActiveDirectives
from protocol.ids import Digest, Round
from protocol.message_codec import KeySigner
from protocol.messages import Goodbye, RoundChanges, Signed, UpdateHeader
from protocol.rounds.policy import RoundPolicy
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import digest

SPEC = make_spec()
POLICY = RoundPolicy.of(SPEC)


class World:
    def __init__(self):
        self.maker = ChainMaker(SPEC)
        # It begins with a state of the maker's.
        self.chain = Chain(SPEC.run_id, state(0), replace(POLICY.chain_limits, max_members=64))
        self.heard = Announcements(self.chain, POLICY, lambda size: size == 100)

    def round(self, work: dict[int, int]) -> None:
        assert self.chain.add(self.maker.add(work))

    def header(self, number: int, parent: Digest | None = None, **changes: Any) -> Signed[UpdateHeader]:
        at = parent or self.chain.head
        height = self.chain.height(at) if at in self.chain else 0
        body = UpdateHeader(
            SPEC.run_id, Round(height), at, digest("state"), 1000, 1000, 1004, 1, digest("blob"), 100, 5.0, b""
        )  # fmt: skip
        return KeySigner(peer(number)).sign(replace(body, **changes))


@pytest.fixture
def world() -> World:
    made = World()
    made.round({1: 4, 2: 4})
    return made


def test_who_announced_in_time_is_known_after_the_round(world: World):
    at = world.chain.head
    header = world.header(3)
    world.heard.receive(header)
    world.heard.receive(KeySigner(peer(4)).sign(Goodbye(SPEC.run_id, 1)))  # no header
    world.round({1: 4, 2: 4})
    (found,) = world.heard.announced(at)
    assert (found.header, found.late, found.flaw) == (header, False, "")
    assert world.heard.announced(world.chain.head) == ()


def test_who_came_when_the_round_was_decided_is_late(world: World):
    at = world.chain.head
    world.round({1: 4, 2: 4})
    world.heard.receive(world.header(3, at))
    assert [a.late for a in world.heard.announced(at)] == [True]


def test_what_breaks_a_rule_is_named(world: World):
    at = world.chain.head
    world.heard.receive(world.header(1, first_window=0, rebase_window=0, end_window=4))
    world.heard.receive(world.header(3, blob_size=7))
    world.heard.receive(world.header(4, end_window=1000 + POLICY.max_update_windows + 1))
    flaws = {a.header.author: a.flaw for a in world.heard.announced(at)}
    assert "accepted already" in flaws[peer(1).key]
    assert "7 bytes" in flaws[peer(3).key] and "at most" in flaws[peer(4).key]


def test_a_rule_is_the_one_that_the_owner_has_changed_it_to(world: World, monkeypatch: pytest.MonkeyPatch):
    at, most = world.chain.head, 2 * POLICY.max_update_windows
    changes = RoundChanges(max_update_tokens=most * POLICY.window_tokens)
    monkeypatch.setattr(world.chain, "directives", lambda _: ActiveDirectives(changes=changes))
    world.heard.receive(world.header(3, end_window=1000 + most))
    world.heard.receive(world.header(4, end_window=1000 + most + 1))
    assert {a.header.author: bool(a.flaw) for a in world.heard.announced(at)} == {peer(3).key: False, peer(4).key: True}


def test_of_two_headers_for_one_round_the_first_counts(world: World):
    first = world.header(3)
    world.heard.receive(first)
    world.heard.receive(world.header(3, loss=1.0))
    assert [a.header for a in world.heard.announced(world.chain.head)] == [first]


def test_who_floods_pushes_out_its_own_only(world: World):
    honest, parents = world.header(3), []
    world.heard.receive(honest)
    for _ in range(3 * PER_AUTHOR):
        parents.append(world.chain.head)
        world.heard.receive(world.header(4))
        world.round({1: 4, 2: 4})
    announced = [[a.header.author for a in world.heard.announced(at)] for at in parents]
    flooder = [peer(4).key]
    assert announced == [[honest.author]] + (2 * PER_AUTHOR - 1) * [[]] + PER_AUTHOR * [flooder]
    for i in range(AUTHORS + 10):
        author = peer(i).key
        world.heard.receive(replace(honest, author=author))
    assert len(world.heard.announced(parents[0])) == AUTHORS
