"""The messages in which an engine reports on its requests and on itself."""

import time

import msgspec

from baton_common.histogram import Histogram

from .results import Choice
from .sampling import TokenLogprobs
from .sequence import FinishReason, Sequence


class Delta(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one choice of a request. Only the first delta of choice 0 holds the facts about the prompt."""

    id: int
    choice: int
    offset: int  # index of tokens[0] in the choice's output
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason = FinishReason.NONE
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    queued_s: float = 0.0  # from the request's arrival until the start of its prefill
    prefill_s: float = 0.0  # from the start of its prefill until its first token


def delta_of(sequence: Sequence, choice: Choice, reason: FinishReason) -> Delta:
    """Return the report of a sequence's newest token."""
    offset = sequence.known - sequence.prompt_len - 1
    logprobs = [] if choice.logprobs is None else [choice.logprobs]
    delta = Delta(sequence.request.id, sequence.choice, offset, [choice.token], logprobs, reason)
    if reason and reason is FinishReason.STOP and choice.token in sequence.sampling.stop_token_ids:
        delta.stop_token_id = choice.token
    if offset == 0 and sequence.choice == 0:
        delta.cached_tokens = sequence.cached
        delta.queued_s = sequence.began_at - sequence.arrived_at
        delta.prefill_s = time.monotonic() - sequence.began_at
        delta.prompt_logprobs = sequence.prompt_logprobs if sequence.sampling.prompt_logprobs is not None else None
    return delta


class Reservation(msgspec.Struct, array_like=True):
    """Blocks are reserved for a request that imports KV. The KV of num_tokens tokens from first_token on is missing."""

    id: int
    first_token: int
    num_tokens: int
    generation: int
    cached_tokens: int


class Load(msgspec.Struct, array_like=True):
    """The engine's load at this moment. Its counters begin at the engine's start."""

    running: int
    waiting: int
    blocks_held: int
    blocks_cached: int
    queued_prefill_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    blocks_pinned: int = 0  # those of blocks_held that wait, with computed KV, until decode pods have received it
    step_tokens: Histogram | None = None  # tokens computed in each step
    prefill_rate: float = 0.0  # prompt tokens a second in recent steps; 0 = not measured
    compilations: int = 0  # kernels compiled since the engine was ready
    token_s: float = 0.0  # as StepTimes has it; 0 = not measured
    pair_s: float = 0.0  # as StepTimes has it
    queued_prefill_work: float = 0.0  # of queued_prefill_tokens, in tokens without context
    step_ratios: dict[str, Histogram] = {}  # as StepTimes has them
