"""Converts messages on the wire to the engine's types, and back."""

from typing import cast

from baton_common.cache_scope import UNSALTED, CacheScope
from baton_engine.delta import Delta
from baton_engine.sampling import Grammar, SamplingParams, TokenLogprobs
from baton_engine.sequence import FinishReason, Request
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb

NOT_FINITE_MESSAGE = "The model computed NaN or infinity for this request."


def request_from_wire(id: int, order: pb.Submit | kv.Ticket, exports_from: int | None = None) -> Request:
    """Return the engine's request for what a gateway or a decode pod has ordered. exports_from: as in Request."""
    return Request(
        id=id,
        prompt=list(order.prompt_token_ids),
        sampling=sampling_from_wire(order.sampling),
        priority=order.priority,
        exports_from=exports_from,
        output=list(order.continuation.token_ids),
        choice=order.continuation.choice,
        cache_scope=cache_scope_from_wire(order.cache_scope),
    )


def sampling_from_wire(wire: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        logit_bias=dict(wire.logit_bias),
        allowed_token_ids=list(wire.allowed_token_ids),
        bad_words=[list(word.token_ids) for word in wire.bad_words],
        stop_token_ids=list(wire.stop_token_ids),
        eos_token_ids=list(wire.eos_token_ids),
        seed=wire.seed,
        n=wire.n,
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        grammar=_grammar_from_wire(wire.grammar) if wire.HasField("grammar") else None,
    )


def _grammar_from_wire(wire: pb.Grammar) -> Grammar:
    return Grammar(wire.kind, wire.text, wire.param, wire.around)


def cache_scope_from_wire(wire: pb.CacheScope) -> CacheScope:
    """Return the scope. An absent message counts as an empty one."""
    return CacheScope(wire.salt, wire.shared_tokens) if wire.salt else UNSALTED


def delta_to_wire(delta: Delta, handle: int, disaggregated: bool) -> pb.Delta:
    wire = pb.Delta(handle=handle, choice=delta.choice, offset=delta.offset, token_ids=delta.tokens)
    # Few deltas have other fields, and setting a field costs time even when the value is the default.
    if delta.logprobs:
        wire.logprobs.extend(_logprobs_to_wire(entry) for entry in delta.logprobs)
    if delta.finish_reason:
        wire.finish_reason = _reason(delta.finish_reason)
        if delta.finish_reason is FinishReason.ERROR:
            wire.failure.code = pb.Failure.CODE_INVALID
            wire.failure.message = "The grammar became too complex, or allows no token that the model has."
    if delta.stop_token_id is not None:
        wire.stop_token_id = delta.stop_token_id
    if delta.cached_tokens is not None:
        wire.prompt.cached_tokens = delta.cached_tokens
        wire.prompt.disaggregated = disaggregated
        wire.prompt.queued_seconds, wire.prompt.prefill_seconds = delta.queued_s, delta.prefill_s
        if delta.prompt_logprobs is not None:
            # Nothing precedes the first token, so it has no logprobs.
            wire.prompt.logprobs.add()
            wire.prompt.logprobs.extend(_logprobs_to_wire(entry) for entry in delta.prompt_logprobs)
    return wire


def _reason(reason: FinishReason) -> pb.FinishReason:
    return cast(pb.FinishReason, int(reason))


def _logprobs_to_wire(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def failure_delta(handle: int, code: pb.Failure.Code, message: str, param: str = "", choice: int = 0) -> pb.Delta:
    """Return the delta that ends a request with an error."""
    failure = pb.Failure(code=code, message=message, param=param)
    return pb.Delta(handle=handle, choice=choice, finish_reason=_reason(FinishReason.ERROR), failure=failure)
