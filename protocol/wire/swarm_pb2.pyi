from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("kind", "payload", "key", "signature")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    payload: bytes
    key: bytes
    signature: bytes
    def __init__(self, kind: _Optional[str] = ..., payload: _Optional[bytes] = ..., key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("run", "peer", "not_before", "not_after", "name")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    peer: bytes
    not_before: int
    not_after: int
    name: str
    def __init__(self, run: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., not_before: _Optional[int] = ..., not_after: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class UpdateHeader(_message.Message):
    __slots__ = ("run", "round", "parent", "base_state", "first_window", "end_window", "inner_steps", "blob", "blob_size", "loss", "admission", "epoch", "rebase_window")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BASE_STATE_FIELD_NUMBER: _ClassVar[int]
    FIRST_WINDOW_FIELD_NUMBER: _ClassVar[int]
    END_WINDOW_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    BLOB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REBASE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    parent: bytes
    base_state: bytes
    first_window: int
    end_window: int
    inner_steps: int
    blob: bytes
    blob_size: int
    loss: float
    admission: bytes
    epoch: int
    rebase_window: int
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., parent: _Optional[bytes] = ..., base_state: _Optional[bytes] = ..., first_window: _Optional[int] = ..., end_window: _Optional[int] = ..., inner_steps: _Optional[int] = ..., blob: _Optional[bytes] = ..., blob_size: _Optional[int] = ..., loss: _Optional[float] = ..., admission: _Optional[bytes] = ..., epoch: _Optional[int] = ..., rebase_window: _Optional[int] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("run", "round", "parent", "base_state", "attempt", "updates", "directive", "weights", "reports", "decisions", "proof", "voided")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BASE_STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    parent: bytes
    base_state: bytes
    attempt: int
    updates: _containers.RepeatedScalarFieldContainer[bytes]
    directive: bytes
    weights: _containers.RepeatedScalarFieldContainer[int]
    reports: _containers.RepeatedScalarFieldContainer[bytes]
    decisions: _containers.RepeatedCompositeFieldContainer[AuditDecision]
    proof: bytes
    voided: int
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., parent: _Optional[bytes] = ..., base_state: _Optional[bytes] = ..., attempt: _Optional[int] = ..., updates: _Optional[_Iterable[bytes]] = ..., directive: _Optional[bytes] = ..., weights: _Optional[_Iterable[int]] = ..., reports: _Optional[_Iterable[bytes]] = ..., decisions: _Optional[_Iterable[_Union[AuditDecision, _Mapping]]] = ..., proof: _Optional[bytes] = ..., voided: _Optional[int] = ...) -> None: ...

class AuditDecision(_message.Message):
    __slots__ = ("record", "author", "convicted", "refuted")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    CONVICTED_FIELD_NUMBER: _ClassVar[int]
    REFUTED_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    author: bytes
    convicted: bool
    refuted: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, record: _Optional[bytes] = ..., author: _Optional[bytes] = ..., convicted: bool = ..., refuted: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("run", "round", "record", "shards_digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    record: bytes
    shards_digest: bytes
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., record: _Optional[bytes] = ..., shards_digest: _Optional[bytes] = ...) -> None: ...

class ShardAttestation(_message.Message):
    __slots__ = ("run", "round", "record", "shard", "blob", "missing")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    record: bytes
    shard: int
    blob: bytes
    missing: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., record: _Optional[bytes] = ..., shard: _Optional[int] = ..., blob: _Optional[bytes] = ..., missing: _Optional[_Iterable[bytes]] = ...) -> None: ...

