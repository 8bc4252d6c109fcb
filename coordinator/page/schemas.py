"""JSON schemas (draft 2020-12) of the API's answers. Tests hold every answer against them."""

from __future__ import annotations

from typing import Any

from coordinator.directives import MARK_KINDS
from coordinator.peer_registry import PHASES
from protocol.messages import AUDIT_CHECKS

Schema = dict[str, Any]


def of(properties: dict[str, Any], **more: Any) -> Schema:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


def many(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items} | more


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
KEY: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "a peer's public key, in hex"}
DIGEST: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "SHA-256, in hex"}
TIME: Schema = {"type": "number", "description": "unix seconds, by the coordinator's clock"}
SECONDS: Schema = {"type": "number", "minimum": 0}
MICRO: Schema = {"type": "integer", "minimum": 0, "description": "millionths of a credit: 10^9 model FLOPs each"}
BASE64: Schema = {"type": "string", "contentEncoding": "base64"}

REASON = of({"reason": TEXT, "message": TEXT})
NAMED = of({"peer": KEY, "name": TEXT})
ABSENT = of({"peer": KEY, "name": TEXT, "reason": TEXT, "message": TEXT})
ENTRY = of({"peer": KEY, "name": TEXT, "windows": COUNT, "tokens": COUNT, "micro_credits": MICRO})

CONVICTION = of(
    {
        "round": maybe(COUNT),
        "update_round": COUNT,
        "barred_until": COUNT,
        "barred": FLAG,
        "pardoned": maybe(COUNT),
        "message": TEXT,
    },
    description="The newest record that convicts it, and of which update; `barred_until`: the first round in which it "
    "may train again; `pardoned`: the round whose record carries the owner's pardon; `message`: what was measured.",
)

AUDIT_CASE = of(
    {
        "peer": KEY,
        "name": TEXT,
        "round": COUNT,
        "record": DIGEST,
        "update": DIGEST,
        "finding": TEXT,
        "reports": many(
            of(
                {
                    "peer": KEY,
                    "name": TEXT,
                    "check": {"enum": list(AUDIT_CHECKS)},
                    "passed": FLAG,
                    "carried": COUNT,
                    "scores": many(of({"name": TEXT, "value": maybe(NUMBER), "threshold": maybe(NUMBER)})),
                }
            )
        ),
        "reports_total": COUNT,
        "accusers": COUNT,
        "decision": maybe(
            of(
                {
                    "round": COUNT,
                    "record": DIGEST,
                    "final": FLAG,
                    "convicted": FLAG,
                    "barred_until": maybe(COUNT),
                    "pardoned": maybe(COUNT),
                    "micro_credits_voided": maybe(MICRO),
                    "refuted": many(NAMED),
                    "refuted_total": COUNT,
                }
            )
        ),
    },
    description="`peer` is the author of the audited `update` in `record`, of `round`. `reports`: failed ones first, "
    "at most 24; `carried`: the round whose record carries it. `accusers`: keys with a failed replay. "
    "`micro_credits_voided` is null until the deciding record is final. `refuted`: who reported the opposite, "
    "and lost the stake, by this record or a later one.",
)

PEER = of(
    {
        "peer": KEY,
        "name": TEXT,
        "phase": {"enum": list(PHASES)},
        "since": maybe(TIME),
        "micro_credits_settled": MICRO,
        "micro_credits_pending": MICRO,
        "last_round": maybe(COUNT),
        "absence": maybe(REASON),
        "conviction": maybe(CONVICTION),
        "seconds_since_heartbeat": maybe(SECONDS),
        "round": maybe(COUNT),
        "loss": maybe(NUMBER),
        "tokens_per_second": maybe(NUMBER),
        "bytes_up": maybe(COUNT),
        "bytes_down": maybe(COUNT),
        "up_per_second": maybe(COUNT),
        "down_per_second": maybe(COUNT),
        "relayed_peers": maybe(COUNT),
        "device": maybe(TEXT),
    },
    description="A peer's own reports (device, speed, loss, bytes), and data of the chain and the coordinator.",
)

