"""The sequences of one engine step, and the plan that is made from them."""

from collections.abc import Iterator

import msgspec
import numpy as np

from .block_tables import SharedBlocks
from .sequence import Sequence
from .step_plan import NewRow, StepPlan


class Step(msgspec.Struct):
    """sequences: the sequence of each chunk of the plan. masked: the sequences of masked chunks whose draws have not
    been launched. exported_choices: the number of first tokens drawn for exports, whose choices have no rows."""

    sequences: list[Sequence]
    plan: StepPlan
    masked: list[Sequence]
    exported_choices: int = 0

    @classmethod
    def decode(cls, sequences: list[Sequence]) -> "Step":
        """Return a step of one token for each sequence, whose `computed` counts it already."""
        count = len(sequences)
        rows = [sequence.row for sequence in sequences]
        ends = [sequence.computed for sequence in sequences]
        step = cls(sequences, StepPlan(rows, [1] * count, ends, [1] * count, count), [])
        masked = [index for index, sequence in enumerate(sequences) if sequence.matcher is not None]
        if masked:
            step._mask(masked)
        return step

    def put(self, sequence: Sequence, count: int, draws: int) -> None:
        """Add a chunk of `count` tokens, which the sequence's `computed` counts already."""
        index, plan, end = len(self.sequences), self.plan, sequence.computed
        self.sequences.append(sequence)
        plan.put(sequence.row, count, end, draws)
        if sequence.exports:
            plan.exported.append(count)
            self.exported_choices += draws
        if draws and sequence.matcher is not None:
            self._mask([index])
        if sequence.sampling.prompt_logprobs is not None and not sequence.output_len:
            # The logits at one position give the logprob of the token at the next position.
            first = max(end - count, len(sequence.prompt_logprobs)) + 1
            if first < min(end + 1, sequence.prompt_len):
                plan.prompt_logprobs.append((index, first))

    def _mask(self, chunks: list[int]) -> None:
        self.plan.masked += chunks
        self.masked += [self.sequences[index] for index in chunks]

    def __iter__(self) -> Iterator[tuple[Sequence, int, int]]:
        """Yield (sequence, count, end)."""
        return zip(self.sequences, self.plan.counts, self.plan.ends, strict=True)


def new_rows(sequences: list[Sequence]) -> list[NewRow]:
    """Return the rows of sequences that have just got one."""
    tables = _tables(sequences)
    return [
        NewRow(
            row=sequence.row,
            prompt=sequence.prompt,
            output=list(sequence.output),
            blocks=table,
            sampling=sequence.sampling,
            choice=sequence.choice,
        )
        for sequence, table in zip(sequences, tables, strict=True)
    ]


def _tables(sequences: list[Sequence]) -> list[np.ndarray]:
    """Return the sequences' block tables. Blocks that forks share are converted once."""
    common: dict[SharedBlocks, np.ndarray] = {}
    tables = []
    for sequence in sequences:
        shared, known = sequence.shared, 0
        table = np.zeros((len(sequence.tables), max(len(each.blocks) for each in sequence.tables)), dtype=np.int32)
        if shared is not None and shared in common:
            known = shared.count
            table[:, :known] = common[shared][:, :known]
        for line, each in zip(table, sequence.tables, strict=True):
            line[known : len(each.blocks)] = each.blocks[known:]
        if shared is not None:
            common[shared] = table
        tables.append(table)
    return tables
