"""KV of some tokens, layers and heads out of the paged cache into one contiguous buffer, and back, with a checksum on
the way.

The checksum of a buffer's words w (32 bits each, at index i) is the sum of w * (2 * i + 1) modulo 2^32: every bit flip,
and every exchange of two different words, changes it, and programs can add their parts in any order.
"""

import torch

_MASK = 0xFFFFFFFF


def gather_kv_reference(
    cache: torch.Tensor, table: torch.Tensor, first_token: int, layers: slice, heads: slice, out: torch.Tensor,
    check: bool = True,
) -> torch.Tensor:  # fmt: skip
    """cache: [layers, 2, blocks, block_size, kv_heads, head_dim]. table: [n] int64, the blocks of consecutive tokens;
    first_token: the first that is wanted, counted from the table's first. out: [layers, 2, tokens, kv_heads, head_dim],
    those of the two slices, written. Returns the checksum of out, [1] int64, or 0 without `check`."""
    slots = _slots(cache, table, first_token, out.shape[2])
    out.copy_(cache[layers].flatten(2, 3)[:, :, :, heads].index_select(2, slots))
    return checksum_reference(out) if check else _no_checksum(cache)


def scatter_kv_reference(
    cache: torch.Tensor, table: torch.Tensor, first_token: int, layers: slice, heads: slice, values: torch.Tensor,
    check: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Write values, shaped as gather_kv gives them, into the cache. Returns their checksum, [1] int64, or 0 without
    `check`."""
    slots = _slots(cache, table, first_token, values.shape[2])
    cache[layers].flatten(2, 3)[:, :, :, heads].index_copy_(2, slots, values)
    return checksum_reference(values) if check else _no_checksum(cache)


def checksum_reference(values: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a contiguous tensor whose bytes are a multiple of four, [1] int64."""
    words = values.reshape(-1).view(torch.int32).long()
    odd = 2 * torch.arange(len(words), device=words.device) + 1
    # int64 products and sums wrap around, and their low 32 bits are still right.
    return ((words * odd).sum() & _MASK).view(1)


def _no_checksum(cache: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=cache.device)


def _slots(cache: torch.Tensor, table: torch.Tensor, first_token: int, count: int) -> torch.Tensor:
    size = cache.shape[3]
    positions = torch.arange(first_token, first_token + count, device=cache.device)
    return table[positions // size] * size + positions % size
