"""The certificates of rounds that a rollback leaves stay with the coordinator, whose receipts of them stay true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from peer.store import Store
from protocol.chain import genesis_digest
from protocol.ids import Round
from protocol.message_codec import MessageDecoder, encode_certificate
from protocol.messages import Certificate, Directive, Rollback
from tests.support.coordinator_fakes import back_to
from tests.support.observer_world import LIMITS, SPEC, Observed

LAST = 2
"""The last round that the rollback keeps."""


class RolledBack(Observed):
    """An observer with six rounds in its store, of which the chain has dropped the last three by a rollback."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.store = cast(Any, self.node).store = Store(folder / "store", 10**6)
        self.rounds(6, {1: 2})
        self.left: list[Certificate] = self.made.certificates[LAST + 1 :]
        for c in self.made.certificates:
            self.store.append_certificate(encode_certificate(c), c.record.body.round, c.digest)
        encoded = back_to(SPEC, self.made.certificates[LAST].digest, LAST)
        directive = MessageDecoder(SPEC.run_id, SPEC.owner_key).decode(encoded, Directive)
        assert self.chain.add_directive(directive) and directive.body.rollback is not None
        self.back: Rollback = directive.body.rollback

    async def keep(self) -> None:
        await self.view.keep_abandoned(Round(5), self.left[-1].digest, self.back)

    def sweep(self) -> None:
        assert self.store.drop_certificates(lambda _, digest: digest not in self.chain)

    def found(self) -> list[Certificate | None]:
        return [self.view.certificate(c.digest) for c in self.left]


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[RolledBack]:
    o = RolledBack(tmp_path)
    with o.store:
        yield o


async def test_what_a_rollback_leaves_is_kept_though_the_store_is_swept(observer: RolledBack):
    o = observer
    assert o.found() == [None] * 3
    await o.keep()
    o.sweep()
    await o.keep()  # as after a crash: now from what is kept
    assert o.found() == o.left
    assert [v.name for v in sorted((o.store.folder / "values").iterdir())] == sorted(c.digest.hex() for c in o.left)
    assert o.view.certificate(o.made.certificates[LAST].digest) == o.made.certificates[LAST]


async def test_a_certificate_that_is_not_there_any_more_is_said(observer: RolledBack, caplog):
    o = observer
    o.store.drop_certificates(lambda round, _: round == 4)
    await o.keep()
    assert o.found() == [None, None, o.left[-1]]
    assert "rollback 1 leaves rounds 3 to 4, of which no certificates are kept" in caplog.text


async def test_a_damaged_one_is_none_and_is_written_again(observer: RolledBack, caplog):
    o = observer
    await o.keep()
    first, second, _ = (c.digest.hex() for c in o.left)
    o.store.write_value(first, b"x" * 100)
    o.store.write_value(second, encode_certificate(o.left[0]))
    assert o.found() == [None, None, o.left[2]]
    assert caplog.text.count("the kept certificate of record") == 2
    assert [await o.view.encoded_certificate(c.digest) for c in o.left] == [None, None, encode_certificate(o.left[2])]
    await o.keep()
    assert o.found() == o.left


async def test_a_certificate_older_than_the_tree_is_read_from_the_store(tmp_path: Path):
    limits = replace(LIMITS, max_records=4)
    o = Observed(tmp_path, limits)
    with Store(tmp_path / "store", 10**6) as store:
        cast(Any, o.node).store = store
        o.rounds(420, {1: 2})  # the tree keeps a few hundred, whatever its limits say
        made = o.made.certificates
        for c in made:
            store.append_certificate(encode_certificate(c), c.record.body.round, c.digest)
        root = [c.digest for c in made].index(o.chain.root)
        assert root >= 2, "rounds 0 and 1 are below the root, which has no certificate in memory"
        assert [o.view.certificate(c.digest) for c in made[: root + 2]] == made[: root + 2]
        for c in made[: root + 2]:
            assert await o.view.encoded_certificate(c.digest) == encode_certificate(c)
        assert o.view.certificate(genesis_digest(SPEC.run_id)) is None
        store.drop_certificates(lambda round, _: round == 1)
        assert o.view.certificate(made[1].digest) is None
