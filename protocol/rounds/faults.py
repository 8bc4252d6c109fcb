"""The attribution of faults: a blob that breaks the codec's rules, and two means of one record."""

from __future__ import annotations

from itertools import islice

from protocol.chain import Chain
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate
from protocol.rounds.blobs import BlobRole, applied_blobs
from protocol.rounds.consensus import Consensus
from protocol.rounds.context import Context

SEARCHED_RECORDS = 64
"""Records before the head, for each checkpoint kept, among which the record of an invalid blob is searched for."""


def blob_invalid(context: Context, consensus: Consensus, tip: Digest | None, blob: Digest, reason: str) -> None:
    """Leave those who announced an invalid update out of the round, and the signers of an invalid shard.

    Nobody here votes for their record. A certified record that is applied with the blob is dropped; also one on the way
    to `tip`, a branch whose blobs are requested. A reduced record stands although it lists an invalid update: its
    shards are applied, and only the committee of some shard saw what is wrong.
    """
    round_, exchange = consensus.round, consensus.exchange
    signers = set() if round_ is None or exchange is None else exchange.signers_of(blob)
    announced = [] if round_ is None else [h for h in round_.headers.values() if h.body.blob == blob]
    certified, role = _certified_with(context, blob, tip)
    if role is not None and role.is_contradicted(announced=bool(announced), attested=bool(signers)):
        certified = role = None  # that record is as good as before
    else:
        context.blobs.reject(blob)
    headers = announced or ([] if role is None or role.header is None else [role.header])
    if round_ is not None and exchange is not None:
        round_.reject(blob)
        for header in announced:
            round_.exclude(header.author)
        exchange.blob_invalid(blob, sorted(signers))
    for author in [h.author for h in headers]:
        number = 0 if round_ is None else round_.number
        context.members.late.penalise(author, number)
        context.members.distrusted.penalise(author, number)
    author = headers[0].author if headers else None
    phrase = ("an update" if role is None else role.phrase) + ("" if author is None else f" of {author.short}")
    context.notify("warning", "bad-blob", f"{phrase} breaks the codec's rules: {reason}", author)
    if certified is not None and role is not None:
        text = f"record {certified.short} was certified with a bad {role.kind}: dropped"
        context.notify("error", "bad-record", text, author)
        context.chain.mark_invalid(certified)


def conflicting_shards(chain: Chain, certificate: Certificate) -> tuple[str, PeerKey] | None:
    """Return a notice on those who voted for two sets of shards of one record, before its certificate is added.

    The two are branches of the chain like any others; the notice is for people.
    """
    rival = chain.main_chain_at(certificate.record.body.round + 1)
    if certificate.digest in chain or rival is None or rival == chain.root:
        return None
    other = chain.certificate(rival)
    if other.record.digest != certificate.record.digest or other.shards == certificate.shards:
        return None
    first = {v.author for v in other.votes}
    twice = [v.author for v in certificate.votes if v.author in first]
    text = f"record {certificate.record.digest.short} was certified with two means: {len(twice)} of its "
    text += f"{len(certificate.record.body.updates)} contributors voted for both, the first is {twice[0].short}"
    return text, twice[0]


def _certified_with(context: Context, blob: Digest, tip: Digest | None) -> tuple[Digest | None, BlobRole | None]:
    """Return the record that is applied with a blob, of those that a member may still have to apply.

    They are on the path of the head, or on the way to another tip.
    """
    chain, policy = context.chain, context.policy
    for branch in (chain.head, tip):
        if branch is None or branch not in chain:
            continue
        top = chain.height(branch)
        last = max(chain.height(chain.root), top - (policy.checkpoint_keep + 2) * SEARCHED_RECORDS)
        for record in islice(chain.ancestors(branch), top - last):
            if (role := applied_blobs(chain.certificate(record)).get(blob)) is not None:
                return record, role
    return None, None
