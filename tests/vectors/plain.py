"""A second reader of the protocol, from the docs alone: hashes, messages, assignment, credits. It imports no Cairn.

`plain_codec` has updates and the outer step.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

CHUNK = 256 * 1024


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


# -- trees (docs/wire.md, Digests) ---------------------------------------------------------------------------


def tree_hash(leaves: Sequence[bytes]) -> bytes:
    """RFC 9162 as its text says it: by recursion, split at the largest power of two below n."""
    if not leaves:
        return sha256()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return sha256(b"\1", tree_hash(leaves[:k]), tree_hash(leaves[k:]))


def blob_digest(data: bytes) -> bytes:
    return tree_hash([sha256(b"\0", data[i : i + CHUNK]) for i in range(0, len(data), CHUNK)])


# -- layouts and states (docs/codec.md, The blob; docs/checkpoints.md, The file) ------------------------------


def layout_digest(tensors: Sequence[tuple[str, Sequence[int]]]) -> bytes:
    assert [n.encode() for n, _ in tensors] == sorted(n.encode() for n, _ in tensors)
    text = ", ".join(f"[{_ascii(name)}, [{', '.join(map(str, shape))}]]" for name, shape in tensors)
    return sha256(b"cairn/v1/layout", f"[{text}]".encode("ascii"))


def checkpoint(tensors: dict[str, tuple[Sequence[int], bytes]]) -> bytes:
    """Return the file of a state: shape and little-endian fp32 of each tensor, by name, momentum included."""
    entries, data = [], b""
    for name in sorted(tensors, key=str.encode):
        shape, values = tensors[name]
        where = f"[{len(data)},{len(data) + len(values)}]"
        shown = ",".join(map(str, shape))
        entries.append(f'{_ascii(name)}:{{"dtype":"F32","shape":[{shown}],"data_offsets":{where}}}')
        data += values
    header = ("{" + ",".join(entries) + "}").encode("ascii")
    whole = (8 + len(header) + CHUNK - 1) // CHUNK * CHUNK
    return struct.pack("<Q", whole - 8) + header + b" " * (whole - 8 - len(header)) + data


def _ascii(name: str) -> str:
    return json.dumps(name, ensure_ascii=True)


# -- messages (docs/wire.md, Envelopes and Payloads; the .proto file) -----------------------------------------

WIRE = Path(__file__).resolve().parents[2] / "protocol" / "wire"
_MESSAGE = re.compile(r"^message (\w+) \{(.*?)\}", re.M | re.S)
_FIELD = re.compile(r"(?:(repeated|optional) )?(\w+) (\w+) = (\d+);")


@dataclass(frozen=True)
class Field:
    """A field of a .proto file. `label`: "repeated", "optional" or ""."""

    label: str
    type: str
    name: str
    number: int


def _schema() -> dict[str, list[Field]]:
    """Return the fields of each message in the .proto files, by ascending number."""
    found: dict[str, list[Field]] = {}
    for path in sorted(WIRE.glob("*.proto")):
        for name, body in _MESSAGE.findall(re.sub(r"//.*", "", path.read_text())):
            assert name not in found
            fields = [Field(label, type_, field, int(number)) for label, type_, field, number in _FIELD.findall(body)]
            found[name] = sorted(fields, key=lambda f: f.number)
    return found


SCHEMA = _schema()


def message_name(kind: str) -> str:
    """Return the message in the .proto files that a kind has as its payload."""
    return "".join(word.title() for word in kind.split("-"))


def payload(message: str, fields: dict[str, Any]) -> bytes:
    """Return a message in canonical form. Its bytes are hexadecimal, as the vectors have them."""
    assert set(fields) <= {f.name for f in SCHEMA[message]}, (message, set(fields))
    return b"".join(_field(f, fields[f.name]) for f in SCHEMA[message] if f.name in fields)


PACKED = {"fixed64": "Q", "float": "f", "double": "d"}


def _field(f: Field, value: Any) -> bytes:
    values = value if f.label == "repeated" else [value]
    if f.type in SCHEMA or f.type in ("bytes", "string"):
        parts = [_content(f.type, v) for v in values]
        return b"".join(_sized(f.number, part) for part in parts if part or f.label == "repeated" or f.type in SCHEMA)
    if f.type in PACKED:
        kind, parts = 5 if f.type == "float" else 1, [struct.pack(f"<{PACKED[f.type]}", v) for v in values]
    else:
        kind, parts = 0, [_varint(v) for v in values]
    if f.label == "repeated":
        return _sized(f.number, b"".join(parts)) if parts else b""
    return _varint(8 * f.number + kind) + parts[0] if f.label == "optional" or any(parts[0]) else b""


def _content(type_: str, value: Any) -> bytes:
    if type_ in SCHEMA:
        return payload(type_, value)
    return bytes.fromhex(value) if type_ == "bytes" else value.encode()


def _sized(number: int, data: bytes) -> bytes:
    return _varint(8 * number + 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def pae(kind: str, content: bytes) -> bytes:
    type_ = b"cairn/v1/" + kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(type_), type_, len(content), content)


def envelope(kind: str, content: bytes, seed: bytes) -> bytes:
    private = Ed25519PrivateKey.from_private_bytes(seed)
    signature, key = private.sign(pae(kind, content)), private.public_key().public_bytes_raw()
    return _sized(1, kind.encode()) + _sized(2, content) + _sized(3, key) + _sized(4, signature)


def verify(key: bytes, kind: str, content: bytes, signature: bytes) -> None:
    """Raise InvalidSignature unless the signature is the key's."""
    Ed25519PublicKey.from_public_bytes(key).verify(signature, pae(kind, content))


