"""One checker for each promise of the round machine. Each raises `Broken`, saying which promise and where."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.chain import genesis_digest
from protocol.ids import Digest
from tests.simulation.committee import bad_slice, part_of
from tests.simulation.node import Node
from tests.simulation.world import World


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass(frozen=True)
class Damage:
    """The course of the honest peers from the begin of an attack on."""

    rounds: int
    """Rounds that the most advanced honest peer went up. A change of the branch may lift it."""

    seconds_a_round: float
    deepest: int
    """Most rounds that an honest peer left at once for another branch."""

    share: float
    """The attackers' part of the windows of those rounds, on the chain of an honest peer."""

    ended: bool
    """An honest peer believes that the run has reached its total."""

    victims: float
    """The part of those rounds that list the first peer."""

    honest_windows: int
    """The honest peers' windows of those rounds, on the same chain."""


def check_history(damage: Damage) -> None:
    """Check that no honest peer left more than the round under way for another branch."""
    if damage.deepest > 1:
        raise Broken(f"an honest peer left {damage.deepest} rounds for the attackers' branch")


def check_not_ended(damage: Damage) -> None:
    """Check that no honest peer believes that the run has reached its total."""
    if damage.ended:
        raise Broken("the attackers' claims ended the run")


def check_share(damage: Damage, fair: float) -> None:
    """Check that attackers got no more of the windows than their part of the keys that train alike, and a tenth."""
    if damage.share > fair + 0.1:
        raise Broken(f"attackers that are {fair:.0%} of the peers got {damage.share:.0%} of the windows")


def check_pace(damage: Damage, usual: float, factor: float) -> None:
    """Check that a round took no longer than `factor` times its usual seconds."""
    if damage.seconds_a_round > factor * usual:
        raise Broken(f"a round took {damage.seconds_a_round:.1f} s, and {usual:.1f} s without attackers")


def check_listed(damage: Damage, least: float) -> None:
    """Check that this part of the rounds, or more, list the first honest peer."""
    if damage.victims < least:
        raise Broken(f"an honest peer is listed in {damage.victims:.0%} of the rounds only")


def check_sizes(world: World) -> None:
    """Check that no container grows without bound: each machine's containers are within the bounds that it states."""
    for node in world.nodes:
        if node.alive and node.honest:
            for name, (size, bound) in node.machine.sizes().items():
                if size > bound:
                    raise Broken(f"peer {node.index}: {name} holds {size}, more than its bound of {bound}")


def check_counted_once(world: World) -> None:
    """Check that no window is counted twice on any chain, by the headers' claims and by the updates' real contents."""
    parents = {c.record.body.parent for c in world.records.values()}
    for tip in world.records:
        if tip in parents:
            continue
        seen: set[int] = set()
        ends: dict[bytes, int] = {}
        for record in reversed(world.way_to(tip)):
            body = world.records[record].record.body
            for u in body.updates:
                if u.body.first_window < ends.get(u.author, 0):
                    raise Broken(f"record {record.short} claims windows of {u.author.short} a second time")
                ends[u.author] = u.body.end_window
                content = world.contents[u.body.blob]
                # The error feedback of a dishonest peer is its own affair.
                if world.by_key[u.author].honest and not seen.isdisjoint(content):
                    raise Broken(
                        f"round {body.round}, record {record.short}: an update of peer {world.by_key[u.author].index} "
                        f"carries {len(seen & content)} windows that the chain has already"
                    )
                seen |= content


def check_parts(world: World) -> None:
    """Check that a part of a certified mean is the mean of the listed updates, and that their slices in it are good.

    Parts are exempt if more than half of their committee lie. Records are exempt if nobody honest voted for them.
    """
    for certificate in world.records.values():
        body = certificate.record.body
        if not certificate.shards or not any(world.by_key[v.author].honest for v in certificate.votes):
            continue
        for part, committee in enumerate(world.policy.exchange.committees(world.seed_after(body.parent), body)):
            if 2 * sum(not world.by_key[k].honest for k in committee) > len(committee):
                continue
            where = f"round {body.round}, record {certificate.record.digest.short}, part {part}"
            if certificate.shards[part] != part_of(body, len(certificate.shards), part):
                raise Broken(f"{where} is not the mean of its updates, and most of its committee is honest")
            for u in body.updates:
                if u.body.blob in world.bad_blobs and bad_slice(u.body.blob, len(certificate.shards)) == part:
                    raise Broken(f"{where} has a bad update in it, and most of its committee is honest")


def check_every_window(world: World, node: Node) -> None:
    """Check that every window that a peer has trained since its start is in exactly one place.

    It is accepted on the peer's chain, in an update that is still undecided, in the error feedback, or not announced
    yet.
    """
    trainer, machine = node.trainer, node.machine
    at = node.trainer_record
    if at is None or node.working or node.queue:
        return
    places: list[tuple[str, frozenset[int]]] = [
        ("feedback", frozenset(trainer.feedback)),
        ("not announced", frozenset(trainer.fresh)),
    ]
    for record in world.way_to(at):
        for u in world.records[record].record.body.updates:
            if u.author == node.key:
                places.append((f"record {record.short}", world.contents[u.body.blob]))
    for blob, parent in node.made.items():
        if parent == at:
            places.append(("undecided", world.contents[blob]))
    count = sum(len(content & trainer.trained) for _, content in places)
    together = frozenset().union(*(content for _, content in places)) & trainer.trained
    if count != len(together):
        raise Broken(f"peer {node.index} at {world.clock.now:.1f}: {count - len(together)} windows are in two places")
    if together != trainer.trained:
        lost = trainer.trained - together
        raise Broken(
            f"peer {node.index} at {world.clock.now:.1f}: {len(lost)} of its windows are lost ({machine.phase})"
        )


