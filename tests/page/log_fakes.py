"""A log of credits made by hand behind the routes that receipts are checked by; one byte of it can be altered."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol.envelope import seal
from protocol.ids import PeerKey, sha256
from protocol.merkle import leaf_hash, tree_hash
from protocol.wire import ledger_pb2 as wire
from tests.page.world import peer
from tests.support.specs import OWNER

ROUNDS, PEERS = 21, 5


def path_to(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the inclusion proof of a leaf, as defined in RFC 9162, section 2.1.3.1."""
    if len(leaves) == 1:
        return []
    k = 1 << ((len(leaves) - 1).bit_length() - 1)
    if index < k:
        return [*path_to(leaves[:k], index), tree_hash(leaves[k:])]
    return [*path_to(leaves[k:], index - k), tree_hash(leaves[:k])]


class FakeLog:
    """A log of a number of rounds, all with the same peers.

    `liar` says one thing in a receipt and has another in the log.
    """

    def __init__(self) -> None:
        self.lines = {r: [self._line(r, n) for n in range(PEERS)] for r in range(ROUNDS)}
        self.entries = [self._entry(r) for r in range(ROUNDS)]
        self.liar: int | None = None

    @staticmethod
    def _line(round_: int, number: int) -> bytes:
        update = sha256(b"update", bytes([round_, number]))
        line = wire.CreditLine(peer=peer(number).key, update=update, windows=3, tokens=48, micro_credits=1000 + number)
        return line.SerializeToString()

    def _entry(self, round_: int) -> bytes:
        root = tree_hash([leaf_hash(line) for line in self.lines[round_]])
        what = wire.RoundEntry(round=round_, record=self.record(round_), lines_root=root, count=PEERS)
        return wire.LedgerEntry(run=bytes(32), sequence=round_, round=what).SerializeToString()

    @staticmethod
    def record(round_: int) -> bytes:
        return sha256(b"record", bytes([round_]))

    def receipt(self, round_: int, number: int) -> dict[str, Any]:
        line = wire.CreditLine.FromString(self.lines[round_][number])
        more = 1 if self.liar == round_ else 0
        refused = round_ == 4
        return {
            "round": round_, "record": self.record(round_).hex(), "update": line.update.hex(), "accepted": not refused,
            "reason": "announced after the record was proposed" if refused else "", "windows": 0 if refused else 3,
            "tokens": 0 if refused else 48, "micro_credits": 0 if refused else line.micro_credits + more,
            "entry": round_, "line": number, "pending_until": round_ + 12,
            "status": "not accepted" if refused else "pending" if round_ > 8 else "settled",
            "bytes": base64.b64encode(b"receipt").decode(),
        }  # fmt: skip

    def routes(self) -> list[Route]:
        def b64(data: bytes) -> str:
            return base64.b64encode(data).decode()

        def leaves() -> list[bytes]:
            return [leaf_hash(e) for e in self.entries]

        async def head(_: Request) -> Response:
            body = wire.TreeHead(run=bytes(32), size=ROUNDS, root=tree_hash(leaves()), time=1)
            return JSONResponse({"heads": [b64(seal(OWNER, "tree-head", body.SerializeToString()).encoded)]})

        async def entries(request: Request) -> Response:
            first = int(request.query_params["first"])
            return JSONResponse({"first": first, "size": ROUNDS, "entries": [b64(self.entries[first])]})

        async def lines(request: Request) -> Response:
            first = int(request.query_params["first"])
            group = {"entry": first, "lines": [b64(line) for line in self.lines[first]]}
            return JSONResponse({"groups": [group], "next": first + 1})

        async def inclusion(request: Request) -> Response:
            entry = int(request.query_params["entry"])
            hashes = [h.hex() for h in path_to(leaves(), entry)]
            return JSONResponse({"entry": entry, "size": ROUNDS, "hashes": hashes})

        async def receipts(request: Request) -> Response:
            key = PeerKey(bytes.fromhex(request.query_params["peer"]))
            number = next((n for n in range(PEERS) if peer(n).key == key), None)
            before = int(request.query_params.get("before", ROUNDS))
            limit = int(request.query_params["limit"])
            found = [] if number is None else [self.receipt(r, number) for r in range(before - 1, -1, -1)][:limit]
            on = found[-1]["round"] if found and found[-1]["round"] else None
            return JSONResponse({"peer": str(key), "receipts": found, "next": on})

        async def account(request: Request) -> Response:
            numbers = {"micro_credits_settled": 5 * 10**6, "micro_credits_pending": 10**6, "micro_credits_voided": 0}
            who = {
                "key": request.path_params["key"],
                "name": "the ada lab",
                "team": "blue",
                "peers": [str(peer(0).key)],
            }
            more = {"kind": "account", "account": None, "rounds_total": 21}
            return JSONResponse(who | numbers | more | {"recent": 12345, "tokens": 10**6, "rounds": 20})

        return [
            Route("/api/log/head", head),
            Route("/api/log/entries", entries),
            Route("/api/log/lines", lines),
            Route("/api/log/inclusion", inclusion),
            Route("/api/receipts", receipts),
            Route("/api/accounts/{key}", account),
        ]