def compact_record(record: dict[str, Any], author: bytes, signature: bytes) -> bytes:
    """Return the compact record (docs/network.md, Compact records) of a round record with these fields."""
    ids = [sha256(bytes.fromhex(header))[:16].hex() for header in record["updates"]]
    content = payload("RoundRecord", record | {"updates": ids})
    return _sized(1, b"compact-record") + _sized(2, content) + _sized(3, author) + _sized(4, signature)


def message_digest(kind: str, key: bytes, content: bytes) -> bytes:
    return sha256(b"cairn/v1/digest", key, pae(kind, content))


def certificate_digest(record: bytes, shards: Sequence[bytes]) -> bytes:
    return sha256(b"cairn/v1/applied", record, sha256(b"cairn/v1/shards", *shards)) if shards else record


# -- invites (docs/wire.md, Invites and admission) ----------------------------------------------------------------

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def read_invite(text: str) -> dict[str, Any]:
    """Return the fields of an invite, as the vectors have them."""
    prefix, body = text[:7], text[7:]
    data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    assert (prefix, data[-4:]) == ("cairn1:", sha256(data[:-4])[:4])
    left = list(data[:-4])

    def take(n: int) -> bytes:
        return bytes(left.pop(0) for _ in range(n))

    def short() -> str:
        return take(take(1)[0]).decode("ascii")

    def address() -> str:
        if left[0]:
            return short()
        _, ip, port, key = take(1), take(4), take(2), take(32)
        name = b"\0\x24\x08\1\x12\x20" + key  # libp2p's form of an Ed25519 key
        number, digits = int.from_bytes(name, "big"), ""
        while number:
            number, digit = divmod(number, 58)
            digits = _BASE58[digit] + digits
        return f"/ip4/{'.'.join(map(str, ip))}/tcp/{int.from_bytes(port, 'big')}/p2p/1{digits}"

    found = {"run": take(32).hex(), "fingerprint": take(32).hex()}
    return found | {
        "coordinators": [short() for _ in range(take(1)[0])],
        "code": short(),
        "addresses": [address() for _ in range(take(1)[0])],
    }


# -- verifiable random outputs and seeds (docs/wire.md, Order and chance; RFC 9381 and 8032) -----------------------

Point = tuple[int, int, int, int]
"""A point (x, y) of the curve -x² + y² = 1 + d x² y² as X, Y, Z, T: x = X / Z, y = Y / Z, T = x y Z."""

_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
_Q = 2**252 + 27742317777372353535851937790883648493
"""The prime order of the group; the curve has eight times as many points."""

