"""docs/vectors is what the code makes, and what a reader makes that was written from the docs alone (`plain`)."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from coordinator.admission import MAX_REQUEST, open_request
from protocol import vrf
from protocol.codec import make_codec
from protocol.compact_record import parse_compact_record
from protocol.coordinator_address import KIND, MAX_COORDINATOR_ADDRESS_ENVELOPE, open_coordinator_address
from protocol.errors import CodecError, ProtocolError, SignatureError
from protocol.ids import PeerKey, RunId
from protocol.invite import Invite
from protocol.layout import Layout
from protocol.ledger.statements import MAX_BINDING, open_bind_peer, open_binding, open_receipt
from protocol.message_codec import KINDS, MessageDecoder
from protocol.messages import MAX_CERTIFICATE, RoundRecord
from protocol.spec import KIND as SPEC_KIND
from protocol.spec import MAX_SPEC, CodecSpec, open_spec
from tests.vectors import plain, plain_codec
from tests.vectors.__main__ import FOLDER, as_text
from tests.vectors.made import VECTORS
from tests.vectors.wire_messages import SCHEMAS, fields_of, message_types

REMEDY = "run `python -m tests.vectors`, and look at the difference"
MAX_BYTES = 520_000


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def cases(name: str) -> list[dict[str, Any]]:
    return read(name)["cases"]


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4").copy()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.astype("<f4").tobytes() == b.astype("<f4").tobytes()


# -- they are the code's --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VECTORS)
def test_the_code_still_makes_the_vectors(name: str):
    assert (FOLDER / name).read_text() == as_text(VECTORS[name]()), REMEDY


def test_the_vectors_are_small_and_each_is_described():
    files = {p.name for p in FOLDER.glob("*.json")}
    assert files == set(VECTORS)
    assert sum((FOLDER / name).stat().st_size for name in files) <= MAX_BYTES
    assert files <= set(re.findall(r"\w[\w.]*\.json", (FOLDER / "README.md").read_text()))


def limits_in_docs() -> dict[str, int]:
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (\d+) \|$", (FOLDER.parent / "wire.md").read_text(), re.M)
    return {kind: int(limit) for kind, limit in rows}


def test_the_table_of_kinds_in_the_docs_is_the_code_s():
    limits = {kind.name: kind.limit for kind in KINDS.values()}
    limits |= {"receipt": 640, "bind-account": MAX_BINDING, "bind-peer": 256}
    limits |= {"run-spec": MAX_SPEC + 1024, KIND: MAX_COORDINATOR_ADDRESS_ENVELOPE, "admission-request": MAX_REQUEST}
    assert limits_in_docs() == limits
    assert f"at most {MAX_CERTIFICATE:,} bytes" in (FOLDER.parent / "wire.md").read_text().replace("\n", " ")


# -- and the second reader's: hashes ---------------------------------------------------------------------------


def test_trees_and_blobs():
    vectors = read("merkle")
    leaves = [plain.sha256(b"\0", bytes([i])) for i in range(20)]
    for case in vectors["tree_hash"]:
        assert plain.tree_hash(leaves[: case["leaves"]]).hex() == case["root"]
    for case in vectors["blob_digest"]:
        data = (bytes(range(251)) * (case["bytes"] // 251 + 1))[: case["bytes"]]
        assert plain.blob_digest(data).hex() == case["digest"]


@pytest.mark.parametrize("case", cases("layouts"), ids=lambda c: c["name"])
def test_layouts_and_states(case: dict[str, Any]):
    tensors = case["tensors"]
    assert plain.layout_digest(tensors).hex() == case["layout_digest"]
    file = plain.checkpoint({n: (shape, base64.b64decode(case["values"][n])) for n, shape in tensors})
    size = case["header_bytes"]
    assert (len(file), file[8:size].decode().rstrip(" ")) == (case["file_bytes"], case["header"])
    assert plain.blob_digest(file).hex() == case["state_digest"]


# -- messages ----------------------------------------------------------------------------------------------------


OTHER_KINDS: dict[str, Callable[[bytes, RunId, PeerKey], object]] = {
    KIND: open_coordinator_address,
    "receipt": open_receipt,
    "bind-peer": lambda encoded, run, _: open_bind_peer(encoded, run),
    "bind-account": lambda encoded, run, _: open_binding(encoded, run),
    "admission-request": lambda encoded, *_: open_request(encoded),
}
"""For each kind that is not among the swarm's messages, what opens its envelopes."""