class WorkReport(_message.Message):
    __slots__ = ("run", "round", "record", "update", "check", "scores")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    record: bytes
    update: bytes
    check: str
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., record: _Optional[bytes] = ..., update: _Optional[bytes] = ..., check: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("name", "value", "threshold")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    threshold: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., threshold: _Optional[float] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("record", "votes", "shards")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    votes: _containers.RepeatedScalarFieldContainer[bytes]
    shards: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, record: _Optional[bytes] = ..., votes: _Optional[_Iterable[bytes]] = ..., shards: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Finalization(_message.Message):
    __slots__ = ("run", "round", "record", "epoch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    record: bytes
    epoch: int
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., record: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("run", "sequence", "run_status", "since", "reason", "banned", "from_round", "changes", "rollback", "verdicts", "pardons")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_STATUS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    PARDONS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    sequence: int
    run_status: str
    since: int
    reason: str
    banned: _containers.RepeatedScalarFieldContainer[bytes]
    from_round: int
    changes: RoundChanges
    rollback: Rollback
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    pardons: _containers.RepeatedCompositeFieldContainer[Pardon]
    def __init__(self, run: _Optional[bytes] = ..., sequence: _Optional[int] = ..., run_status: _Optional[str] = ..., since: _Optional[int] = ..., reason: _Optional[str] = ..., banned: _Optional[_Iterable[bytes]] = ..., from_round: _Optional[int] = ..., changes: _Optional[_Union[RoundChanges, _Mapping]] = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., pardons: _Optional[_Iterable[_Union[Pardon, _Mapping]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("record", "peer", "reason")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    peer: bytes
    reason: str
    def __init__(self, record: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class Pardon(_message.Message):
    __slots__ = ("peer", "round")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    round: int
    def __init__(self, peer: _Optional[bytes] = ..., round: _Optional[int] = ...) -> None: ...

class RoundChanges(_message.Message):
    __slots__ = ("target_tokens", "max_seconds", "exchange_seconds", "propose_seconds", "patience_seconds", "member_seconds", "max_update_tokens", "max_members")
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_UPDATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    target_tokens: int
    max_seconds: float
    exchange_seconds: float
    propose_seconds: float
    patience_seconds: float
    member_seconds: float
    max_update_tokens: int
    max_members: int
    def __init__(self, target_tokens: _Optional[int] = ..., max_seconds: _Optional[float] = ..., exchange_seconds: _Optional[float] = ..., propose_seconds: _Optional[float] = ..., patience_seconds: _Optional[float] = ..., member_seconds: _Optional[float] = ..., max_update_tokens: _Optional[int] = ..., max_members: _Optional[int] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("epoch", "record", "round", "state")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    record: bytes
    round: int
    state: bytes
    def __init__(self, epoch: _Optional[int] = ..., record: _Optional[bytes] = ..., round: _Optional[int] = ..., state: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("run", "sequence", "round", "head", "weight", "windows", "phase", "tokens_per_second", "loss", "bytes_up", "bytes_down", "known_headers", "addresses", "admission", "device", "state", "unreachable", "directive_sequence")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    KNOWN_HEADERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    sequence: int
    round: int
    head: bytes
    weight: int
    windows: int
    phase: str
    tokens_per_second: float
    loss: float
    bytes_up: int
    bytes_down: int
    known_headers: _containers.RepeatedScalarFieldContainer[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    admission: bytes
    device: str
    state: bytes
    unreachable: _containers.RepeatedScalarFieldContainer[int]
    directive_sequence: int
    def __init__(self, run: _Optional[bytes] = ..., sequence: _Optional[int] = ..., round: _Optional[int] = ..., head: _Optional[bytes] = ..., weight: _Optional[int] = ..., windows: _Optional[int] = ..., phase: _Optional[str] = ..., tokens_per_second: _Optional[float] = ..., loss: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., known_headers: _Optional[_Iterable[int]] = ..., addresses: _Optional[_Iterable[str]] = ..., admission: _Optional[bytes] = ..., device: _Optional[str] = ..., state: _Optional[bytes] = ..., unreachable: _Optional[_Iterable[int]] = ..., directive_sequence: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("run", "sequence")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    sequence: int
    def __init__(self, run: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class Packet(_message.Message):
    __slots__ = ("messages", "certificates")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedScalarFieldContainer[bytes]
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, messages: _Optional[_Iterable[bytes]] = ..., certificates: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChainRequest(_message.Message):
    __slots__ = ("run", "locator")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LOCATOR_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    locator: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run: _Optional[bytes] = ..., locator: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ChainReply(_message.Message):
    __slots__ = ("certificates", "finalization", "more", "directive")
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    FINALIZATION_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    finalization: bytes
    more: bool
    directive: bytes
    def __init__(self, certificates: _Optional[_Iterable[bytes]] = ..., finalization: _Optional[bytes] = ..., more: bool = ..., directive: _Optional[bytes] = ...) -> None: ...

class CoordinatorAddress(_message.Message):
    __slots__ = ("run", "sequence", "coordinators", "fingerprint", "addresses")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    sequence: int
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[bytes] = ..., sequence: _Optional[int] = ..., coordinators: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class CoordinatorAddressRequest(_message.Message):
    __slots__ = ("run", "wants_spec")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WANTS_SPEC_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    wants_spec: bool
    def __init__(self, run: _Optional[bytes] = ..., wants_spec: bool = ...) -> None: ...

class CoordinatorAddressReply(_message.Message):
    __slots__ = ("spec", "coordinator_address", "addresses")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    spec: bytes
    coordinator_address: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, spec: _Optional[bytes] = ..., coordinator_address: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...
