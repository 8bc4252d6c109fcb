from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Receipt(_message.Message):
    __slots__ = ("run", "peer", "round", "record", "update", "accepted", "reason", "windows", "tokens", "micro_credits", "number", "pending_until")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PENDING_UNTIL_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    peer: bytes
    round: int
    record: bytes
    update: bytes
    accepted: bool
    reason: str
    windows: int
    tokens: int
    micro_credits: int
    number: int
    pending_until: int
    def __init__(self, run: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., round: _Optional[int] = ..., record: _Optional[bytes] = ..., update: _Optional[bytes] = ..., accepted: bool = ..., reason: _Optional[str] = ..., windows: _Optional[int] = ..., tokens: _Optional[int] = ..., micro_credits: _Optional[int] = ..., number: _Optional[int] = ..., pending_until: _Optional[int] = ...) -> None: ...

class BindPeer(_message.Message):
    __slots__ = ("run", "account", "time")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    account: bytes
    time: int
    def __init__(self, run: _Optional[bytes] = ..., account: _Optional[bytes] = ..., time: _Optional[int] = ...) -> None: ...

class BindAccount(_message.Message):
    __slots__ = ("run", "peer_statement", "time", "name", "team")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_STATEMENT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEAM_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    peer_statement: bytes
    time: int
    name: str
    team: str
    def __init__(self, run: _Optional[bytes] = ..., peer_statement: _Optional[bytes] = ..., time: _Optional[int] = ..., name: _Optional[str] = ..., team: _Optional[str] = ...) -> None: ...