def check_one_state(world: World) -> None:
    """Check that all honest members at one head hold one state at any time, except devices that computed wrongly."""
    held: dict[Digest, tuple[int, Digest]] = {}
    for node in world.honest:
        at, state = node.trainer_record, node.trainer.state
        if at is None or state is None or state in world.wrong_states:
            continue
        index, other = held.setdefault(at, (node.index, state))
        if other != state:
            raise Broken(f"peers {index} and {node.index} hold different states after the same record {at.short}")


def check_shown(world: World) -> None:
    """Check that honest peers, while they train, show the state after the record that they name."""
    shown: dict[Digest, tuple[int, Digest | None]] = {}
    for node in world.honest:
        view = node.machine.summary(world.clock.now)
        if view.phase not in ("training", "exchanging") or view.state in world.wrong_states:
            continue
        index, state = shown.setdefault(view.head, (node.index, view.state))
        if state != view.state:
            raise Broken(f"peers {index} and {node.index} show different states after record {view.head.short}")


def check_words(world: World) -> None:
    """Nobody honest applies a record that breaks what the directives on its way say: written down again, plainly."""
    for node in world.honest:
        at = node.trainer_record
        if at is None or at == genesis_digest(world.run):
            continue
        way = [world.records[r] for r in reversed(world.way_to(at))]
        carried, holding = [], None
        for c in way:
            body, said = c.record.body, [a.body for a in carried]
            where = f"peer {node.index}: round {body.round}, record {c.digest.short}"
            epoch = max([a.epoch for a in said] + [0 if body.directive is None else body.directive.body.epoch])
            if any(u.body.epoch != epoch for u in body.updates):
                raise Broken(f"{where} lists an update of another epoch than {epoch}")
            if said and not set(body.contributors).isdisjoint(said[-1].banned):
                raise Broken(f"{where} lists an update of a peer that was banned before")
            most = world.policy.max_update_windows
            if holding is not None and holding.max_update_tokens is not None:
                most = holding.max_update_tokens
            if any(u.body.windows > most for u in body.updates):
                raise Broken(f"{where} lists an update of more than {most} windows")
            if body.directive is not None:
                if said and body.directive.body.precedence <= said[-1].precedence:
                    raise Broken(f"{where} carries a directive that is not newer")
                carried.append(body.directive)
            if carried and carried[-1].body.from_round <= body.round + 1:
                holding = carried[-1].body.changes


def check_words_reached(world: World) -> None:
    """Check that in the end all follow the owner's last rollback, and its finalizations since."""
    newest = world.owner.newest
    for node in world.honest:
        chain, at = node.machine.chain, node.trainer_record
        if at is None:
            continue
        if newest is not None and chain.newest_directive is not newest:
            raise Broken(f"peer {node.index} does not know the owner's last directive")
        if newest is not None and (back := newest.body.rollback) is not None:
            way = list(reversed(world.way_to(at)))
            if back.record not in way:
                raise Broken(f"peer {node.index} is on a branch that the owner has rolled back")
            after = way[way.index(back.record) + 1 :]
            first = world.records[after[0]].record.body.directive if after else None
            if after and (first is None or first.body.epoch < back.epoch):
                raise Broken(f"peer {node.index} is on rounds that the owner has rolled back")
        finals = [final for other in world.nodes for final in (other.final, other.pending)]
        for final in finals:
            if final is not None and final.body.epoch == world.owner.body.epoch and final.body.record in world.records:
                if final.body.record not in world.way_to(at):
                    raise Broken(f"peer {node.index} is not on the way of the owner's final")


def position(node: Node) -> tuple[int, Digest] | None:
    """Height and digest of what a node's trainer holds; None when it holds nothing."""
    at = node.trainer_record
    chain = node.machine.chain
    return None if at is None or at not in chain else (chain.height(at), at)


def disagreement(nodes: list[Node]) -> str | None:
    """Why these nodes do not agree on the chain within one round; None when they do."""
    places = [position(n) for n in nodes]
    if any(p is None for p in places):
        return f"peers {[n.index for n, p in zip(nodes, places, strict=True) if p is None]} hold no state"
    heights = [p[0] for p in places if p is not None]
    if max(heights) - min(heights) > 1:
        return f"heights {heights}"
    top = nodes[heights.index(max(heights))]
    for node, place in zip(nodes, places, strict=True):
        if place is not None and not top.machine.chain.is_ancestor(place[1], top.trainer_record):
            return f"peer {node.index} is on another branch than peer {top.index}"
    states = {(n.trainer_record, n.trainer.state) for n in nodes}
    if len({r for r, _ in states}) != len(states):
        return "peers hold different states after the same record"
    return None
