"""Seeded mutation of valid input: bytes, protobuf messages and JSON, each with the extremes of its kind."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

INTERESTING = [0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40 + 1, 2**53, 2**53 + 1]
INTERESTING += [2**63 - 1, 2**63, 2**64 - 1]
NUMBERS = [0.0, -0.0, 1e-45, 1e38, -1e308, 2.0**53, 0.1, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", " ", "\x00", "\x1b[2J", "é", "\ud7ff", "\u202e", "x" * 41, "9" * 5000, "../../etc", "1e999", "-1", "٣"]
MAX_GROWN = 1_000_000
"""Bytes to which one mutation lets an input grow."""


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with one edit."""
    out = bytearray(data or b"\0")
    at = rng.randrange(len(out))
    match rng.randrange(9):
        case 0:
            out[at] ^= 1 << rng.randrange(8)
        case 1:
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 2:
            del out[at : at + rng.choice((1, 4, 32, len(out)))]
        case 3:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 32)))
        case 4:
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice(INTERESTING) % 256**width
            out[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
        case 5:
            stop = at + rng.choice((1, 8, 64))
            out[at:at] = out[at:stop] * rng.choice((1, 2, 100))
        case 6:
            other = rng.randrange(len(out))
            out[at : at + 32] = out[other : other + 32]
        case 7:
            out[at : at + 1] = rng.choice((b"[", b"{", b'"', b"\xff\xff\x03", b"\n")) * rng.choice((1, 10, 10_000))
        case _:
            stop = at + rng.choice((1, 2, 32, 4096))
            out[at:stop] = bytes([rng.choice((0, 0xFF))]) * (stop - at)
    return bytes(out[:MAX_GROWN])


def mutate_message(rng: random.Random, message: Message) -> Message:
    """Change one field of a message, or of one inside it, in place; return the message."""
    field = rng.choice(message.DESCRIPTOR.fields)
    values = getattr(message, field.name)
    if hasattr(values, "extend"):
        match rng.randrange(5) if len(values) else 3:
            case 0:
                del values[rng.randrange(len(values)) :]
            case 1:
                kept = list(values)
                rng.shuffle(kept)
                del values[:]
                values.extend(kept)
            case 2:
                values.extend(list(values) * rng.choice((1, 2, 100)))
            case 3 if field.message_type is None:
                values.append(_value(rng, field, b""))
            case _ if field.message_type is None and len(values):
                index = rng.randrange(len(values))
                values[index] = _value(rng, field, values[index])
        return message
    if field.message_type is not None:
        if rng.random() < 0.2:
            message.ClearField(field.name)  # type: ignore[arg-type]
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            mutate_message(rng, inner)
        return message
    setattr(message, field.name, _value(rng, field, getattr(message, field.name)))
    return message


def _value(rng: random.Random, field: Any, now: Any) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_UINT32:
            return rng.choice((*INTERESTING, rng.getrandbits(32))) % 2**32
        case FieldDescriptor.CPPTYPE_UINT64:
            near = (now + rng.choice((-1, 1))) % 2**64 if isinstance(now, int) else 0
            return rng.choice((*INTERESTING, near, rng.getrandbits(64)))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(NUMBERS)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_STRING:
            return rng.choice((*TEXTS, (now or "") + rng.choice(TEXTS)))
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice((b"", bytes(32), bytes(31), rng.randbytes(32), mutate_bytes(rng, now or b"\0")))
    return rng.choice(INTERESTING) % 2**31


def mutate_wire(rng: random.Random, message: Message, data: bytes) -> bytes:
    """Return a payload with one edit, of its fields or of its bytes. `message` is an empty one of its type."""
    if rng.random() < 0.7:
        try:
            message.ParseFromString(data)
            return mutate_message(rng, message).SerializeToString(deterministic=True)[:MAX_GROWN]
        except (DecodeError, ValueError):
            pass
    return mutate_bytes(rng, data)


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Return JSON with one value changed, as compact text with sorted keys; or with one edit of its bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    try:
        changed = _changed(rng, json.loads(data))
        text = json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    except (ValueError, RecursionError, OverflowError, TypeError):  # after a mutation it need not be JSON any more
        return mutate_bytes(rng, data)
    if rng.random() < 0.1:
        text = text.replace("Infinity", "1e999").replace(":", ':"":', 1)
    return text.encode("utf-8", "surrogatepass")[:MAX_GROWN]


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        match rng.randrange(6):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return value | {rng.choice(TEXTS): value[key]}
            case _:
                return value | {key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:at]
            case 1:
                # A longer list would be cut to the size of an input again, after it took gigabytes.
                return value * min(rng.choice((2, 100, 10_000)), max(1, MAX_GROWN // len(json.dumps(value))))
            case _:
                return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    return _extreme(rng, value)


def _extreme(rng: random.Random, value: Any) -> Any:
    many = [rng.choice(([], {}, "", 0, [[]]))] * rng.choice((3, 1000, 200_000))
    nested: Any = 0
    for _ in range(rng.choice((1, 40, 900))):
        nested = [nested] if rng.random() < 0.9 else {"a": nested}
    near = value + rng.choice((-1, 1, 0.5)) if isinstance(value, (int, float)) else str(value) + rng.choice(TEXTS)
    return rng.choice((None, True, near, near, nested, many, [], {}, *INTERESTING, *NUMBERS, *TEXTS, -1, 10**400))


def splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return the beginning of one input with the end of another."""
    other = rng.choice(others)
    return (data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :])[:MAX_GROWN]