OBSERVED = of(
    {
        "train": maybe(SECONDS),
        "exchange": maybe(SECONDS),
        "commit": maybe(SECONDS),
        "whole": maybe(SECONDS),
        "certified": TIME,
        "training": COUNT,
        "sent": maybe(COUNT),
        "received": maybe(COUNT),
    },
    description="Observations of the round by this coordinator: seconds until the first update was announced, then "
    "until the record was proposed, from there until it was certified; peers at work; bytes by peers' own counters.",
)

_ROW: dict[str, Any] = {
    "round": COUNT,
    "record": DIGEST,
    "tokens": COUNT,
    "loss": maybe(NUMBER),
    "final": FLAG,
    "contributors": many(NAMED),
    "contributors_total": COUNT,
    "absent": maybe(many(ABSENT)),
    "absent_total": COUNT,
    "observed": maybe(OBSERVED),
}
ROUND_ROW = of(
    _ROW, description="`contributors` and `absent` are the first twelve; `absent` is null if nothing was observed."
)

ROUND = of(
    _ROW
    | {
        "parent": DIGEST,
        "base_state": DIGEST,
        "micro_credits": MICRO,
        "contributors": many(of(ENTRY["properties"] | {"announced_seconds": maybe(SECONDS)})),
    }
)

CERTIFICATE = of(
    {
        "round": COUNT,
        "record": DIGEST,
        "parent": DIGEST,
        "base_state": DIGEST,
        "attempt": COUNT,
        "proposer": NAMED,
        "updates": many(
            of(
                {
                    "peer": KEY,
                    "name": TEXT,
                    "update": DIGEST,
                    "blob": DIGEST,
                    "first_window": COUNT,
                    "rebase_window": COUNT,
                    "end_window": COUNT,
                    "loss": maybe(NUMBER),
                }
            )
        ),  # fmt: skip
        "votes": many(NAMED),
        "shards": many(DIGEST),
        "bytes": of({"record": BASE64, "votes": many(BASE64)}),
    }
)

_STATE: dict[str, Any] = {
    "name": TEXT,
    "run": DIGEST,
    "time": TIME,
    "health": TEXT,
    "message": TEXT,
    "round": COUNT,
    "next_round_seconds": maybe(SECONDS),
    "head": DIGEST,
    "state": DIGEST,
    "state_round": COUNT,
    "tokens": COUNT,
    "total_tokens": COUNT,
    "tokens_per_second": maybe(NUMBER),
    "loss": maybe(NUMBER),
    "validation_loss": maybe(NUMBER),
    "validation_round": maybe(COUNT),
    "training": COUNT,
    "final_round": maybe(COUNT),
    "micro_credits_settled": MICRO,
    "micro_credits_pending": MICRO,
    "alerts": many(of({"name": TEXT, "since": TIME, "message": TEXT})),
    "peers_total": COUNT,
}
EVENT = of(_STATE, description="The state, as a message and in numbers.")
STATUS = of(
    _STATE | {"peers": many(PEER), "rounds": many(ROUND_ROW)},
    description="The state, and the first page of peers and of rounds. `peers_total`: those that /api/peers lists.",
)

