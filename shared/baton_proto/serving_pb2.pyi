from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_NONE: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
FINISH_REASON_NONE: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ERROR: FinishReason
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids", "eos_token_ids", "seed", "n", "logprobs", "prompt_logprobs", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    n: int
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "param", "around")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Grammar.Kind]
        KIND_JSON_SCHEMA: _ClassVar[Grammar.Kind]
        KIND_JSON_OBJECT: _ClassVar[Grammar.Kind]
        KIND_REGEX: _ClassVar[Grammar.Kind]
        KIND_EBNF: _ClassVar[Grammar.Kind]
        KIND_CHOICE: _ClassVar[Grammar.Kind]
        KIND_TOOL_CALLS: _ClassVar[Grammar.Kind]
        KIND_LARK: _ClassVar[Grammar.Kind]
    KIND_UNSPECIFIED: Grammar.Kind
    KIND_JSON_SCHEMA: Grammar.Kind
    KIND_JSON_OBJECT: Grammar.Kind
    KIND_REGEX: Grammar.Kind
    KIND_EBNF: Grammar.Kind
    KIND_CHOICE: Grammar.Kind
    KIND_TOOL_CALLS: Grammar.Kind
    KIND_LARK: Grammar.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    AROUND_FIELD_NUMBER: _ClassVar[int]
    kind: Grammar.Kind
    text: str
    param: str
    around: str
    def __init__(self, kind: _Optional[_Union[Grammar.Kind, str]] = ..., text: _Optional[str] = ..., param: _Optional[str] = ..., around: _Optional[str] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GatewayMessage(_message.Message):
    __slots__ = ("submit", "cancel", "peers")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    peers: Peers
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("prefill_addresses",)
    PREFILL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    prefill_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prefill_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "prompt_token_ids", "sampling", "priority", "prefill_addresses", "continuation", "traceparent", "cache_scope")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    priority: int
    prefill_addresses: _containers.RepeatedScalarFieldContainer[str]
    continuation: Continuation
    traceparent: str
    cache_scope: CacheScope
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., prefill_addresses: _Optional[_Iterable[str]] = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ..., traceparent: _Optional[str] = ..., cache_scope: _Optional[_Union[CacheScope, _Mapping]] = ...) -> None: ...

class CacheScope(_message.Message):
    __slots__ = ("salt", "shared_tokens")
    SALT_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    salt: bytes
    shared_tokens: int
    def __init__(self, salt: _Optional[bytes] = ..., shared_tokens: _Optional[int] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("choice", "token_ids")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle", "choice")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    choice: int
    def __init__(self, handle: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class DecodeMessage(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: StepOutput
    def __init__(self, step: _Optional[_Union[StepOutput, _Mapping]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("deltas", "failed_handovers")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FAILED_HANDOVERS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    failed_handovers: _containers.RepeatedCompositeFieldContainer[FailedHandover]
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., failed_handovers: _Optional[_Iterable[_Union[FailedHandover, _Mapping]]] = ...) -> None: ...

class FailedHandover(_message.Message):
    __slots__ = ("handle", "prefill_address")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    prefill_address: str
    def __init__(self, handle: _Optional[int] = ..., prefill_address: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("handle", "choice", "offset", "token_ids", "logprobs", "finish_reason", "stop_token_id", "failure", "prompt")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    choice: int
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    stop_token_id: int
    failure: Failure
    prompt: PromptInfo
    def __init__(self, handle: _Optional[int] = ..., choice: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., prompt: _Optional[_Union[PromptInfo, _Mapping]] = ...) -> None: ...

class PromptInfo(_message.Message):
    __slots__ = ("cached_tokens", "logprobs", "disaggregated", "queued_seconds", "prefill_seconds")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DISAGGREGATED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    disaggregated: bool
    queued_seconds: float
    prefill_seconds: float
    def __init__(self, cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., disaggregated: _Optional[bool] = ..., queued_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "param")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Failure.Code]
        CODE_INVALID: _ClassVar[Failure.Code]
        CODE_UNAVAILABLE: _ClassVar[Failure.Code]
        CODE_INTERNAL: _ClassVar[Failure.Code]
        CODE_NOT_FINITE: _ClassVar[Failure.Code]
    CODE_UNSPECIFIED: Failure.Code
    CODE_INVALID: Failure.Code
    CODE_UNAVAILABLE: Failure.Code
    CODE_INTERNAL: Failure.Code
    CODE_NOT_FINITE: Failure.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: Failure.Code
    message: str
    param: str
    def __init__(self, code: _Optional[_Union[Failure.Code, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("info", "load", "cache")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    load: WorkerLoad
    cache: CacheChanges
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., cache: _Optional[_Union[CacheChanges, _Mapping]] = ...) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("snapshot", "gained", "lost")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    GAINED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    gained: _containers.RepeatedScalarFieldContainer[int]
    lost: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, snapshot: _Optional[bool] = ..., gained: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("role", "model", "revision", "epoch", "fingerprint", "max_model_len", "vocab_size", "block_size", "num_blocks", "prefill_rate", "token_bytes", "step_tokens", "cache_scopes", "table_windows")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPES_FIELD_NUMBER: _ClassVar[int]
    TABLE_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    model: str
    revision: str
    epoch: int
    fingerprint: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    prefill_rate: float
    token_bytes: int
    step_tokens: int
    cache_scopes: bool
    table_windows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., prefill_rate: _Optional[float] = ..., token_bytes: _Optional[int] = ..., step_tokens: _Optional[int] = ..., cache_scopes: _Optional[bool] = ..., table_windows: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "blocks_held", "blocks_cached", "tickets", "queued_prefill_tokens", "preemptions", "prefix_queries", "prefix_hits", "draining", "handover_events", "handed_over_tokens", "exposed_handover_s", "prefill_rate", "prefill_times", "queued_prefill_work")
    class HandoverEventsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_EVENTS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RATE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIMES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_WORK_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    blocks_held: int
    blocks_cached: int
    tickets: int
    queued_prefill_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    draining: bool
    handover_events: _containers.ScalarMap[str, int]
    handed_over_tokens: int
    exposed_handover_s: float
    prefill_rate: float
    prefill_times: PrefillTimes
    queued_prefill_work: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_held: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., tickets: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., draining: _Optional[bool] = ..., handover_events: _Optional[_Mapping[str, int]] = ..., handed_over_tokens: _Optional[int] = ..., exposed_handover_s: _Optional[float] = ..., prefill_rate: _Optional[float] = ..., prefill_times: _Optional[_Union[PrefillTimes, _Mapping]] = ..., queued_prefill_work: _Optional[float] = ...) -> None: ...

class PrefillTimes(_message.Message):
    __slots__ = ("token_s", "pair_s")
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    token_s: float
    pair_s: float
    def __init__(self, token_s: _Optional[float] = ..., pair_s: _Optional[float] = ...) -> None: ...
