"""The audits of a run, as the chain has them: reports, convictions, and their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.coordinator_client import CoordinatorClient
from peer.store import Store
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey
from protocol.message_codec import MessageDecoder
from protocol.messages import Certificate, WorkReport
from protocol.report_rule import DECIDING
from protocol.rounds.policy import RoundPolicy
from protocol.spec import RunSpec

PAGE = 64
"""Certificates in one request."""

STORE_BYTES = 2**40
"""The bound of a store that is only read."""


@dataclass(frozen=True, slots=True)
class Conviction:
    """A conviction: whose update of which round, the round of the record that convicts, the windows that it claimed.

    `measured` are the scores that were too low, in words, with the number of the reports that say so.
    """

    author: PeerKey
    update_round: int
    decided_round: int
    windows: int
    reports: int
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

    @property
    def _path(self) -> tuple[Certificate, ...]:
        return self._chain.path(self._chain.genesis, self._chain.head)

    def convictions(self) -> tuple[Conviction, ...]:
        """Return all convictions, the oldest first."""
        path = self._path
        records = {c.digest: c.record.body for c in path}
        found = []
        for body in records.values():
            for decision in body.decisions:
                if decision.convicted:
                    about = records[decision.record]
                    update = next(u for u in about.updates if u.author == decision.author)
                    failed = [r for r in self._reports(path, update.digest) if not r.passed and r.check in DECIDING]
                    found.append(
                        Conviction(
                            decision.author, about.round, body.round, update.body.windows, len(failed), _words(failed)
                        )
                    )
        return tuple(found)

    def replays(self) -> dict[PeerKey, tuple[int, int]]:
        """Return how many reports of replays say of each author's updates that they passed, and that they failed."""
        path = self._path
        authors = {u.digest: u.author for c in path for u in c.record.body.updates}
        found: dict[PeerKey, tuple[int, int]] = {}
        for report in (r.body for c in path for r in c.record.body.reports):
            if report.check in DECIDING and (author := authors.get(report.update)) is not None:
                passed, failed = found.get(author, (0, 0))
                found[author] = (passed + report.passed, failed + (not report.passed))
        return found

    @staticmethod
    def _reports(path: Sequence[Certificate], update: Digest) -> list[WorkReport]:
        return [r.body for c in path for r in c.record.body.reports if r.body.update == update]


def _words(reports: Sequence[WorkReport]) -> str:
    """Return each score that was too low: its name, its least and greatest value, and what an honest update has."""
    low: dict[str, tuple[float, list[float]]] = {}
    for score in (s for r in reports for s in r.scores if s.value < s.threshold):
        low.setdefault(score.name, (score.threshold, []))[1].append(score.value)
    return ", ".join(f"{name} {_span(values)}, honest {least:.2f} or more" for name, (least, values) in low.items())


def _span(values: Sequence[float]) -> str:
    ends = sorted({f"{min(values):.2f}", f"{max(values):.2f}"}, key=float)
    return " to ".join(ends)