_ZERO: Point = (0, 1, 1, 0)
_SUITE = b"\x03"


def _add(a: Point, b: Point) -> Point:
    u, v = (a[1] - a[0]) * (b[1] - b[0]) % _P, (a[1] + a[0]) * (b[1] + b[0]) % _P
    w, z = 2 * _D * a[3] * b[3] % _P, 2 * a[2] * b[2] % _P
    e, f, g, h = v - u, z - w, z + w, v + u
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(n: int, a: Point) -> Point:
    found = _ZERO
    for bit in bin(n)[2:]:
        found = _add(found, found)
        if bit == "1":
            found = _add(found, a)
    return found


def encode_point(a: Point) -> bytes:
    x, y = (n * pow(a[2], -1, _P) % _P for n in a[:2])
    return (y | (x & 1) << 255).to_bytes(32, "little")


def decode_point(data: bytes) -> Point | None:
    """Return the point that has this encoding (RFC 8032, 5.1.3); None without one. A point has only one encoding."""
    number = int.from_bytes(data, "little")
    sign, y = divmod(number, 2**255)
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    if len(data) != 32 or y >= _P or x * x % _P != square or (x == 0 and sign):
        return None
    x = x if x & 1 == sign else _P - x
    return x, y, 1, x * y % _P


def has_prime_order(a: Point) -> bool:
    return encode_point(_times(_Q, a)) == encode_point(_ZERO) != encode_point(a)


def _base() -> Point:
    found = decode_point((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))
    assert found is not None
    return found


def _hash_to_curve(key: bytes, alpha: bytes) -> Point:
    """Return the point of an input (RFC 9381, 5.4.1.1): the first try that is one, times the cofactor."""
    tries = (_SUITE + b"\1" + key + alpha + bytes([counter]) + b"\0" for counter in range(256))
    points = (decode_point(hashlib.sha512(each).digest()[:32]) for each in tries)
    return next(_times(8, point) for point in points if point is not None)


def solves_vrf_equations(key: bytes, alpha: bytes, proof: bytes) -> bool:
    """Return whether the equations of RFC 9381, 5.3, hold. That is not enough: points may have parts of small order."""
    y, gamma = decode_point(key), decode_point(proof[:32])
    if y is None or gamma is None or len(proof) != 80:
        return False
    h, c, s = _hash_to_curve(key, alpha), int.from_bytes(proof[32:48], "little"), int.from_bytes(proof[48:], "little")
    u = _add(_times(s, _base()), _times(8 * _Q - c, y))
    v = _add(_times(s, h), _times(8 * _Q - c, gamma))
    points = b"".join(map(encode_point, (y, h, gamma, u, v)))
    return hashlib.sha512(_SUITE + b"\2" + points + b"\0").digest()[:16] == proof[32:48]


def verify_proof(key: bytes, alpha: bytes, proof: bytes) -> bool:
    """Return whether a proof is the key's for an input, of which a key has one output."""
    y, gamma = decode_point(key), decode_point(proof[:32])
    in_group = y is not None and gamma is not None and has_prime_order(y) and has_prime_order(gamma)
    return in_group and int.from_bytes(proof[48:], "little") < _Q and solves_vrf_equations(key, alpha, proof)


def rfc9381_hash(proof: bytes) -> bytes:
    """Return the output that RFC 9381, 5.2, has for a proof; Cairn's is `draw_output`."""
    gamma = decode_point(proof[:32])
    assert gamma is not None
    return hashlib.sha512(_SUITE + b"\3" + encode_point(_times(8, gamma)) + b"\0").digest()


def draw_input(run: bytes, round_: int, epoch: int) -> bytes:
    return b"cairn/v1/draw" + run + struct.pack("<QQ", round_, epoch)


def draw_output(proof: bytes) -> bytes:
    return sha256(b"cairn/v1/vrf-output", proof[:32])


def genesis_seed(genesis: bytes) -> bytes:
    return sha256(b"cairn/v1/seed", genesis)


def next_seed(seed: bytes, proof: bytes) -> bytes:
    """Return the seed of a record with this proof, after a record with this seed."""
    return sha256(b"cairn/v1/seed", seed, draw_output(proof))


