"""What an engine tells of its requests and of itself."""

import time

import msgspec

from baton_common.histogram import Histogram

from .results import Choice
from .sampling import TokenLogprobs
from .sequence import FinishReason, Sequence


class Delta(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one choice of a request. The prompt's part is in the first delta of choice 0."""

    id: int
    choice: int
    offset: int  # of tokens[0] among the choice's output
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason = FinishReason.NONE
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    queued_s: float = 0.0  # from its arrival until its prompt began to be computed
    prefill_s: float = 0.0  # from then until its first token


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
    """Blocks are reserved for a request that imports KV; that of num_tokens tokens from first_token on is missing."""

    id: int
    first_token: int
    num_tokens: int
    generation: int
    cached_tokens: int


class Load(msgspec.Struct, array_like=True):
    """What the engine holds and does at this moment; counters run since its start."""

    running: int
    waiting: int
    blocks_held: int
    blocks_cached: int
    queued_prefill_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    blocks_pinned: int = 0  # of blocks_held, by computed prompts until decode pods have them
    step_tokens: Histogram | None = None  # tokens computed in each step
    prefill_rate: float = 0.0  # tokens a second, of late; 0 = not measured
