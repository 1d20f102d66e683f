"""Groups of consecutive queries of a chunk, for which a program reads index keys once."""

from .backend import AttentionBatch


def group_queries(batch: AttentionBatch, sequence: int, first: int, end: int, size: int) -> list[list[int]]:
    """Return lengths and rows of tables of the queries first to end - 1 of a chunk. Then return lengths, first queries
    and rows of tables of their groups, where the first of these queries is query 0.

    first, end: tokens of the step. size: queries of a group, at most.
    """
    count = end - first
    before = batch.lengths[sequence] - (batch.starts[sequence + 1] - first)
    firsts = [*range(0, count, size), count]
    lengths = list(range(before + 1, before + count + 1))
    group_rows = [sequence] * (len(firsts) - 1)
    return [lengths, [sequence] * count, [before + last for last in firsts[1:]], firsts, group_rows]
