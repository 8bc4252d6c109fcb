"""Verifies an archived checkpoint, wherever a copy of it is: folder -> state digest -> record -> finalization.

    run id     = digest of the spec in spec.signed, which names the owner's key
    state      = digest of model.safetensors = `base_state` of the record in certificate.bin
    record     = the one in the finalization in cairn.json, signed with the owner's key

The spec names the state of round 0, and no record names a run's last state. For that one, certificate.bin is the last
record, and the finalization is of it. witnesses.json has signed heartbeats of more than two thirds of its contributors
that name this state after that record.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.checkpoints.archive import (
    CERTIFICATE,
    CONFIG,
    MANIFEST,
    MAX_MANIFEST,
    MODEL,
    SPEC,
    TOKENIZER,
    WITNESSES,
    ArchivedState,
    config_json,
    parse_manifest,
)
from coordinator.errors import CoordinatorError
from protocol.chain import genesis_digest
from protocol.envelope import open_envelope
from protocol.errors import CairnError, MalformedError, ProtocolError
from protocol.ids import Digest, PeerKey, RunId
from protocol.merkle import blob_digest, leaf_hash, tree_hash
from protocol.message_codec import MessageDecoder
from protocol.messages import MAX_CERTIFICATE, Certificate, Finalization, Heartbeat, quorum
from protocol.spec import KIND, MAX_SPEC, RunSpec, open_spec
from protocol.state import state_layout
from protocol.strict_json import read_json

MAX_CONFIG = 16 * 1024 * 1024
MAX_OTHERS_SHOWN = 10
MAX_WITNESSES = 64 * 1024 * 1024

ReadFile = Callable[[str], Iterator[bytes]]
"""Reads a file of the folder by its name, in chunks of CHUNK bytes. Raises CoordinatorError."""


class VerificationError(CoordinatorError):
    """A folder that is not proved to be a state that the run's owner finalized."""


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A state that the run's owner finalized, and the run's spec. Nothing vouches for `archived.tokens`."""

    spec: RunSpec
    archived: ArchivedState


def names_state(certificate: Certificate, archived: ArchivedState) -> bool:
    """Return whether this record names the state: it is of the round that begins with it."""
    body = certificate.record.body
    return (body.round, body.parent, body.base_state) == (archived.round, archived.record, archived.state)


def ends_with_state(certificate: Certificate, archived: ArchivedState) -> bool:
    """Return whether this is the record after which the state comes."""
    return certificate.digest == archived.record and certificate.record.body.round == archived.round - 1


def verify_checkpoint(
    read_file: ReadFile, *, run: RunId | None = None, owner: PeerKey | None = None,
    names: Sequence[str] | None = (), report: Callable[[str], None] = lambda _: None,
) -> VerifiedCheckpoint:  # fmt: skip
    """Check an archived state against the run id, or the owner's key, that the caller trusts.

    `names` are those of all files in the folder; None if it cannot be listed. `report` is called with one line for
    each finding. Raises VerificationError, which says what does not hold.
    """
    checked: set[str] = set()

    def read(name: str) -> Iterator[bytes]:
        checked.add(name)
        return read_file(name)

    archived = parse_manifest(Path(), _read(read, MANIFEST, MAX_MANIFEST))
    if archived is None:
        raise VerificationError(
            f"{MANIFEST} is not that of an archived state: name a folder like checkpoints/round-000030"
        )
    spec = _spec(_read(read, SPEC, MAX_SPEC + 1024), archived, run, owner)
    layout = state_layout(spec.model.layout, spec.outer)
    report(f"run      {spec.name} ({spec.run_id}), owner's key {spec.owner}")
    _check_small(read, spec)
    state = _digest(read, layout.checkpoint_size)
    if state != archived.state:
        raise VerificationError(
            f"{MODEL} is not the state that {MANIFEST} names: its digest is {state.short}, not {archived.state.short}: "
            "it was damaged or exchanged: take another copy"
        )
    report(f"state    {state}, round {archived.round}; config and tokenizer are the run's")
    if archived.round == 0:
        if (state, archived.record) != (spec.genesis.name, genesis_digest(spec.run_id)):
            raise VerificationError(f"state {state.short} is not the one that the run's spec begins with")
        report("final    the spec, signed by the owner, names this state as the run's first")
    else:
        _check_signatures(read, spec, archived, report)
    _report_others(checked, names, report)
    return VerifiedCheckpoint(spec, archived)


def _report_others(checked: set[str], names: Sequence[str] | None, report: Callable[[str], None]) -> None:
    """Name the files that a library may load from the folder, and that nothing vouches for."""
    if names is None:
        report(f"others   not checked: whatever is there beside {', '.join(sorted(checked))}")
        return
    others = sorted(set(names) - checked)
    if others:
        shown = [n if n.isprintable() and len(n) <= 60 else ascii(n[:60]) for n in others[:MAX_OTHERS_SHOWN]]
        more = f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
        report(f"others   not checked, and no part of the state: {', '.join(shown)}{more}")


def _spec(sent: bytes, archived: ArchivedState, run: RunId | None, owner: PeerKey | None) -> RunSpec:
    """Return the spec. Only one that the trusted run id or key vouches for is parsed."""
    try:
        envelope = open_envelope(sent, KIND, limit=MAX_SPEC + 1024)
        found = RunId(blob_digest(envelope.payload))
        if run is not None and found != run:
            raise VerificationError(
                f"a checkpoint of another run: {found.short}, not {run.short} as the invite says: give that run's "
                "invite, or another checkpoint"
            )
        if owner is not None and envelope.author != owner:
            raise VerificationError(
                f"a checkpoint of a run of another owner: {str(envelope.author)[:16]}, not {str(owner)[:16]}"
            )
        if archived.run != found:
            raise VerificationError(f"{MANIFEST} names run {archived.run.short}, and {SPEC} is of run {found.short}")
        return open_spec(sent, found)
    except VerificationError:
        raise
    except CairnError as e:
        raise VerificationError(f"{SPEC} is not a signed run spec: {e}") from None


def _check_signatures(
    read_file: ReadFile, spec: RunSpec, archived: ArchivedState, report: Callable[[str], None]
) -> None:
    if not archived.final:
        raise VerificationError(
            f"round {archived.round} was not final when this copy was made: nothing is signed. Take a later copy, or "
            "an older checkpoint"
        )
    decoder = MessageDecoder(spec.run_id, spec.owner_key)
    try:
        certificate = decoder.decode_certificate(_read(read_file, CERTIFICATE, MAX_CERTIFICATE))
        final = decoder.decode(archived.final, Finalization).body
    except ProtocolError as e:
        raise VerificationError(f"the signatures do not hold: {e}") from None
    body = certificate.record.body
    if (final.record, final.round) != (certificate.digest, body.round):
        raise VerificationError(
            f"the owner signed record {final.record.short}, and {CERTIFICATE} is {certificate.digest.short}"
        )
    contributors = len(body.contributors)
    voted = f"{len(certificate.votes)} of {contributors} contributors voted for it"
    if names_state(certificate, archived):
        report(f"record   {certificate.digest}, round {body.round}, names this state as its base; {voted}")
    elif ends_with_state(certificate, archived):
        sent = _witnesses(_read(read_file, WITNESSES, MAX_WITNESSES))
        count = _count(sent, certificate, archived, decoder)
        report(f"record   {certificate.digest}, round {body.round}, the run's last; {voted}")
        report(f"state    {count} of {contributors} contributors sign that they hold it after that record")
    else:
        raise VerificationError(
            f"the record in {CERTIFICATE} does not name state {archived.state.short}: it is another's"
        )
    report("final    the owner's key signs this record as final")


def _count(sent: Sequence[bytes], certificate: Certificate, archived: ArchivedState, decoder: MessageDecoder) -> int:
    contributors, found = set(certificate.record.body.contributors), set()
    for encoded in sent:
        try:
            heartbeat = decoder.decode(encoded, Heartbeat)
        except ProtocolError as e:
            raise VerificationError(f"{WITNESSES}: a signature does not hold: {e}") from None
        if (heartbeat.body.head, heartbeat.body.state) == (archived.record, archived.state):
            found.add(heartbeat.author)
    count = len(found & contributors)
    if count < quorum(len(contributors)):
        raise VerificationError(f"{WITNESSES}: {count} of {len(contributors)} contributors hold this state: too few")
    return count


def _witnesses(data: bytes) -> list[bytes]:
    try:
        return [base64.b64decode(w, validate=True) for w in read_json(data, WITNESSES, MAX_WITNESSES)]
    except (ValueError, TypeError, binascii.Error, MalformedError):
        raise VerificationError(f"{WITNESSES} cannot be read: take another copy") from None


def _check_small(read_file: ReadFile, spec: RunSpec) -> None:
    # Byte for byte: readers of JSON differ in what they make of a key that occurs twice, or of 192.0 and 192.
    wanted = config_json(spec.model.config)
    if _read(read_file, CONFIG, MAX_CONFIG) != wanted:
        raise VerificationError(f"{CONFIG} is not the run's: take it from the spec, or another copy")
    text = _read(read_file, TOKENIZER, spec.tokenizer.size)
    if blob_digest(text) != spec.tokenizer.name:
        raise VerificationError(f"{TOKENIZER} is not the run's: take another copy")


def _digest(read_file: ReadFile, size: int) -> Digest:
    """Return the blob digest of the model's file, read once in chunks. Raises VerificationError for a wrong size."""
    leaves, had = [], 0
    for chunk in read_file(MODEL):
        leaves.append(leaf_hash(chunk))
        had += len(chunk)
        if had > size:
            break
    if had != size:
        raise VerificationError(
            f"{MODEL} has {'more than ' if had > size else ''}{had:,} bytes, not {size:,}: take another copy"
        )
    return tree_hash(leaves)


def _read(read_file: ReadFile, name: str, limit: int) -> bytes:
    data = b""
    for chunk in read_file(name):
        data += chunk
        if len(data) > limit:
            raise VerificationError(f"{name} is larger than {limit:,} bytes: not that of an archived state")
    return data
