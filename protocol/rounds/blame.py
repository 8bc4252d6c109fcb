"""Whom to blame: for a blob that breaks the codec's rules (which records cannot stand then), and for two means of one
record."""

from __future__ import annotations

from itertools import islice

from protocol.chain import Chain
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate, Signed, UpdateHeader
from protocol.rounds.blobs import PartOf, Source, contents
from protocol.rounds.context import Context
from protocol.rounds.deciding import Deciding

REPLAYED = 64
"""Records before the head, for each checkpoint kept, among which the record of a bad blob is looked for."""


def blob_bad(c: Context, d: Deciding, tip: Digest | None, blob: Digest, reason: str) -> None:
    """The author of a bad update is left out of the round, and who signed a bad part; nobody here votes for their
    record. A certified record that is applied with the blob is dropped; also one on the way to `tip`, a branch whose
    blobs are asked for.

    A reduced record stands although it lists a bad update: what is applied are its parts, and only the committee of
    some part saw what is wrong.
    """
    b = d.ballot
    signers = set() if b is None else b.signers_of(blob)
    announced = None if b is None else next((h for h in b.headers.values() if h.body.blob == blob), None)
    certified, source = _certified_with(c, blob, tip)
    # Anybody can announce a good part's digest as an update's, or sign a good update's as a part's: it is bad as that.
    claimed = announced is not None if isinstance(source, PartOf) else bool(signers) and announced is None
    if certified is not None and claimed:
        certified = source = None  # that record is as good as before
    else:
        c.blobs.condemn(blob)
    header = announced or (None if isinstance(source, PartOf) else source)
    if b is not None:
        b.blob_bad(blob)
        if header is not None and b.headers.get(header.author) is header:
            b.exclude(header.author)
        if b.reduces:
            d.reducing.bad_update(b, blob)
            for author in signers:
                d.reducing.accuse(b, author, "bad-part", f"peer {author.short} signed a part that breaks the rules")
    if header is not None:
        c.members.strike(header.author, 0 if b is None else b.number)
        c.members.discredited.strike(header.author, 0 if b is None else b.number)
    _report(c, header, certified, source, reason)
    if certified is not None:
        c.chain.condemn(certified)


def two_means(chain: Chain, certificate: Certificate) -> tuple[str, PeerKey] | None:
    """What to report of who voted for two sets of parts of one record, before a certificate that shows it is added.
    They are two branches of the chain; this is for people."""
    rival = chain.on_main(certificate.record.body.round + 1)
    if not certificate.parts or certificate.digest in chain or rival in (None, chain.root):
        return None
    other = chain.certificate(rival)
    if other.record.digest != certificate.record.digest or other.parts == certificate.parts:
        return None
    first = {v.author for v in other.votes}
    twice = [v.author for v in certificate.votes if v.author in first]
    text = f"record {certificate.record.digest.short} was certified with two means: {len(twice)} of its "
    text += f"{len(certificate.record.body.updates)} contributors voted for both, the first is {twice[0].short}"
    return text, twice[0]


def _report(
    c: Context, header: Signed[UpdateHeader] | None, certified: Digest | None, source: Source | None, reason: str
) -> None:
    author: PeerKey | None = None if header is None else header.author
    what = "a part of a mean" if isinstance(source, PartOf) else "an update"
    c.report("warning", "bad-blob", f"{what} breaks the codec's rules: {reason}", author)
    if certified is not None:
        text = f"record {certified.short} was certified with a bad {'part' if author is None else 'update'}: dropped"
        c.report("error", "bad-record", text, author)


def _certified_with(c: Context, blob: Digest, tip: Digest | None) -> tuple[Digest | None, Source | None]:
    """The record that is applied with a blob, of those that a member may still have to apply: on the head's path, or on
    the way to another tip."""
    chain, policy = c.chain, c.policy
    for branch in (chain.head, tip):
        if branch is None or branch not in chain:
            continue
        top = chain.height(branch)
        last = max(chain.height(chain.root), top - (policy.checkpoint_keep + 2) * REPLAYED)
        for record in islice(chain.ancestors(branch), top - last):
            if (source := contents(chain.certificate(record)).get(blob)) is not None:
                return record, source
    return None, None
