"""Projections to queries, keys and values that a checkpoint holds as one matrix."""

import torch


def order_by_kv_head(heads: int, kv_heads: int, head_dim: int) -> list[int]:
    """Return which output of such a matrix becomes each output of a Linear.

    The checkpoint has for one head of keys and values after the other the queries that belong to it, its key and its
    value. The result is all queries, then all keys, then all values.
    """
    group = heads // kv_heads
    outputs = torch.arange((heads + 2 * kv_heads) * head_dim).view(kv_heads, group + 2, head_dim)
    parts = outputs[:, :group], outputs[:, group], outputs[:, group + 1]
    order: list[int] = torch.cat([part.flatten() for part in parts]).tolist()
    return order
