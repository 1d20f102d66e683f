"""The plan of one engine step, which the scheduler passes to the runner. It holds numbers and no sequences."""

import msgspec
import numpy as np

from .sampling import SamplingParams


class NewRow(msgspec.Struct, eq=False, kw_only=True):
    """A row of the table that was assigned to a sequence, with all that is known of the sequence.

    prompt: the tokens of the request's prompt. The choices of a request share this list, which never changes.
    output: the tokens after the prompt that are known. blocks: [groups of layers, blocks] int32, its block tables.
    choice: the number of the choice, which its noise depends on.
    """

    row: int
    prompt: list[int]
    output: list[int]
    blocks: np.ndarray
    sampling: SamplingParams
    choice: int

    def tokens(self, first: int, end: int) -> list[int]:
        """Return those of the tokens [first, end) that are known."""
        start = len(self.prompt)
        if first >= start:
            return self.output[first - start : end - start]
        return self.prompt[first:end] + self.output[: max(end - start, 0)]


class StepPlan(msgspec.Struct):
    """The chunks of a step, and what has changed in the row table since the plan before.

    Chunk i is the `counts[i]` tokens of row `rows[i]` that end before index `ends[i]`. `draws[i]` tokens are drawn
    after its last one: 0 when more of the prompt follows, and more than one for the choices of a request that are still
    to fork. They are numbered from the row's choice on. Each chunk has another row.

    decodes_only: each chunk is one token after which one is drawn. new_rows: they replace what their rows held.
    new_blocks: (row, group of layers, index, block) of block tables. copies: (from, to) blocks to copy before anything
    is computed. masked: the chunks whose draws wait for a grammar mask. prompt_logprobs: (chunk, index of a token) for
    each chunk that wants the logprobs of prompt tokens, those before the index excepted. exported: the tokens of each
    chunk whose KV another pod gets.
    """

    rows: list[int] = []
    counts: list[int] = []
    ends: list[int] = []
    draws: list[int] = []
    num_tokens: int = 0
    decodes_only: bool = True
    new_rows: list[NewRow] = []
    new_blocks: list[tuple[int, int, int, int]] = []
    copies: list[tuple[int, int]] = []
    masked: list[int] = []
    prompt_logprobs: list[tuple[int, int]] = []
    exported: list[int] = []

    def put(self, row: int, count: int, end: int, draws: int) -> None:
        """Add a chunk."""
        self.rows.append(row)
        self.counts.append(count)
        self.ends.append(end)
        self.draws.append(draws)
        self.num_tokens += count
        self.decodes_only = self.decodes_only and count == draws == 1

    @property
    def decodes(self) -> int:
        """How many chunks come before the first one of several tokens."""
        return next((index for index, count in enumerate(self.counts) if count > 1), len(self.counts))

    @property
    def has_prompts(self) -> bool:
        """Whether some chunk has several tokens. Most of these have no logits, so a NaN would not show in the draws."""
        return self.num_tokens > len(self.rows)
