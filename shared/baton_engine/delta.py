"""What an engine tells of its requests and of itself."""

import msgspec

from baton_common.histogram import Histogram

from .sampling import TokenLogprobs
from .sequence import FinishReason


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
