"""Projections to queries, keys and values that a checkpoint holds as one matrix."""

import torch


def order_by_kv_head(heads: int, kv_heads: int, head_dim: int) -> list[int]:
    """Return for each output of a Linear the index of that output in such a matrix. heads: of queries; 0 = it has none.

    The checkpoint stores the KV heads one after another: the queries of the head's group, its key and its value. The
    Linear returns all queries, then all keys, then all values.
    """
    group = heads // kv_heads
    outputs = torch.arange((heads + 2 * kv_heads) * head_dim).view(kv_heads, group + 2, head_dim)
    parts = outputs[:, :group], outputs[:, group], outputs[:, group + 1]
    order: list[int] = torch.cat([part.flatten() for part in parts]).tolist()
    return order