_SETTINGS: Schema = {"type": "object"}
RUN = of(
    {
        "name": TEXT,
        "run": DIGEST,
        "owner": KEY,
        "about": of({"description": TEXT, "contact": TEXT, "license": TEXT}),
        "began": maybe(TIME),
        "total_tokens": COUNT,
        "model": of(
            {"type": TEXT, "parameters": COUNT, "bytes": COUNT}
            | {"adapter": maybe(of({"rank": COUNT, "alpha": NUMBER, "dtype": TEXT, "base": COUNT}))}
            | {size: maybe(COUNT) for size in ("layers", "width", "heads", "context", "vocabulary")}
        ),
        "data": of(
            {
                "tokens": COUNT,
                "window": COUNT,
                "window_tokens": COUNT,
                "windows": COUNT,
                "validation_tokens": COUNT,
                "addresses": many(TEXT),
            }
        ),
        "settings": of({name: _SETTINGS for name in ("inner", "codec", "outer", "round", "audit")}),
        "join": of({"admission": {"enum": ["open", "invite", "allow"]}, "invite": maybe(TEXT), "local": FLAG}),
    },
    description="From the run spec, but `about`: the owner's words in coordinator.toml, unsigned. "
    "`began`: when the first round was certified, if this coordinator saw it. "
    "`settings`: sections of the spec, as docs/runs.md describes them; a directive may have changed `round` since. "
    "`invite`: of an open run only, never with a code; `local`: it leads to the coordinator's own machine only.",
)

CHARTS = of(
    {
        "rounds": many(COUNT),
        "tokens": many(COUNT),
        "loss": many(maybe(NUMBER)),
        "seen_at": many(maybe(TIME)),
        "times": many(TIME),
        "rates": many(NUMBER),
        "by_round": of(
            {
                "times": many(TIME),
                "train": many(maybe(SECONDS)),
                "exchange": many(maybe(SECONDS)),
                "commit": many(maybe(SECONDS)),
                "peers": many(maybe(NUMBER)),
                "sent": many(maybe(NUMBER)),
                "received": many(maybe(NUMBER)),
            }
        ),
        "validation": many(of({"round": COUNT, "tokens": maybe(COUNT), "seen_at": maybe(TIME), "loss": NUMBER})),
        "marks": many(of({"time": NUMBER, "kind": {"enum": list(MARK_KINDS)}, "text": TEXT})),
    },
    description="Columns; neighbouring rounds are merged so that no chart has more than 600 points. `marks`: the "
    "newest pauses, resumptions, rollbacks and the end, in unix seconds by the owner's clock.",
)

LEADER = of(
    {
        "key": TEXT,
        "kind": {"enum": ["peer", "account", "team"]},
        "name": TEXT,
        "team": TEXT,
        "account": maybe(KEY),
        "micro_credits_settled": MICRO,
        "micro_credits_pending": MICRO,
        "micro_credits_voided": MICRO,
        "recent": maybe(MICRO),
        "tokens": COUNT,
        "rounds": COUNT,
        "peers": many(KEY),
    },
    description="`recent`: micro-credits a day, an exponential mean with a half-life of a week; null: unknown.",
)

RECEIPT = of(
    {
        "round": COUNT,
        "record": DIGEST,
        "update": DIGEST,
        "accepted": FLAG,
        "reason": TEXT,
        "windows": COUNT,
        "tokens": COUNT,
        "micro_credits": MICRO,
        "number": COUNT,
        "pending_until": COUNT,
        "status": {"enum": ["pending", "settled", "voided", "not accepted"]},
        "void_reason": TEXT,
        "bytes": BASE64,
    },
    description="`bytes`: the envelope that the owner signed. It settles when the final round with the "
    "number `pending_until` is there. `void_reason`: the decision or verdict that voids it; empty if none does.",
)

SAMPLE = of(
    {
        "round": COUNT,
        "state": DIGEST,
        "prompt": TEXT,
        "text": TEXT,
        "temperature": maybe(NUMBER),
        "validation_loss": maybe(NUMBER),
    }
)

CHECKPOINT = of(
    {
        "round": COUNT,
        "state": DIGEST,
        "record": DIGEST,
        "tokens": COUNT,
        "bytes": COUNT,
        "files": many(of({"name": TEXT, "bytes": COUNT})),
        "final": FLAG,
        "copied": FLAG,
        "validation_loss": maybe(NUMBER),
    },
    description="Its files are at /checkpoints/round-NNNNNN/NAME, whole or by range.",
)