def decoder(vectors: dict[str, Any]) -> MessageDecoder:
    return MessageDecoder(RunId.parse(vectors["run"]), PeerKey.parse(vectors["owner"]))


def draw_input(record: RoundRecord) -> bytes:
    return plain.draw_input(record.run, record.round, record.updates[0].body.epoch)


def test_the_pre_authentication_encoding():
    case = read("messages")["pae"]
    assert plain.pae(case["kind"], bytes.fromhex(case["payload"])).decode("latin-1") == case["bytes"]


@pytest.mark.parametrize("case", read("messages")["messages"], ids=lambda c: c["kind"])
def test_messages(case: dict[str, Any]):
    vectors = read("messages")
    payload = plain.payload(plain.message_name(case["kind"]), case["fields"])
    seed, key = bytes.fromhex(case["seed"]), bytes.fromhex(case["key"])
    assert payload.hex() == case["payload"]
    assert plain.envelope(case["kind"], payload, seed).hex() == case["envelope"]
    assert plain.message_digest(case["kind"], key, payload).hex() == case["digest"]
    if (open_other := OTHER_KINDS.get(case["kind"])) is not None:
        open_other(bytes.fromhex(case["envelope"]), RunId.parse(vectors["run"]), PeerKey.parse(vectors["owner"]))
        return
    signed = decoder(vectors).decode_kind(bytes.fromhex(case["envelope"]), case["kind"])
    assert (signed.author.hex(), signed.digest.hex()) == (case["key"], case["digest"])
    if isinstance(signed.body, RoundRecord):
        assert plain.verify_proof(key, draw_input(signed.body), bytes.fromhex(case["fields"]["proof"]))


def test_no_kind_is_without_a_vector():
    found = {case["kind"] for case in read("messages")["messages"]} | {SPEC_KIND}
    assert limits_in_docs().keys() - found == set()


@pytest.mark.parametrize("case", read("messages")["refused"], ids=lambda c: c["why"])
def test_messages_that_are_refused(case: dict[str, Any]):
    with pytest.raises(ProtocolError):
        decoder(read("messages")).decode_kind(bytes.fromhex(case["envelope"]), case["kind"])


def test_protobuf_in_pure_python_accepts_and_refuses_the_same():
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "test_messages"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


# -- every message of the schemas ------------------------------------------------------------------------------------


def wire_cases() -> dict[str, dict[str, Any]]:
    return {case["message"]: case for case in read("wire")["messages"]}


def test_no_message_and_no_field_of_the_schemas_is_without_a_vector():
    fields = {d.full_name: {f.name for f in d.fields} for d in message_types()}
    assert {name: set(case["fields"]) for name, case in wire_cases().items()} == fields
    assert {name.rpartition(".")[2]: {f.name for f in plain.SCHEMA[name.rpartition(".")[2]]} for name in fields} == {
        name.rpartition(".")[2]: names for name, names in fields.items()
    }


@pytest.mark.parametrize("descriptor", list(message_types()), ids=lambda d: d.name)
def test_each_message_with_all_its_fields(descriptor: Descriptor):
    case = wire_cases()[descriptor.full_name]
    data = bytes.fromhex(case["bytes"])
    assert fields_of(GetMessageClass(descriptor).FromString(data)) == case["fields"]
    assert plain.payload(descriptor.name, case["fields"]).hex() == case["bytes"]


def renumbered(schema: Any, message: str, field: str) -> Descriptor:
    """Return a message's descriptor in which one field has another number."""
    changed = FileDescriptorProto()
    schema.CopyToProto(changed)
    (found,) = (f for m in changed.message_type if m.name == message for f in m.field if f.name == field)
    found.number = 999
    pool = DescriptorPool()
    pool.Add(changed)
    return pool.FindMessageTypeByName(f"{changed.package}.{message}")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: s.package)
def test_another_number_of_any_field_is_noticed(schema: Any):
    vectors = wire_cases()
    for descriptor in schema.message_types_by_name.values():
        case = vectors[descriptor.full_name]
        for field in descriptor.fields:
            changed = GetMessageClass(renumbered(schema, descriptor.name, field.name))
            try:
                read_back = fields_of(changed.FromString(bytes.fromhex(case["bytes"])))
            except DecodeError:
                continue
            assert read_back != case["fields"], field.full_name


