"""Names of the round machine's actions as the node uses them."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import Directive
from protocol.rounds.actions import Action as MachineAction
from protocol.rounds.actions import Apply as ApplyRecord
from protocol.rounds.actions import Broadcast, DropBlob, FetchBlob, Finished, RequestChain, Resync, Send
from protocol.rounds.actions import DropReduce as CancelReduce
from protocol.rounds.actions import FetchPart as FetchShard
from protocol.rounds.actions import KeepCertificate as StoreCertificate
from protocol.rounds.actions import KeepDirective as StoreDirective
from protocol.rounds.actions import KeepFinal as StoreFinalization
from protocol.rounds.actions import MakeUpdate as RequestUpdate
from protocol.rounds.actions import Reduce as ReduceShard
from protocol.rounds.actions import Report as Notice
from protocol.rounds.policy import Policy as RoundPolicy


@dataclass(frozen=True, slots=True)
class DirectivesChanged:
    directive: Directive
    resting: bool
    policy: RoundPolicy


@dataclass(frozen=True, slots=True)
class StoreEpoch:
    epoch: int


@dataclass(frozen=True, slots=True)
class RunCompleted:
    reason: str


Action = MachineAction | DirectivesChanged | StoreEpoch | RunCompleted
__all__ = [
    "Action",
    "ApplyRecord",
    "Broadcast",
    "CancelReduce",
    "DirectivesChanged",
    "DropBlob",
    "FetchBlob",
    "FetchShard",
    "Finished",
    "Notice",
    "ReduceShard",
    "RequestChain",
    "RequestUpdate",
    "Resync",
    "RunCompleted",
    "Send",
    "StoreCertificate",
    "StoreDirective",
    "StoreEpoch",
    "StoreFinalization",
]


class Shim:
    """Derives the actions of the new interface from the old one."""

    def __init__(self):
        self.directives = None
        self.leaving = False
        self.completed = ""
        self.check_at = 0.0
        self.began = 0.0
        self.served = 0

    def extend(self, machine, event, found, now, status):
        from protocol.rounds import events

        out = []
        if isinstance(event, events.Leave):
            self.leaving = True
        for action in found:
            if not isinstance(action, Finished):
                out.append(action)
            elif self.leaving or action.at_once:
                out.append(action)
            else:
                out.append(RunCompleted(action.reason))
                self.completed, self.began, self.check_at = action.reason, now, now + 5.0
                self.served = status.bytes_up
                if machine._c.observer:
                    self.completed = ""
        if self.completed and now >= self.check_at:
            self.check_at = now + 5.0
            view = machine.summary(now)
            behind = [m for m in view.members if m.heartbeat.head != view.head]
            busy, self.served = status.bytes_up - self.served > 200_000, status.bytes_up
            if not behind and not busy or now - self.began > 600.0:
                out.append(Finished(self.completed))
        if isinstance(event, events.Applied) and not machine.orders.afresh:
            newest = machine.chain.newest
            out.append(StoreEpoch(0 if newest is None else newest.body.epoch))
        present = DirectivesChanged(machine.orders.word, machine.orders.rests, machine.orders.policy)
        if present != self.directives:
            self.directives = present
            out.append(present)
        return out


def retained_blobs(machine, now):
    return [*machine._c.own._updates, *(h.body.blob for h in machine.summary(now).headers)]
