"""The audits of a run, as the chain has them: reports, convictions, and their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.coordinator_client import CoordinatorClient
from peer.store import Store
from protocol.audit_findings import ScoreRange, failed_reports, failed_scores, reports_behind
from protocol.chain import Chain
from protocol.ids import PeerKey
from protocol.message_codec import MessageDecoder
from protocol.messages import Certificate
from protocol.rounds.policy import RoundPolicy
from protocol.spec import RunSpec

PAGE = 64
"""Certificates in one request."""

STORE_BYTES = 2**40
"""The bound of a store that is only read."""


@dataclass(frozen=True, slots=True)
class Conviction:
    """A conviction: whose update of which round, the round of the record that convicts, and the windows it claimed.

    `reporters`: how many peers found it out. `measured`: the scores that were too low, in words.
    """

    author: PeerKey
    update_round: int
    decided_round: int
    windows: int
    reporters: int
    measured: str


class AuditTrail:
    """Certificates of a run, each verified like a stranger's."""

    def __init__(self, spec: RunSpec):
        self._decoder = MessageDecoder(spec.run_id, spec.owner_key)
        self._chain = Chain(spec.run_id, spec.genesis.name, RoundPolicy.of(spec).chain_limits)

    async def follow(self, client: CoordinatorClient) -> None:
        """Read what is new from the coordinator. Raises CairnError."""
        more = True
        while more:
            sent, more = await client.certificates(self._chain.head, PAGE)
            self._add(sent)

    def read_store(self, folder: Path) -> None:
        """Read the store of a peer that has ended. Raises CairnError."""
        with Store(folder, STORE_BYTES) as store:
            self._add(store.certificates())

    def _add(self, sent: Iterable[bytes]) -> None:
        for data in sent:
            self._chain.add(self._decoder.decode_certificate(data))

    def convictions(self) -> tuple[Conviction, ...]:
        """Return all convictions, the oldest first."""
        return convictions(self._path())

    def replays(self) -> dict[PeerKey, tuple[int, int]]:
        """Return how many reports of replays say of each author's updates that they passed, and that they failed."""
        return replays(self._path())

    def _path(self) -> tuple[Certificate, ...]:
        return self._chain.path(self._chain.genesis, self._chain.head)


def convictions(path: tuple[Certificate, ...]) -> tuple[Conviction, ...]:
    """Return the convictions that certificates state, oldest first."""
    found = []
    audited = {c.digest: c.record.body for c in path}
    for at, certificate in enumerate(path):
        for decision in certificate.record.body.decisions:
            if decision.convicted:
                about = audited[decision.record]
                windows = next(u.body.windows for u in about.updates if u.author == decision.author)
                failed = failed_reports(reports_behind(decision, reversed(path[: at + 1])))
                found.append(
                    Conviction(
                        decision.author, about.round, certificate.record.body.round, windows,
                        len({author for author, _ in failed}), _words(failed_scores(r for _, r in failed)),
                    )
                )  # fmt: skip
    return tuple(found)


def _words(scores: Sequence[ScoreRange]) -> str:
    """Return the scores that were too low for people: the share of equal signs, where that was one of them."""
    for s in scores:
        if s.name == "signs":
            ends = sorted({f"{s.least:.0%}", f"{s.greatest:.0%}"}, key=lambda text: float(text[:-1]))
            return f"{' to '.join(ends)} of signs agree, {s.threshold:.0%} needed"
    return "; ".join(map(str, scores))


def replays(path: tuple[Certificate, ...]) -> dict[PeerKey, tuple[int, int]]:
    """Return (passed, failed): how many reports of replays say so of each author's updates."""
    authors = {u.digest: u.author for c in path for u in c.record.body.updates}
    found: dict[PeerKey, tuple[int, int]] = {}
    for report in (r.body for c in path for r in c.record.body.reports):
        if report.check == "replay" and (author := authors.get(report.update)) is not None:
            passed, failed = found.get(author, (0, 0))
            found[author] = (passed + report.passed, failed + (not report.passed))
    return found