# -- rounds (docs/wire.md, Order and chance) --------------------------------------------------------------------


def proposers(seed: bytes, keys: Sequence[bytes], stakes: dict[bytes, int], recent: Sequence[bytes]) -> list[bytes]:
    """Return the order of the proposers after a record: those with stake, recent contributors, the others."""

    def wait(key: bytes) -> float:
        t = int.from_bytes(sha256(b"cairn/v1/turn", seed, key)[:8], "little") // 2**11
        return -math.log((t + 0.5) / 2**53) / max(1, stakes[key])

    staked = [k for k in keys if stakes[k]]
    then = [k for k in keys if not stakes[k] and k in recent], [k for k in keys if not stakes[k] and k not in recent]
    return [key for group in (staked, *then) for key in sorted(group, key=wait)]


def committees(seed: bytes, attempt: int, keys: Sequence[bytes], shards: int, size: int) -> list[list[bytes]]:
    table = sorted(keys, key=lambda key: sha256(b"cairn/v1/committee", seed, struct.pack(">I", attempt), key))
    size = min(size, len(table))
    return [sorted(table[s % len(table)] for s in range(i * size, (i + 1) * size)) for i in range(shards)]


def accepts_rebase(batch: int | None, continues: bool, windows: Sequence[int]) -> bool:
    """Return whether a header may have these windows (docs/rounds.md, The rebase window of an update)."""
    first, rebase, end = windows
    if rebase == first:
        return batch is None or (end - first) % batch == 0
    if batch is None or not continues:
        return False
    return first < rebase <= end and (rebase - first) % batch == (end - rebase) % batch == 0


def draw_by_stake(seed: bytes, stakes: dict[bytes, int], count: int) -> list[bytes]:
    """Return the keys drawn by stake (docs/audits.md, Who audits)."""
    drawn: list[bytes] = []
    left = sorted(key for key, stake in stakes.items() if stake)
    while left and len(drawn) < count:
        number = int.from_bytes(sha256(seed, struct.pack("<I", len(drawn))), "little")
        number %= sum(stakes[key] for key in left)
        ends = [sum(stakes[key] for key in left[: i + 1]) for i in range(len(left))]
        drawn.append(left.pop(next(i for i, end in enumerate(ends) if number < end)))
    return drawn


def jury(seed: bytes, author: bytes, stakes: dict[bytes, int], seats: int) -> tuple[dict[bytes, int], int]:
    """Return the votes of an update's jury, and how many of them decide (docs/audits.md, Who audits).

    `seed`: that of the record after the update's own.
    """
    able = sorted(key for key, stake in stakes.items() if stake)
    most = sorted((-stakes[key], key) for key in able)[:seats]
    if sum(-stake for stake, _ in most) >= Fraction(7, 8) * sum(stakes.values()):
        half = Fraction(sum(stakes.values()), 2)
        return {key: -stake for stake, key in most}, math.floor(half) + 1
    votes = dict.fromkeys(able, 0)
    for seat in range(seats):
        number = int.from_bytes(sha256(b"cairn/v1/jury", seed, author, struct.pack("<I", seat)), "little")
        number %= sum(stakes.values())
        ends = [sum(stakes[key] for key in able[: i + 1]) for i in range(len(able))]
        votes[able[next(i for i, end in enumerate(ends) if number < end)]] += 1
    return votes, math.floor(Fraction(2 * seats, 3)) + 1


def decision(
    auditors: Sequence[bytes], votes: dict[bytes, int], needed: int,
    reports: Sequence[tuple[bytes, str, list[list[float]]]], is_second: bool,
) -> tuple[bool, list[bytes]] | None:  # fmt: skip
    """Return whether a jury convicts, and whom it refutes; None if it states nothing (docs/audits.md, What convicts).

    `votes`: the jury's, of which `needed` decide. `reports`: author, check, and scores with their thresholds, in the
    order of the chain.
    """
    margins = _margins(reports, {*auditors, *votes})
    if sum(author in auditors and margin < 0 for author, margin in margins.items()) < 2:
        return None
    for convicts in (False, True):
        agreeing = [a for a, margin in margins.items() if (margin < 0) is convicts and a in votes]
        if sum(votes[a] for a in agreeing) >= needed:
            is_clear = sum(votes[a] for a in agreeing if abs(margins[a]) >= 0.015) >= needed
            refuted = sorted(a for a, margin in margins.items() if (margin < 0) is not convicts) if is_clear else []
            return None if is_second and not refuted else (convicts and not is_second, refuted)
    return None


