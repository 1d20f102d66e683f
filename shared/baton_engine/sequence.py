"""A request inside the engine, and its sequences: one per choice, each with tokens and a block table."""

import enum
from collections.abc import Iterator

import msgspec

from baton_common.block_hash import block_hash

from .sampling import SamplingParams, TokenLogprobs


class FinishReason(enum.IntEnum):
    """As baton.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


class Request(msgspec.Struct, kw_only=True):
    """What the engine is asked to do.

    imports_kv: the prompt's KV and the first token of each choice come from another pod; the engine only reserves the
    blocks and waits. exports_from: the request ends with its first tokens, its blocks from this index on are handed to
    another pod, and all stay until they are released.
    """

    id: int
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    imports_kv: bool = False
    exports_from: int | None = None


class State(enum.Enum):
    WAITING = enum.auto()  # holds no blocks
    IMPORTING = enum.auto()  # holds the prompt's blocks, KV under way from another pod
    RUNNING = enum.auto()
    EXPORTED = enum.auto()  # finished; its blocks stay until the other pod has them
    FINISHED = enum.auto()


class Sequence:
    """One choice of a request: its tokens, what of them is computed, and where that lies.

    `computed` counts the tokens whose KV is in `blocks`, including those of the step now on its way; `cached` those
    that were there when it was admitted; `remembered` the blocks that the prefix cache knows.
    """

    def __init__(self, request: Request, arrival: int, root: bytes, block_size: int) -> None:
        self.request = request
        self.arrival = arrival
        self.choice = 0
        self.tokens = list(request.prompt)
        self.computed = 0
        self.cached = 0
        self.remembered = 0
        self.blocks: list[int] = []
        self.state = State.WAITING
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._block_size = block_size
        self._hashes = [root]

    def fork(self, choice: int) -> "Sequence":
        """Return a sequence for another choice, of the same tokens and blocks; the caller counts the references."""
        other = Sequence(self.request, self.arrival, self._hashes[0], self._block_size)
        other.choice = choice
        other.tokens = list(self.tokens)
        other.computed = self.computed
        other.cached = self.cached
        other.remembered = self.remembered
        other.blocks = list(self.blocks)
        other.state = self.state
        other._hashes = list(self._hashes)
        return other

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: smaller is more urgent."""
        return self.request.priority, self.arrival, self.choice

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self._block_size)

    def hashes(self, count: int) -> list[bytes]:
        """Return the hashes of the first `count` blocks, all of which must be full of known tokens."""
        size = self._block_size
        for index in range(len(self._hashes) - 1, count):
            self._hashes.append(block_hash(self._hashes[-1], self.tokens[index * size : (index + 1) * size]))
        return self._hashes[1 : count + 1]

    def finish_reason(self, max_model_len: int) -> FinishReason:
        """Return whether the newest token ends the sequence."""
        sampling, token = self.sampling, self.tokens[-1]
        if self.output_len >= sampling.min_tokens and (
            token in sampling.eos_token_ids or token in sampling.stop_token_ids
        ):
            return FinishReason.STOP
        if self.output_len >= sampling.max_tokens or len(self.tokens) >= max_model_len:
            return FinishReason.LENGTH
        return FinishReason.NONE


class Step(msgspec.Struct):
    """What one engine step computes: for each sequence, its next `count` tokens."""

    sequences: list[Sequence] = []
    counts: list[int] = []
    copies: list[tuple[int, int]] = []  # (from, to) blocks to copy before anything is computed

    def __iter__(self) -> Iterator[tuple[Sequence, int]]:
        return zip(self.sequences, self.counts, strict=True)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)
