"""A request inside the engine, and its sequences: one per choice, each with tokens and a block table."""

import enum
import time
from typing import TYPE_CHECKING

import msgspec

from baton_common.block_hash import ROOT_HASH, block_hashes, later_block_hashes
from baton_common.cache_scope import MAX_SALT_BYTES, UNSALTED, CacheScope

from .block_tables import BlockTable, SharedBlocks
from .sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    # The RPC process imports this module, and has no other use for numpy and the library of grammars.
    from .matcher import Matcher

# The number of a choice is part of the random counter, which has 32-bit words.
_MOST_CHOICE = 1 << 16


class FinishReason(enum.IntEnum):
    """Mirrors baton.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


# Needed at every token, and looking up a member of an enum is slow in Python 3.11.
_GOES_ON = FinishReason.NONE


class Request(msgspec.Struct, kw_only=True):
    """A request to the engine.

    imports_kv: prefill pods bring the prompt's KV and the first token of each choice; the engine only reserves the
    blocks and waits. exports_from: the request ends here with its first tokens. The KV of its tokens from this index on
    is handed to another pod, and all its blocks stay until they are released. output: the tokens that another engine
    has generated before this one continues the request. choice: the number of the only choice that it continues. Both
    need n = 1. cache_scope: defines the requests with which this one shares cached blocks and compiled grammars.
    """

    id: int
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    imports_kv: bool = False
    exports_from: int | None = None
    output: list[int] = []
    choice: int = 0
    cache_scope: CacheScope = UNSALTED

    def error(self, vocab_size: int, max_model_len: int, max_num_seqs: int) -> tuple[str, str] | None:
        """Return (field, message) when no engine of this vocabulary and these limits can run it, else None."""
        length, params = len(self.prompt), self.sampling
        if len(self.cache_scope.salt) > MAX_SALT_BYTES:
            return "cache_scope", f"the salt is longer than {MAX_SALT_BYTES} bytes"
        if length == 0:
            return "prompt", "must hold at least one token"
        if min(self.prompt) < 0 or max(self.prompt) >= vocab_size:
            return "prompt", f"a token id is outside the vocabulary of {vocab_size}"
        if length + params.max_tokens > max_model_len:
            return "prompt", (
                f"{length} prompt tokens and max_tokens {params.max_tokens} are more than the context of "
                f"{max_model_len}"
            )
        if self.output or self.choice:
            if params.n != 1:
                return "n", "must be 1 for a choice that goes on"
            if self.choice > _MOST_CHOICE:
                return "choice", f"must be at most {_MOST_CHOICE}"
            if len(self.output) >= params.max_tokens:
                return "max_tokens", f"{len(self.output)} tokens have been generated already"
            if min(self.output, default=0) < 0 or max(self.output, default=0) >= vocab_size:
                return "output", f"a token id is outside the vocabulary of {vocab_size}"
        if params.n > max_num_seqs:
            return "n", f"must be at most {max_num_seqs}"
        return params.error(vocab_size)


class State(enum.Enum):
    NEW = enum.auto()  # not in the scheduler's queue yet, since its grammar is being compiled
    WAITING = enum.auto()  # in the queue, without blocks
    IMPORTING = enum.auto()  # holds the prompt's blocks and waits until a source has brought their KV
    RUNNING = enum.auto()
    EXPORTED = enum.auto()  # finished; its blocks stay until the other pod has received their KV
    FINISHED = enum.auto()


class Sequence:
    """One choice of a request: its tokens, how many of them are computed, and where their KV lies.

    Its tokens are the `prompt`, which belongs to the request and is shared by its choices, and its own `output`;
    `known` counts both. The first `given_len` came with the request.

    One module writes each of the fields that change:

    - this one, when the engine calls `append`: `output` and `known`, and the hashes.
    - the scheduler: `state`. `num_tokens` counts the known tokens and those that are sampled on the device and not
      read yet. `computed` counts the tokens whose KV is in the sequence's blocks, including those of the steps under
      way. `began_at` (of the monotonic clock, in seconds) is when it ran for the first time. `queue_place` is its
      prompt's place in the queue, negative before it has one, and `order` says who goes first: smaller is more urgent.
      `import_end`: a source brings the KV of the tokens before this one that are not cached; 0 = the engine computes
      them.
    - `admitted`: `row`, the sequence's place among the running ones, -1 when it does not run, and what is counted for
      it: `rows_held`, and `may_grow`, the tokens that it could get when it was admitted.
    - the block allocator: `tables`, the block table of each group of layers, whose first blocks the sequence may have
      as `shared` with its forks. `cached` counts the tokens whose KV the prefix cache had when the sequence was
      admitted. `settled` counts the full blocks that are computed, finite and known to the prefix cache.
    - `compiling`: `matcher`, which follows the output through the grammar, if there is one.
    - the engine: `prompt_logprobs`, and `may_import`, which is False once a source has failed to bring KV.

    `fork` copies them all.
    """

    def __init__(self, request: Request, arrival: int, block_size: int, max_model_len: int, choice: int = 0) -> None:
        sampling = request.sampling
        self.request = request
        self.sampling = sampling
        self.arrival = arrival
        self.arrived_at = time.monotonic()
        self.began_at = 0.0
        self.choice = choice
        self.queue_place = -1
        self.import_end = 0
        self.may_import = True
        self.prompt = request.prompt
        self.output = list(request.output)
        self.prompt_len = len(self.prompt)
        self.given_len = self.known = self.prompt_len + len(self.output)
        self.most_tokens = min(self.prompt_len + sampling.max_tokens, max_model_len)
        self.exports = request.exports_from is not None
        self.splits = sampling.n > 1 or self.exports  # no step may follow before its first new tokens are read
        self.num_tokens = self.given_len
        self.row = -1
        self.rows_held = 0
        self.may_grow = 0
        self.computed = 0
        self.cached = 0
        self.settled = 0
        self.tables: list[BlockTable] = []
        self.shared: SharedBlocks | None = None  # blocks that it has together with its forks
        self.state = State.NEW
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.matcher: Matcher | None = None
        self._block_size = block_size
        self._prompt_hashes: list[bytes] = []  # of blocks that hold nothing but prompt; common to all choices
        self._hashes: list[bytes] = []  # of the blocks after those
        self._stops = frozenset((*sampling.eos_token_ids, *sampling.stop_token_ids))
        # The output tokens that the sequence gets in any case, unless its client leaves.
        self.certain_tokens = sampling.min_tokens if self._stops else self.most_tokens - self.prompt_len
        if sampling.grammar is not None:
            self.certain_tokens = 1

    def fork(self, choice: int) -> "Sequence":
        """Return a sequence with the same tokens for another choice. The caller gives it its blocks.

        Both share the prompt and its hashes, so that a fork takes no longer for a longer prompt.
        """
        other = Sequence(self.request, self.arrival, self._block_size, self.most_tokens, choice)
        other.queue_place = self.queue_place
        other.arrived_at, other.began_at = self.arrived_at, self.began_at
        other.output = list(self.output)
        other.known = other.num_tokens = self.known
        other.computed = self.computed
        other.cached = self.cached
        other.settled = self.settled
        other.state = self.state
        other._prompt_hashes, other._hashes = self._prompt_hashes, list(self._hashes)
        other.matcher = self.matcher.copy() if self.matcher is not None else None
        return other

    @property
    def tenant(self) -> bytes:
        """Stands for the tenant among those of the engine. Tenants that share cached blocks count as one."""
        return self.request.cache_scope.salt

    @property
    def order(self) -> tuple[int, int, int, int]:
        return self.request.priority, self.queue_place, self.arrival, self.choice

    def append(self, token: int) -> None:
        """Add the next token."""
        self.output.append(token)
        self.known += 1

    def tokens(self, first: int, end: int) -> list[int]:
        """Return those of the tokens [first, end) that are known."""
        start = self.prompt_len
        if first >= start:
            return self.output[first - start : end - start]
        return self.prompt[first:end] + self.output[: max(end - start, 0)]

    @property
    def output_len(self) -> int:
        return self.known - self.prompt_len

    @property
    def pending(self) -> int:
        """The number of tokens that are sampled on the device and not read yet."""
        return self.num_tokens - self.known

    @property
    def ends_here(self) -> bool:
        """Whether the token in flight is the last one, or one that must be read before the sequence continues."""
        if self.num_tokens == self.known:
            return False
        return self.num_tokens >= self.most_tokens or (self.splits and self.known == self.given_len)

    @property
    def imports(self) -> bool:
        """Whether a source is to bring KV before this sequence can run."""
        return self.import_end > 0

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the logits of every prompt token are needed, so that none may be skipped."""
        return self.sampling.prompt_logprobs is not None and not self.output_len

    @property
    def choices(self) -> range:
        """The choices whose next token is drawn from this sequence's logits: all of the request until they fork."""
        count = self.sampling.n if self.known == self.prompt_len else 1
        return range(self.choice, self.choice + count)

    @property
    def rows_needed(self) -> int:
        """The number of rows that it needs once its choices have forked. Those of an export fork on the other pod."""
        return 1 if self.exports or self.known > self.prompt_len else self.sampling.n

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds, in all groups of layers."""
        return sum(len(table.blocks) - table.gone for table in self.tables)

    def hashes(self, first: int, end: int) -> list[bytes]:
        """Return the hashes of the blocks [first, end), all of which must be full of known tokens."""
        size, scope, of_prompt = self._block_size, self.request.cache_scope, self._prompt_hashes
        whole = self.prompt_len // size
        if len(of_prompt) < min(end, whole):
            of_prompt += block_hashes(self.prompt, size, min(end, whole), scope, of_prompt)
        if end <= whole:
            return of_prompt[first:end]
        if len(self._hashes) < end - whole:
            # The prompt's hashes are complete at this point, so the next hash follows from the last known one.
            done = whole + len(self._hashes)
            parent = (self._hashes or of_prompt or [ROOT_HASH])[-1]
            self._hashes += later_block_hashes(self.tokens(done * size, end * size), size, done, parent, scope)
        return of_prompt[first:] + self._hashes[max(first - whole, 0) : end - whole]

    def finish_reason(self) -> FinishReason:
        """Return why the newest token ends the sequence, NONE if it does not."""
        length = self.known
        if self.matcher is not None and self.matcher.failed:
            return FinishReason.ERROR
        # min_tokens cannot prolong a text whose grammar allows no further token.
        if self.output[-1] in self._stops and (
            length - self.prompt_len >= self.sampling.min_tokens or self.matcher is not None
        ):
            return FinishReason.STOP
        if self.matcher is not None:
            if not self.matcher.follow(self.output):
                return FinishReason.ERROR
            if self.matcher.complete:
                return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.most_tokens else _GOES_ON
