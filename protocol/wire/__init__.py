"""Protobuf messages of the wire, generated from the .proto files beside them by `make stubs`.

Generated code only, and the schemas. Everything decoded with it is still untrusted: `protocol.message_codec` checks it.
"""
