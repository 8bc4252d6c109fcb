from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRunRequest(_message.Message):
    __slots__ = ("run", "knows_spec")
    RUN_FIELD_NUMBER: _ClassVar[int]
    KNOWS_SPEC_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    knows_spec: bool
    def __init__(self, run: _Optional[bytes] = ..., knows_spec: bool = ...) -> None: ...

class GetRunReply(_message.Message):
    __slots__ = ("spec", "addresses", "page", "over", "last")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    spec: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    page: str
    over: str
    last: RestingState
    def __init__(self, spec: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ..., page: _Optional[str] = ..., over: _Optional[str] = ..., last: _Optional[_Union[RestingState, _Mapping]] = ...) -> None: ...

class RestingState(_message.Message):
    __slots__ = ("record", "round", "state")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    round: int
    state: bytes
    def __init__(self, record: _Optional[bytes] = ..., round: _Optional[int] = ..., state: _Optional[bytes] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    def __init__(self, request: _Optional[bytes] = ...) -> None: ...

class AdmissionRequest(_message.Message):
    __slots__ = ("run", "time", "code", "name", "nonce", "protocol")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    time: int
    code: str
    name: str
    nonce: int
    protocol: int
    def __init__(self, run: _Optional[bytes] = ..., time: _Optional[int] = ..., code: _Optional[str] = ..., name: _Optional[str] = ..., nonce: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class AdmitReply(_message.Message):
    __slots__ = ("admission", "time", "addresses")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    admission: bytes
    time: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, admission: _Optional[bytes] = ..., time: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    def __init__(self, run: _Optional[bytes] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("peer", "name", "phase", "round", "loss", "tokens_per_second", "bytes_up", "bytes_down", "micro_credits_settled", "micro_credits_pending", "head", "seconds_since_heartbeat", "device")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_PENDING_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    name: str
    phase: str
    round: int
    loss: float
    tokens_per_second: float
    bytes_up: int
    bytes_down: int
    micro_credits_settled: int
    micro_credits_pending: int
    head: bytes
    seconds_since_heartbeat: float
    device: str
    def __init__(self, peer: _Optional[bytes] = ..., name: _Optional[str] = ..., phase: _Optional[str] = ..., round: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., micro_credits_settled: _Optional[int] = ..., micro_credits_pending: _Optional[int] = ..., head: _Optional[bytes] = ..., seconds_since_heartbeat: _Optional[float] = ..., device: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("name", "round", "head", "state", "state_round", "tokens", "total_tokens", "tokens_per_second", "loss", "peers", "page", "checkpoint", "checkpoint_round", "final_round", "health", "message", "time", "rounds", "losses", "alerts", "convictions", "description", "contact", "license")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ROUND_FIELD_NUMBER: _ClassVar[int]
    FINAL_ROUND_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    ALERTS_FIELD_NUMBER: _ClassVar[int]
    CONVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    LICENSE_FIELD_NUMBER: _ClassVar[int]
    name: str
    round: int
    head: bytes
    state: bytes
    state_round: int
    tokens: int
    total_tokens: int
    tokens_per_second: float
    loss: float
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    page: str
    checkpoint: bytes
    checkpoint_round: int
    final_round: int
    health: str
    message: str
    time: int
    rounds: _containers.RepeatedCompositeFieldContainer[RoundStatus]
    losses: _containers.RepeatedScalarFieldContainer[float]
    alerts: _containers.RepeatedCompositeFieldContainer[AlertStatus]
    convictions: _containers.RepeatedScalarFieldContainer[str]
    description: str
    contact: str
    license: str
    def __init__(self, name: _Optional[str] = ..., round: _Optional[int] = ..., head: _Optional[bytes] = ..., state: _Optional[bytes] = ..., state_round: _Optional[int] = ..., tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., loss: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., page: _Optional[str] = ..., checkpoint: _Optional[bytes] = ..., checkpoint_round: _Optional[int] = ..., final_round: _Optional[int] = ..., health: _Optional[str] = ..., message: _Optional[str] = ..., time: _Optional[int] = ..., rounds: _Optional[_Iterable[_Union[RoundStatus, _Mapping]]] = ..., losses: _Optional[_Iterable[float]] = ..., alerts: _Optional[_Iterable[_Union[AlertStatus, _Mapping]]] = ..., convictions: _Optional[_Iterable[str]] = ..., description: _Optional[str] = ..., contact: _Optional[str] = ..., license: _Optional[str] = ...) -> None: ...

class RoundStatus(_message.Message):
    __slots__ = ("round", "tokens", "loss", "contributors", "absent", "absent_total", "final")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    ABSENT_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    round: int
    tokens: int
    loss: float
    contributors: int
    absent: _containers.RepeatedScalarFieldContainer[str]
    absent_total: int
    final: bool
    def __init__(self, round: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., contributors: _Optional[int] = ..., absent: _Optional[_Iterable[str]] = ..., absent_total: _Optional[int] = ..., final: bool = ...) -> None: ...

class AlertStatus(_message.Message):
    __slots__ = ("name", "since", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    since: int
    message: str
    def __init__(self, name: _Optional[str] = ..., since: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class AccountRequest(_message.Message):
    __slots__ = ("run", "peer")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    peer: bytes
    def __init__(self, run: _Optional[bytes] = ..., peer: _Optional[bytes] = ...) -> None: ...

class AccountReply(_message.Message):
    __slots__ = ("name", "micro_credits_settled", "micro_credits_pending", "tokens", "rounds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    MICRO_CREDITS_PENDING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    micro_credits_settled: int
    micro_credits_pending: int
    tokens: int
    rounds: int
    def __init__(self, name: _Optional[str] = ..., micro_credits_settled: _Optional[int] = ..., micro_credits_pending: _Optional[int] = ..., tokens: _Optional[int] = ..., rounds: _Optional[int] = ...) -> None: ...

class BindRequest(_message.Message):
    __slots__ = ("run", "binding")
    RUN_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    binding: bytes
    def __init__(self, run: _Optional[bytes] = ..., binding: _Optional[bytes] = ...) -> None: ...

class BindReply(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: int
    def __init__(self, peers: _Optional[int] = ...) -> None: ...

class CertificatesRequest(_message.Message):
    __slots__ = ("run", "after", "limit", "record")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    after: bytes
    limit: int
    record: bytes
    def __init__(self, run: _Optional[bytes] = ..., after: _Optional[bytes] = ..., limit: _Optional[int] = ..., record: _Optional[bytes] = ...) -> None: ...

class CertificatesReply(_message.Message):
    __slots__ = ("certificates", "more")
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    more: bool
    def __init__(self, certificates: _Optional[_Iterable[bytes]] = ..., more: bool = ...) -> None: ...

class DirectiveRequest(_message.Message):
    __slots__ = ("run", "directive", "base")
    RUN_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    directive: bytes
    base: bytes
    def __init__(self, run: _Optional[bytes] = ..., directive: _Optional[bytes] = ..., base: _Optional[bytes] = ...) -> None: ...

class DirectiveReply(_message.Message):
    __slots__ = ("directive", "round", "peers", "informed", "convictions", "wait")
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    INFORMED_FIELD_NUMBER: _ClassVar[int]
    CONVICTIONS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    directive: bytes
    round: int
    peers: int
    informed: int
    convictions: _containers.RepeatedCompositeFieldContainer[Conviction]
    wait: str
    def __init__(self, directive: _Optional[bytes] = ..., round: _Optional[int] = ..., peers: _Optional[int] = ..., informed: _Optional[int] = ..., convictions: _Optional[_Iterable[_Union[Conviction, _Mapping]]] = ..., wait: _Optional[str] = ...) -> None: ...

class Conviction(_message.Message):
    __slots__ = ("peer", "round")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    round: int
    def __init__(self, peer: _Optional[bytes] = ..., round: _Optional[int] = ...) -> None: ...
