"""Receipts and certificates made by hand behind the routes of the page; one of them can be altered."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coordinator.page import json_view
from protocol.ids import PeerKey
from protocol.message_codec import KeySigner
from protocol.messages import Certificate
from tests.page.world import peer
from tests.support.coordinator_fakes import ChainMaker, make_spec

ROUNDS, PEERS = 21, 5
REFUSED = 4
"""The round that leaves out an update of each peer."""

WEIGHED, CLAIM, WEIGHT = (20, 1), 300, 4
"""The round and the peer of an update that weighs less than it claims, in windows."""


class FakeLog:
    """The certificates of a number of rounds, all with the same peers, and the receipts that follow from them.

    `liar` says one thing in a receipt and has another in the record.
    """

    def __init__(self) -> None:
        maker = ChainMaker(make_spec())
        maker.weighs = True
        self.certificates: list[Certificate] = [
            maker.add({n: CLAIM if (r, n) == WEIGHED else 3 for n in range(PEERS)}) for r in range(ROUNDS)
        ]
        self.records = [c.record.encoded for c in self.certificates]
        self.liar: int | None = None

    def receipt(self, round_: int, number: int) -> dict[str, Any]:
        certificate = self.certificates[round_]
        place = certificate.record.body.contributors.index(peer(number).key)
        update, windows = certificate.record.body.updates[place], certificate.record.body.weighed[place]
        refused = round_ == REFUSED
        if refused:  # another header of the same peer
            update = KeySigner(peer(number)).sign(self.certificates[0].record.body.updates[0].body)
        return {
            "round": round_, "record": str(certificate.digest), "update": str(update.digest), "accepted": not refused,
            "reason": "announced after the record was proposed" if refused else "",
            "windows": 0 if refused else windows + (self.liar == round_), "tokens": 0 if refused else 48,
            "micro_credits": 0 if refused else 1000 + number, "number": round_,
            "pending_until": 0 if refused else round_ + 12,
            "status": "not accepted" if refused else "pending" if round_ > 8 else "settled",
            "void_reason": "", "bytes": base64.b64encode(b"receipt").decode(),
        }  # fmt: skip

    def routes(self) -> list[Route]:
        async def certificate(request: Request) -> Response:
            number = int(request.path_params["number"])
            answer = json_view.certificate(self.certificates[number], lambda key: key.short)
            answer["bytes"]["record"] = base64.b64encode(self.records[number]).decode()
            return JSONResponse(answer)

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
            Route("/api/rounds/{number}/certificate", certificate),
            Route("/api/receipts", receipts),
            Route("/api/accounts/{key}", account),
        ]
