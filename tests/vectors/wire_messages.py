"""Every message of the schemas in `protocol/wire`, with each field set: what `wire.json` holds.

A change of a field's number or type changes these bytes, also of messages that nobody signs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from protocol.wire import coordinator_pb2, ledger_pb2, swarm_pb2

SCHEMAS = (swarm_pb2.DESCRIPTOR, ledger_pb2.DESCRIPTOR, coordinator_pb2.DESCRIPTOR)


def message_types() -> Iterator[Descriptor]:
    """Yield the descriptor of each message."""
    for schema in SCHEMAS:
        yield from schema.message_types_by_name.values()


def filled(descriptor: Descriptor) -> Message:
    """Return a message with each field set, repeated ones twice. No value is the default; all follow from numbers."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        empty = getattr(message, field.name)
        if hasattr(empty, "extend"):  # a repeated one
            inner = field.message_type
            empty.extend([filled(inner)] * 2 if inner else [_value(field, 0), _value(field, 1)])
        elif field.message_type:
            empty.CopyFrom(filled(field.message_type))
        else:
            setattr(message, field.name, _value(field, 0))
    return message


def _value(field: FieldDescriptor, more: int) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return bytes([field.number, more, 255])
        case FieldDescriptor.CPPTYPE_STRING:
            return f"{field.name} {more}"
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return field.number + more + 0.5
    return 200 * field.number + more


def fields_of(message: Message) -> dict[str, Any]:
    """Return the fields that are set, as JSON has them: bytes in hexadecimal."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return fields_of(value)
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float) else [_plain(v) for v in value]


def wire_messages() -> list[dict[str, Any]]:
    found = []
    for descriptor in message_types():
        message = filled(descriptor)
        found.append(
            {
                "message": descriptor.full_name,
                "fields": fields_of(message),
                "bytes": message.SerializeToString(deterministic=True).hex(),
            }
        )
    return found
