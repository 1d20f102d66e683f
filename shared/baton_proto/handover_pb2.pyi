from baton_proto import serving_pb2 as _serving_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeToPrefill(_message.Message):
    __slots__ = ("hello", "ticket", "cancel", "ack", "renew", "gpu_pair", "gpu_credit")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    GPU_PAIR_FIELD_NUMBER: _ClassVar[int]
    GPU_CREDIT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ticket: Ticket
    cancel: TicketRef
    ack: TicketRef
    renew: Renew
    gpu_pair: GpuPair
    gpu_credit: GpuCredit
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., cancel: _Optional[_Union[TicketRef, _Mapping]] = ..., ack: _Optional[_Union[TicketRef, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., gpu_pair: _Optional[_Union[GpuPair, _Mapping]] = ..., gpu_credit: _Optional[_Union[GpuCredit, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("epoch", "fingerprint", "gpu_piece_bytes", "gpu_unchecked", "gpu_credit", "kv_format", "gpus")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GPU_PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_UNCHECKED_FIELD_NUMBER: _ClassVar[int]
    GPU_CREDIT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    fingerprint: str
    gpu_piece_bytes: int
    gpu_unchecked: bool
    gpu_credit: int
    kv_format: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., gpu_piece_bytes: _Optional[int] = ..., gpu_unchecked: _Optional[bool] = ..., gpu_credit: _Optional[int] = ..., kv_format: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "session", "bulk_port", "bulk_token", "gpu_credit")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    BULK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GPU_CREDIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    session: int
    bulk_port: int
    bulk_token: bytes
    gpu_credit: bool
    def __init__(self, epoch: _Optional[int] = ..., session: _Optional[int] = ..., bulk_port: _Optional[int] = ..., bulk_token: _Optional[bytes] = ..., gpu_credit: _Optional[bool] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket_id", "request_id", "prompt_token_ids", "sampling", "priority", "first_token", "generation", "lease_ms", "continuation", "traceparent", "cache_scope")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    ticket_id: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _serving_pb2.SamplingParams
    priority: int
    first_token: int
    generation: int
    lease_ms: int
    continuation: _serving_pb2.Continuation
    traceparent: str
    cache_scope: _serving_pb2.CacheScope
    def __init__(self, ticket_id: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_serving_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., first_token: _Optional[int] = ..., generation: _Optional[int] = ..., lease_ms: _Optional[int] = ..., continuation: _Optional[_Union[_serving_pb2.Continuation, _Mapping]] = ..., traceparent: _Optional[str] = ..., cache_scope: _Optional[_Union[_serving_pb2.CacheScope, _Mapping]] = ...) -> None: ...

class TicketRef(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: int
    def __init__(self, ticket_id: _Optional[int] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("ticket_ids", "lease_ms")
    TICKET_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    ticket_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_ms: int
    def __init__(self, ticket_ids: _Optional[_Iterable[int]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class PrefillToDecode(_message.Message):
    __slots__ = ("welcome", "first_tokens", "failed", "alive", "gpu_pair")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    GPU_PAIR_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    first_tokens: FirstTokens
    failed: TicketFailed
    alive: Alive
    gpu_pair: GpuPair
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., failed: _Optional[_Union[TicketFailed, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., gpu_pair: _Optional[_Union[GpuPair, _Mapping]] = ...) -> None: ...

class GpuPair(_message.Message):
    __slots__ = ("id", "up", "lost", "room", "ranks")
    ID_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    up: bool
    lost: str
    room: bool
    ranks: int
    def __init__(self, id: _Optional[bytes] = ..., up: _Optional[bool] = ..., lost: _Optional[str] = ..., room: _Optional[bool] = ..., ranks: _Optional[int] = ...) -> None: ...

class GpuCredit(_message.Message):
    __slots__ = ("pieces",)
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pieces: int
    def __init__(self, pieces: _Optional[int] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("ticket_id", "deltas")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: int
    deltas: _containers.RepeatedCompositeFieldContainer[_serving_pb2.Delta]
    def __init__(self, ticket_id: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[_serving_pb2.Delta, _Mapping]]] = ...) -> None: ...

class TicketFailed(_message.Message):
    __slots__ = ("ticket_id", "failure")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ticket_id: int
    failure: _serving_pb2.Failure
    def __init__(self, ticket_id: _Optional[int] = ..., failure: _Optional[_Union[_serving_pb2.Failure, _Mapping]] = ...) -> None: ...

class PiecesRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class KvPiece(_message.Message):
    __slots__ = ("checksum", "header", "payload")
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    checksum: int
    header: bytes
    payload: bytes
    def __init__(self, checksum: _Optional[int] = ..., header: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PieceHeader(_message.Message):
    __slots__ = ("epoch", "ticket_id", "generation", "first_token", "num_tokens", "first_layer", "num_layers", "first_head", "num_heads", "gpu_bytes", "gpu_checksum")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ticket_id: int
    generation: int
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    gpu_bytes: int
    gpu_checksum: int
    def __init__(self, epoch: _Optional[int] = ..., ticket_id: _Optional[int] = ..., generation: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., gpu_bytes: _Optional[int] = ..., gpu_checksum: _Optional[int] = ...) -> None: ...