def _margins(reports: Sequence[tuple[bytes, str, list[list[float]]]], drawn: Collection[bytes]) -> dict[bytes, float]:
    found: dict[bytes, float] = {}
    for author, check, scores in reports:
        if check == "replay" and author in drawn:
            found.setdefault(author, min(value - threshold for value, threshold in scores))
    return found


def may_refute(
    convicted: bool, author: bytes, votes: dict[bytes, int], needed: int, stakes: dict[bytes, int],
    reports: Sequence[tuple[bytes, str, list[list[float]]]],
) -> bool:  # fmt: skip
    """Return whether a second decision may follow one that refutes nobody (docs/audits.md, What convicts)."""
    margins = _margins(reports, {key for key, _, _ in reports})
    opposite = {key for key, margin in margins.items() if (margin < 0) is not convicted}
    close = {key for key, margin in margins.items() if abs(margin) < 0.015}
    left = sum(n for key, n in votes.items() if key not in {*opposite, *close, author})
    return any(stakes.get(key) for key in opposite) and left >= needed


def due_checks(seed: bytes, updates: Sequence[tuple[bytes, int, int]]) -> list[str | None]:
    """Return the check that is due for each update (docs/audits.md, Who is audited).

    `seed`: that of the record after theirs. `updates`: author, claimed windows, which are the weighed ones, and stake.
    """
    everything = sum(size for _, size, _ in updates)
    found = []
    for author, size, stake in updates:
        draw = Fraction(int.from_bytes(sha256(b"cairn/v1/audit", seed, author)[:8], "little"), 2**64)
        loss = min(1_000_000, max(150_000, 60_000 * size // 256))
        rates = {"replay": Fraction(3, 100), "loss": Fraction(loss, 1_000_000)}
        over = Fraction(64 * size, stake) * Fraction(len(updates) * size, everything) if stake else 0
        found.append(next((check for check, r in rates.items() if not stake or draw < max(r * over, r / 3)), None))
    return found


def shard_count(contributors: int, update_size: int) -> int:
    return min(contributors, (update_size + CHUNK - 1) // CHUNK, 1024)


# -- windows (docs/data.md) -------------------------------------------------------------------------------------

WORD = 2**64 - 1


def window(seed: int, key: bytes, counter: int, n: int) -> int:
    pass_, i = divmod(counter, n)
    material = struct.pack("<Q", seed) + key + struct.pack("<Q", pass_)
    keys = struct.unpack("<8Q", b"".join(sha256(b"cairn/v1/assignment", bytes([b]), material) for b in (0, 1)))
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    x = _feistel(i, keys, half)
    while x >= n:
        x = _feistel(x, keys, half)
    return x


def _feistel(x: int, keys: Sequence[int], half: int) -> int:
    mask = 2**half - 1
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mix((right + key) & WORD) & mask)
    return left << half | right


def _mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & WORD
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


# -- credits (docs/credits.md) ----------------------------------------------------------------------------------


def micro_credits(flops: int, parameters: int, window_tokens: int, windows: int) -> int:
    return flops * parameters * windows * window_tokens // 10**9


def balances(fold: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return the pending, settled and voided micro-credits of each peer after each final record."""
    rule = fold["flops_per_parameter_token"], fold["parameters"], fold["window"]
    branch: list[dict[str, Any]] = []
    states: dict[tuple[str, str], str] = {}
    ages: dict[str, int] = {}
    seen: dict[str, dict[str, int]] = {}
    after = []
    for number, step in enumerate(fold["steps"]):
        if step["rollback"] is not None:
            branch = branch[: step["rollback"]["round"]]
            assert step["rollback"]["record"] == branch[-1]["record"]
        assert step["parent"] == (branch[-1]["record"] if branch else fold["genesis"])
        assert step["round"] == len(branch)
        branch.append(step)
        for record, peer in step["verdicts"]:
            if states.get((record, peer)) == "pending":
                states[record, peer] = "voided"
        ages[step["record"]] = number
        seen[step["record"]] = {p: micro_credits(*rule, n) for p, n in step["windows"].items()}
        states |= {(step["record"], peer): "pending" for peer in step["windows"]}
        tokens = sum(fold["window"] * n for each in branch for n in each["windows"].values())
        is_complete = 0 < fold["total_tokens"] <= tokens
        for (record, peer), state in states.items():
            if state == "pending" and (is_complete or number - ages[record] >= fold["hold_rounds"]):
                states[record, peer] = "settled"
        sums: dict[str, list[int]] = {}
        for (record, peer), state in states.items():
            totals = sums.setdefault(peer, [0, 0, 0])
            totals[("pending", "settled", "voided").index(state)] += seen[record][peer]
        after.append(sums)
    return after


# -- weights, stake, fork choice (docs/rounds.md, What a certificate means, The weight of an update) --------------


def weigh(
    claims: Sequence[int], histories: Sequence[tuple[int, Sequence[int], int]], round_: int, most: int
) -> list[int]:
    """Return the weighed windows of a round. A history: the round after the author's last update, weights, backlog.

    The weights are of its last updates since it was a newcomer, five at most, oldest first.
    """
    is_known = [len(weights) > 0 and round_ < after + 64 for after, weights, _ in histories]
    most_of = [max((sum(w) + 3) // 4, w[-1]) if len(w) > 4 else 2 * w[-1] if w else 0 for _, w, _ in histories]
    wanted = [min(claim + backlog, most) for claim, (_, _, backlog) in zip(claims, histories, strict=True)]
    given = [min(want, n) if known else 0 for want, n, known in zip(wanted, most_of, is_known, strict=True)]
    others = sorted(w for w, known in zip(given, is_known, strict=True) if known) or sorted(claims)
    newcomer = others[(len(others) - 1) // 4]
    return [min(want, max(newcomer, w)) for w, want in zip(given, wanted, strict=True)]


class Tree:
    """A record tree of the vectors, by numbers: 0 is the genesis, i + 1 the record i of the list."""

    def __init__(self, case: dict[str, Any]):
        self.case = case
        self.parents: list[int | None] = [None]
        self.records: list[dict[str, Any]] = [{"authors": [], "ends": [], "voters": [], "weighed": [], "record": ""}]
        self.floor = 0
        """The record that all branches descend from: finalized, or the one that the run was rolled back to."""
        self.gone: set[int] = set()
        """The records that the owner's finalizations and rollbacks have left beside the chain."""

    def path(self, node: int) -> list[int]:
        """Return the records from the one after the genesis to this one."""
        found: list[int] = []
        at: int | None = node
        while at:
            found.append(at)
            at = self.parents[at]
        return found[::-1]

    def history(self, key: int, node: int) -> tuple[int, list[int], int]:
        after, last, backlog = 0, list[int](), 0
        path, given = self.path(node), set[int]()
        for round_, at in enumerate(path):
            record = self.records[at]
            if key in record["authors"]:
                i = record["authors"].index(key)
                last = [*(last if round_ < after + 64 else []), record["weighed"][i]][-5:]
                after = round_ + 1
                backlog = min(16 * self.case["max_update_windows"], backlog + record["claims"][i] - last[-1])
            for voided in {named for named, peer in record["verdicts"] if peer == key and named in path} - given:
                given.add(voided)
                rounds = round_ - path.index(voided)
                if key in self.records[voided]["authors"] and 0 < rounds <= self.case["hold_rounds"]:
                    last, backlog = [], 0
        return after, last, backlog

    def add(self, record: dict[str, Any]) -> list[int]:
        """Add a record, and what the owner finalizes then; return the weighed windows of its updates."""
        parent = record["parent"]
        histories = [self.history(key, parent) for key in record["authors"]]
        weighed = weigh(record["claims"], histories, len(self.path(parent)), self.case["max_update_windows"])
        self.parents.append(parent)
        self.records.append(record | {"weighed": weighed})
        new = len(self.records) - 1
        assert parent not in self.gone and (record.get("rollback") or self.floor in [0, *self.path(parent)])
        if record.get("rollback"):
            self._require(parent, {at for at, before in enumerate(self.parents) if before == parent and at != new})
        if (final := record.get("finalized")) is not None:
            self._require(final, set())
        return weighed

    def _require(self, floor: int, others: set[int]) -> None:
        """Leave only records that come before this one or descend from it, and none that descend from the others."""
        self.floor = floor
        for at in range(1, len(self.parents)):
            path = self.path(at)
            if at not in self.path(floor) and (floor not in [0, *path] or others.intersection(path)):
                self.gone.add(at)

    def weight(self, node: int) -> int:
        path, void, total = self.path(node), set[tuple[int, int]](), 0
        for round_, at in enumerate(path):
            total += sum(self.records[at]["weighed"])
            for named, key in self.records[at]["verdicts"]:
                in_time = named in path and 0 < round_ - path.index(named) <= self.case["hold_rounds"]
                authors = self.records[named]["authors"]
                if in_time and key in authors and (named, key) not in void:
                    void.add((named, key))
                    total -= self.records[named]["weighed"][authors.index(key)]
        return total

    def stakes(self, node: int) -> list[int]:
        """Return each key's stake in the round after a record."""
        hold, path = self.case["hold_rounds"], self.path(node)
        first, stop = len(path) - hold - 64, len(path) - hold
        found = [0] * self.case["keys"]
        if first < 0:
            for key in self.case["founders"]:
                found[key] += self.case["founder_windows"]
        void: set[tuple[int, int]] = set()
        for later, at in enumerate(path):
            for record, key in self.records[at]["verdicts"]:
                if record in path and later - path.index(record) <= hold:
                    void.add((record, key))
        for at in path[max(0, first) : max(0, stop)]:
            for key, windows in zip(self.records[at]["authors"], self.records[at]["weighed"], strict=True):
                found[key] += windows if (at, key) not in void else 0
        bans = [self.records[at]["banned"] for at in path if self.records[at]["banned"] is not None]
        return [0 if bans and key in bans[-1] else windows for key, windows in enumerate(found)]

    def audit_stakes(self, node: int) -> list[int]:
        """Return the stake by which each key is drawn for the updates of a record (docs/audits.md, Who is audited)."""
        parent = self.parents[node]
        hold, path = self.case["hold_rounds"], self.path(parent)
        listed = path[max(0, len(path) - hold) : max(0, len(path) - min(8, hold // 2))]
        present = {key for at in listed for key in self.records[at]["authors"]}
        present.update(self.case["founders"] if len(path) < hold else ())
        return [stake if key in present else 0 for key, stake in enumerate(self.stakes(parent))]

    def head(self) -> int:
        return self._best(self.floor)

    def _best(self, node: int) -> int:
        children = [at for at, parent in enumerate(self.parents) if parent == node and at not in self.gone]
        if not children:
            return node
        newest = {child: self._newest(child) for child in children}
        stakes = self.stakes(node)

        def rank(child: int) -> tuple[int, int]:
            own = newest[child]
            keys = [k for k in own if own[k] == max(other.get(k, 0) for other in newest.values())]
            return sum(stakes[k] for k in keys), len(keys)

        tied = [child for child in children if rank(child) == max(map(rank, children))]
        ends = {child: self._best(child) for child in tied}
        return ends[min(tied, key=lambda child: (-self.weight(ends[child]), self.records[child]["record"]))]

    def _newest(self, child: int) -> dict[int, int]:
        """Return the keys that are for a record, each with the end of its windows in its newest message for it."""
        found: dict[int, int] = {}
        for at in range(child, len(self.parents)):
            if child in self.path(at):
                record = self.records[at]
                for key, end in zip(record["authors"], record["ends"], strict=True):
                    if at != child or key in record["voters"]:
                        found[key] = max(end, found.get(key, 0))
        return found
