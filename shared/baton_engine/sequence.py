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

    `pending` counts tokens that are sampled on the device and not read yet. `computed` counts the tokens whose KV is in
    `blocks`, including those of the steps now on their way; `cached` those that were there when it was admitted;
    `remembered` the blocks that the prefix cache knows. `row` is its place among the running ones, -1 when it does not
    run, and `admissions` how often it has been given blocks.
    """

    def __init__(self, request: Request, arrival: int, root: bytes, block_size: int) -> None:
        self.request = request
        self.arrival = arrival
        self.choice = 0
        self.tokens = list(request.prompt)
        self.pending = 0
        self.row = -1
        self.admissions = 0
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
    def num_tokens(self) -> int:
        """Tokens there are, those not read yet included."""
        return len(self.tokens) + self.pending

    @property
    def is_complete(self) -> bool:
        """Whether the token under way is known to be the last, or others must be known before the next step."""
        if not self.pending:
            return False
        output = self.output_len + self.pending
        first = self.output_len == 0 and (self.sampling.n > 1 or self.request.exports_from is not None)
        return first or output >= self.sampling.max_tokens

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
    """What one engine step computes: for each sequence the `count` tokens that end at `ends`.

    samples: whether it is the sequence's last token for now, after which the next is sampled.
    """

    sequences: list[Sequence] = []
    counts: list[int] = []
    ends: list[int] = []
    samples: list[bool] = []
    num_tokens: int = 0
    copies: list[tuple[int, int]] = []  # (from, to) blocks to copy before anything is computed

    def __iter__(self) -> Iterator[tuple[Sequence, int, int]]:
        """Yield (sequence, count, end)."""
        return zip(self.sequences, self.counts, self.ends, strict=True)

    def put(self, sequence: Sequence, count: int) -> None:
        """Add a sequence's next `count` tokens and note them as computed, and its next token as pending."""
        sequence.computed += count
        samples = sequence.computed == sequence.num_tokens
        sequence.pending += samples
        self.sequences.append(sequence)
        self.counts.append(count)
        self.ends.append(sequence.computed)
        self.samples.append(samples)
        self.num_tokens += count