def test_a_compact_record():
    case = read("wire")["compact_record"]
    record = bytes.fromhex(case["record"])
    whole = next(m for m in read("messages")["messages"] if m["envelope"] == case["record"])
    assert plain.compact_record(whole["fields"], bytes.fromhex(whole["key"]), record[-64:]).hex() == case["bytes"]
    headers = [bytes.fromhex(header) for header in whole["fields"]["updates"]]
    assert parse_compact_record(bytes.fromhex(case["bytes"])).reconstruct(headers) == record


@pytest.mark.parametrize("case", read("wire")["invites"], ids=["short", "long"])
def test_invites(case: dict[str, Any]):
    assert plain.read_invite(case["text"]) == case["fields"]
    assert str(Invite.parse(case["text"])) == case["text"]


def test_a_chain_of_certificates():
    vectors = read("chain")
    run = bytes.fromhex(vectors["run"])
    parent = plain.sha256(b"cairn/v1/genesis", run).hex()
    assert parent == vectors["genesis"]
    seed = plain.genesis_seed(bytes.fromhex(parent))
    assert seed.hex() == vectors["genesis_seed"]
    for case in vectors["certificates"]:
        certificate = decoder(vectors).decode_certificate(bytes.fromhex(case["bytes"]))
        record = certificate.record
        fields = {"record": record.encoded.hex(), "votes": [v.encoded.hex() for v in certificate.votes]}
        assert plain.payload("Certificate", fields | {"shards": case["shards"]}).hex() == case["bytes"]
        assert (case["parent"], record.body.parent.hex(), record.digest.hex()) == (
            parent, parent, case["record_digest"]
        )  # fmt: skip
        shards = [bytes.fromhex(s) for s in case["shards"]]
        parent = plain.certificate_digest(record.digest, shards).hex()
        assert parent == case["certificate_digest"]
        assert plain.verify_proof(record.author, draw_input(record.body), bytes.fromhex(case["proof"]))
        seed = plain.next_seed(seed, bytes.fromhex(case["proof"]))
        assert (record.body.proof.hex(), seed.hex()) == (case["proof"], case["seed"])
    for case in vectors["refused"]:
        with pytest.raises(ProtocolError):
            decoder(vectors).decode_certificate(bytes.fromhex(case["bytes"]))


