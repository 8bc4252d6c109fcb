from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LedgerEntry(_message.Message):
    __slots__ = ("run", "sequence", "previous", "time", "round", "settle", "void", "rollback")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    VOID_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    sequence: int
    previous: bytes
    time: int
    round: RoundEntry
    settle: SettleEntry
    void: VoidEntry
    rollback: RollbackEntry
    def __init__(self, run: _Optional[bytes] = ..., sequence: _Optional[int] = ..., previous: _Optional[bytes] = ..., time: _Optional[int] = ..., round: _Optional[_Union[RoundEntry, _Mapping]] = ..., settle: _Optional[_Union[SettleEntry, _Mapping]] = ..., void: _Optional[_Union[VoidEntry, _Mapping]] = ..., rollback: _Optional[_Union[RollbackEntry, _Mapping]] = ...) -> None: ...

class RoundEntry(_message.Message):
    __slots__ = ("round", "record", "parent", "lines_root", "count", "micro_credits")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    LINES_ROOT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_FIELD_NUMBER: _ClassVar[int]
    round: int
    record: bytes
    parent: bytes
    lines_root: bytes
    count: int
    micro_credits: int
    def __init__(self, round: _Optional[int] = ..., record: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., lines_root: _Optional[bytes] = ..., count: _Optional[int] = ..., micro_credits: _Optional[int] = ...) -> None: ...

class CreditLine(_message.Message):
    __slots__ = ("peer", "update", "windows", "tokens", "micro_credits")
    PEER_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    update: bytes
    windows: int
    tokens: int
    micro_credits: int
    def __init__(self, peer: _Optional[bytes] = ..., update: _Optional[bytes] = ..., windows: _Optional[int] = ..., tokens: _Optional[int] = ..., micro_credits: _Optional[int] = ...) -> None: ...

class SettleEntry(_message.Message):
    __slots__ = ("entry", "count", "micro_credits")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_FIELD_NUMBER: _ClassVar[int]
    entry: int
    count: int
    micro_credits: int
    def __init__(self, entry: _Optional[int] = ..., count: _Optional[int] = ..., micro_credits: _Optional[int] = ...) -> None: ...

class VoidEntry(_message.Message):
    __slots__ = ("entry", "line", "micro_credits", "void_order")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_FIELD_NUMBER: _ClassVar[int]
    VOID_ORDER_FIELD_NUMBER: _ClassVar[int]
    entry: int
    line: int
    micro_credits: int
    void_order: bytes
    def __init__(self, entry: _Optional[int] = ..., line: _Optional[int] = ..., micro_credits: _Optional[int] = ..., void_order: _Optional[bytes] = ...) -> None: ...

class RollbackEntry(_message.Message):
    __slots__ = ("record", "round", "directive")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    round: int
    directive: bytes
    def __init__(self, record: _Optional[bytes] = ..., round: _Optional[int] = ..., directive: _Optional[bytes] = ...) -> None: ...

class VoidOrder(_message.Message):
    __slots__ = ("run", "round", "record", "peer", "update", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    record: bytes
    peer: bytes
    update: bytes
    reason: str
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., record: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., update: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class TreeHead(_message.Message):
    __slots__ = ("run", "size", "root", "time")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    size: int
    root: bytes
    time: int
    def __init__(self, run: _Optional[bytes] = ..., size: _Optional[int] = ..., root: _Optional[bytes] = ..., time: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("run", "peer", "round", "record", "update", "accepted", "reason", "windows", "tokens", "micro_credits", "entry", "line", "pending_until")
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
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
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
    entry: int
    line: int
    pending_until: int
    def __init__(self, run: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., round: _Optional[int] = ..., record: _Optional[bytes] = ..., update: _Optional[bytes] = ..., accepted: bool = ..., reason: _Optional[str] = ..., windows: _Optional[int] = ..., tokens: _Optional[int] = ..., micro_credits: _Optional[int] = ..., entry: _Optional[int] = ..., line: _Optional[int] = ..., pending_until: _Optional[int] = ...) -> None: ...

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