def test_the_spec():
    case = read("spec")
    canonical = case["canonical"].encode()
    assert plain.blob_digest(canonical).hex() == case["run_id"]
    # Without numbers beyond integers and short decimals, the canonical form of RFC 8785 is this.
    again = json.dumps(json.loads(canonical), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    shortest = again.replace(".0,", ",").replace(".0}", "}").replace("1e-06", "0.000001").replace("1e-08", "1e-8")
    assert shortest == case["canonical"]
    spec = open_spec(bytes.fromhex(case["envelope"]), RunId.parse(case["run_id"]))
    with pytest.raises(InvalidSignature):
        plain.verify(spec.owner_key, "run-spec", canonical, bytes(64))


# -- verifiable random outputs and seeds ------------------------------------------------------------------------------

RFC9381 = [
    (
        "8657106690b5526245a92b003bb079ccd1a92130477671f6fc01ad16f26f723f26f8a57ccaed74ee"
        "1b190bed1f479d9727d2d0f9b005a6e456a35d4fb0daab1268a1b0db10836d9826a528ca76567805",
        "90cf1df3b703cce59e2a35b925d411164068269d7b2d29f3301c03dd757876ff"
        "66b71dda49d2de59d03450451af026798e8f81cd2e333de5cdf4f3e140fdd8ae",
    ),
    (
        "f3141cd382dc42909d19ec5110469e4feae18300e94f304590abdced48aed5933bf0864a62558b3e"
        "d7f2fea45c92a465301b3bbf5e3e54ddf2d935be3b67926da3ef39226bbc355bdc9850112c8f4b02",
        "eb4440665d3891d668e7e0fcaf587f1b4bd7fbfe99d0eb2211ccec90496310eb"
        "5e33821bc613efb94db5e5b54c70a848a0bef4553a41befc57663b56373a5031",
    ),
    (
        "9bc0f79119cc5604bf02d23b4caede71393cedfbb191434dd016d30177ccbf8096bb474e53895c36"
        "2d8628ee9f9ea3c0e52c7a5c691b6c18c9979866568add7a2d41b00b05081ed0f58ee5e31b3a970e",
        "645427e5d00c62a23fb703732fa5d892940935942101e456ecca7bb217c61c45"
        "2118fec1219202a0edcf038bb6373241578be7217ba85a2687f7a0310b2df19f",
    ),
]
"""The proofs and outputs of RFC 9381's examples 16, 17 and 18, as the RFC prints them."""


def test_the_examples_of_rfc_9381():
    for case, (proof, output) in zip(read("vrf")["rfc9381"], RFC9381, strict=True):
        key, alpha = bytes.fromhex(case["key"]), bytes.fromhex(case["input"])
        assert case["proof"] == proof
        assert plain.verify_proof(key, alpha, bytes.fromhex(proof))
        assert plain.rfc9381_hash(bytes.fromhex(proof)).hex() == output
        vrf.verify(PeerKey(key), alpha, bytes.fromhex(proof))


def test_the_outputs_of_keys():
    vectors = read("vrf")
    for case in vectors["draws"]:
        key, alpha, proof = (bytes.fromhex(case[name]) for name in ("key", "input", "proof"))
        assert plain.draw_input(bytes.fromhex(vectors["run"]), case["round"], case["epoch"]) == alpha
        assert plain.verify_proof(key, alpha, proof)
        assert plain.draw_output(proof).hex() == case["output"]
        vrf.verify(PeerKey(key), alpha, proof)


@pytest.mark.parametrize("case", read("vrf")["refused"], ids=lambda c: c["why"])
def test_proofs_that_are_refused(case: dict[str, Any]):
    key, alpha, proof = (bytes.fromhex(case[name]) for name in ("key", "input", "proof"))
    assert plain.solves_vrf_equations(key, alpha, proof) == case["solves_equations"]
    assert not plain.verify_proof(key, alpha, proof)
    with pytest.raises(SignatureError):
        vrf.verify(PeerKey(key), alpha, proof)


def test_only_canonical_points_of_the_group_are_read():
    p = 2**255 - 19
    for number in (p, p + 1, p + 3, 2**255 - 1, 1 + 2**255, p - 1 + 2**255):
        assert plain.decode_point(number.to_bytes(32, "little")) is None
    small = [plain.decode_point(number.to_bytes(32, "little")) for number in (0, 1, p - 1)]
    assert all(point is not None and not plain.has_prime_order(point) for point in small)


def test_seeds_of_a_branch():
    vectors = read("vrf")
    run, seeds = bytes.fromhex(vectors["run"]), vectors["seeds"]
    seed = plain.genesis_seed(bytes.fromhex(seeds["genesis"]))
    assert seed.hex() == seeds["genesis_seed"]
    for case in seeds["records"]:
        alpha, proof = plain.draw_input(run, case["round"], case["epoch"]), bytes.fromhex(case["proof"])
        assert plain.verify_proof(bytes.fromhex(case["author"]), alpha, proof)
        seed = plain.next_seed(seed, proof)
        assert (plain.draw_output(proof).hex(), seed.hex()) == (case["output"], case["seed"])


# -- rounds, windows, credits -------------------------------------------------------------------------------------


def test_the_order_of_proposers_the_draw_of_committees_and_rebase_windows():
    vectors = read("rounds")
    keys = [bytes.fromhex(k) for k in vectors["keys"]]
    for n, votes in vectors["quorum"].items():
        assert 3 * votes > 2 * int(n) >= 3 * (votes - 1)
    for case in vectors["proposers"]:
        stakes, recent = dict(zip(keys, case["stakes"], strict=True)), [keys[i] for i in case["recent"]]
        assert [k.hex() for k in plain.proposers(bytes.fromhex(case["seed"]), keys, stakes, recent)] == case["order"]
    for case in vectors["committees"]:
        some, seed = keys[: case["contributors"]], bytes.fromhex(case["seed"])
        drawn = plain.committees(seed, case["attempt"], some, case["shards"], case["committee"])
        assert [[keys.index(k) for k in members] for members in drawn] == case["members"]
    for case in vectors["shard_count"]:
        assert plain.shard_count(case["contributors"], case["update_bytes"]) == case["shards"]
    for case in vectors["rebase_windows"]:
        for windows in (*case["accepted"], *case["refused"]):
            accepted = plain.accepts_rebase(case["replay_batch"], case["continues"], windows)
            assert accepted == (windows in case["accepted"])
    auto = vectors["auto"]
    for n, is_reduced in auto["reduced"].items():
        gathered = (int(n) - 1) * auto["update_bytes"]
        assert is_reduced == (gathered > 2 * (auto["committee"] * auto["update_bytes"] + auto["mean_bytes"]))


def test_the_draw_of_auditors():
    vectors = read("audits")
    stakes = {bytes.fromhex(key): stake for key, stake in vectors["stakes"].items()}
    for case in vectors["draws"]:
        drawn = plain.draw_by_stake(bytes.fromhex(case["seed"]), stakes, case["count"])
        assert [key.hex() for key in drawn] == case["keys"]


def test_the_checks_that_are_due_and_who_makes_them():
    for case in read("audits")["due"]:
        seed = bytes.fromhex(case["seed"])
        authors = [bytes.fromhex(key) for key in case["authors"]]
        stakes = dict(zip(authors, case["stakes"], strict=True))
        updates = list(zip(authors, case["windows"], case["stakes"], strict=True))
        assert plain.due_checks(seed, updates) == case["checks"]
        found = zip(authors, case["auditors"], case["jury"], case["small_jury"], strict=True)
        for author, auditors, *juries in found:
            others = {key: stake for key, stake in stakes.items() if key != author}
            drawn = plain.draw_by_stake(b"cairn/v1/auditors" + seed + author, others, 3)
            assert [authors.index(key) for key in drawn] == auditors
            for votes, seats in zip(juries, (64, 2), strict=True):
                jury, needed = plain.jury(seed, author, stakes, seats)
                assert [*(jury.get(key, 0) for key in authors), needed] == votes


def test_the_decisions_that_follow_from_reports():
    vectors, seen = read("audits")["decisions"], set()
    authors = [bytes.fromhex(key) for key in vectors["authors"]]
    stakes = dict(zip(authors, vectors["stakes"], strict=True))
    others = {key: stake for key, stake in stakes.items() if key != authors[0]}
    for case in vectors["cases"]:
        seed = bytes.fromhex(case["seed"])
        auditors = plain.draw_by_stake(b"cairn/v1/auditors" + seed + authors[0], others, 3)
        votes, needed = plain.jury(seed, authors[0], stakes, 64)
        reports = [(authors[r["by"]], r["check"], r["scores"]) for r in case["reports"]]
        said: list[dict[str, Any]] = []
        for n in range(1, len(reports) + 1):
            found = plain.decision(auditors, votes, needed, reports[:n], bool(said))
            if found is not None:
                refuted = [authors.index(key) for key in found[1]]
                is_open = not refuted and plain.may_refute(found[0], authors[0], votes, needed, stakes, reports[:n])
                said.append({"reports": n, "convicted": found[0], "refuted": refuted, "open": is_open})
        assert said == case["decisions"]
        seen.add(tuple((d["convicted"], bool(d["refuted"]), d["open"]) for d in said))
    closed, opened, refutes = (
        [(c, *rest) for c in (False, True)] for rest in ((False, False), (False, True), (True, False))
    )
    assert seen >= {(), *((one,) for one in (*closed, *refutes)), *((one, refutes[0]) for one in opened)}, seen


@pytest.mark.parametrize("case", cases("weighing"), ids=lambda c: c["name"])
def test_the_weights_of_updates(case: dict[str, Any]):
    assert plain.weigh(case["claims"], case["histories"], case["round"], case["most"]) == case["weighed"]


@pytest.mark.parametrize("case", cases("stake"), ids=lambda c: c["name"])
def test_stake_and_the_fork_choice(case: dict[str, Any]):
    tree = plain.Tree(case)
    for number, record in enumerate(case["records"], 1):
        assert tree.add(record) == record["weighed"], number
        assert tree.stakes(number) == record["stakes"], number
        assert tree.audit_stakes(number) == record["audit_stakes"], number
        assert (tree.weight(number), tree.head()) == (record["weight"], record["head"]), number


def test_windows():
    for case in cases("windows"):
        key, n = bytes.fromhex(case["key"]), case["windows"]
        counters = range(case["first"], case["first"] + len(case["assigned"]))
        assert [plain.window(case["seed"], key, c, n) for c in counters] == case["assigned"]


def test_credits():
    vectors = read("credits")
    for case in vectors["micro_credits"]:
        rule = case["flops_per_parameter_token"], case["parameters"], case["window"], case["windows"]
        assert plain.micro_credits(*rule) == case["micro_credits"]
    found = plain.balances(vectors["fold"])
    assert found == [step["balances"] for step in vectors["fold"]["steps"]]


# -- updates ------------------------------------------------------------------------------------------------------


def name_of(case: dict[str, Any]) -> str:
    return f"{case['kind']} {case['k']}"


@pytest.mark.parametrize("case", cases("codec"), ids=name_of)
def test_updates(case: dict[str, Any]):
    blob = bytes.fromhex(case["blob"])
    decoded = plain_codec.read_blob(blob, case["kind"], case["k"], case["tensors"])
    assert blob[40:72].hex() == case["author"]
    for found, values, positions in zip(decoded, case["values"], case["positions"], strict=True):
        listed = found.values if positions is None else found.values[positions]
        assert np.array_equal(listed, floats(values))
        assert positions is None or positions == found.positions
    assert [math.fsum(d.energies) for d in decoded] == case["sum_squares"]
    codec = make_codec(CodecSpec(kind=case["kind"], k=case["k"]), Layout.of({n: tuple(s) for n, s in case["tensors"]}))
    codec.check(blob)
    for edit in case["refused"]:
        bad, put = bytearray(blob), bytes.fromhex(edit["bytes"])
        bad[edit["offset"] : edit["offset"] + len(put)] = put
        with pytest.raises(plain_codec.Refused):
            plain_codec.read_blob(bytes(bad), case["kind"], case["k"], case["tensors"])
        with pytest.raises(CodecError):
            codec.check(bad)


def updates_of(case: dict[str, Any]) -> Iterator[tuple[int, list[plain_codec.Values]]]:
    for update in sorted(case["updates"], key=lambda u: u["author"]):
        blob = bytes.fromhex(update["blob"])
        yield update["windows"], plain_codec.read_blob(blob, case["kind"], case["k"], case["tensors"])


@pytest.mark.parametrize("case", cases("outer_step"), ids=lambda c: c["name"])
def test_the_outer_step(case: dict[str, Any]):
    state = {name: floats(values) for name, values in case["before"].items()}
    updates, tensors = list(updates_of(case)), case["tensors"]
    references = state.get("outer_reference_norms", np.zeros(len(tensors), np.float32))
    mean, limits = plain_codec.mean_of(updates, case["kind"], case["outer"], references.tolist())
    plain_codec.step(state, tensors, mean, case["outer"])
    if limits:
        state["outer_reference_norms"] = np.array(limits, np.float32)
    assert set(state) == set(case["after"])
    for name, values in case["after"].items():
        assert same_bits(state[name], floats(values)), name


SUMS = {"sign": "int8", "int8": "int8", "none": "none", "sparse": "sparse8"}


@pytest.mark.parametrize("case", cases("outer_step"), ids=lambda c: c["name"])
def test_the_outer_step_in_two_shards(case: dict[str, Any]):
    tensors, kind, k = case["tensors"], SUMS[case["kind"]], min(4096, 4 * case["k"])
    state = {name: floats(values) for name, values in case["before"].items()}
    whole = [np.zeros(math.prod(shape), np.float32) for _, shape in tensors]
    updates = list(updates_of(case))
    for shard, slices in enumerate(plain_codec.shard_slices(tensors, 2)):
        parts = [(w, [plain_codec.sliced(v[i], a, b) for i, a, b in slices]) for w, v in updates]
        mean, _ = plain_codec.mean_of(parts, case["kind"], case["outer"], [0.0] * len(slices))
        layout = plain_codec.shard_layout(slices, shard)
        blob = plain_codec.encode_shard(mean, layout, kind, k)
        assert blob.hex() == case["two_shards"]["blobs"][shard]
        for (i, start, stop), found in zip(slices, plain_codec.read_blob(blob, kind, k, layout), strict=True):
            whole[i][start:stop] = found.values
    plain_codec.step(state, tensors, whole, case["outer"])
    for name, values in case["two_shards"]["after"].items():
        assert same_bits(state[name], floats(values)), name
