"""Copies KV of some tokens, layers and heads between the paged cache and one contiguous buffer, and computes its
checksum on the way.

A cache has one tensor [layers, blocks, block_size, heads, dim] for each plane (keys, values, …); planes may differ in
heads and dim. A buffer holds the layers in order, in each layer its planes in order, and of each plane
[tokens, heads, dim]. A range of heads refers to the plane with the most heads. A plane with fewer contributes those
heads of the range that it has.

The checksum of a buffer's words w (32 bits each, at index i) is the sum of w * (2 * i + 1) modulo 2^32. Every flip of
one bit changes it. The exchange of two words changes it unless their difference, times the distance of their indices,
is a multiple of 2^31. Programs can add their parts in any order.
"""

from collections.abc import Iterator, Sequence

import torch

_MASK = 0xFFFFFFFF


def gather_kv_reference(
    planes: Sequence[torch.Tensor],
    table: torch.Tensor,
    tokens: slice,
    layers: slice,
    heads: slice,
    out: torch.Tensor,
    check: bool = True,
) -> torch.Tensor:
    """Copy KV from the cache into out, contiguous uint8 of exactly the bytes of that KV.

    table: [n] int64, the blocks of consecutive tokens. tokens: the range to copy, counted from the table's first token.
    Returns the checksum of out, [1] int64, or 0 without `check`.
    """
    slots = _slots(planes[0], table, tokens)
    for plane, layer, part in _parts(planes, tokens, layers, heads, out):
        kept = slice(min(heads.start, plane.shape[3]), min(heads.stop, plane.shape[3]))
        part.copy_(plane[layer].flatten(0, 1)[:, kept].index_select(0, slots))
    return checksum_reference(out) if check else _no_checksum(out)


def scatter_kv_reference(
    planes: Sequence[torch.Tensor],
    table: torch.Tensor,
    tokens: slice,
    layers: slice,
    heads: slice,
    values: torch.Tensor,
    check: bool = True,
) -> torch.Tensor:
    """Write values, ordered as gather_kv writes them, into the cache. Returns their checksum, [1] int64, or 0 without
    `check`."""
    slots = _slots(planes[0], table, tokens)
    for plane, layer, part in _parts(planes, tokens, layers, heads, values):
        kept = slice(min(heads.start, plane.shape[3]), min(heads.stop, plane.shape[3]))
        plane[layer].flatten(0, 1)[:, kept].index_copy_(0, slots, part)
    return checksum_reference(values) if check else _no_checksum(values)


def checksum_reference(values: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a contiguous tensor whose bytes are a multiple of four, [1] int64."""
    words = values.reshape(-1).view(torch.int32).long()
    odd = 2 * torch.arange(len(words), device=words.device) + 1
    # int64 products and sums wrap around, and their low 32 bits are still right.
    return ((words * odd).sum() & _MASK).view(1)


def _parts(
    planes: Sequence[torch.Tensor], tokens: slice, layers: slice, heads: slice, packed: torch.Tensor
) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Yield (plane, layer, their part of the buffer) for each layer and each plane that has some of the heads."""
    count, at = tokens.stop - tokens.start, 0
    for layer in range(layers.start, layers.stop):
        for plane in planes:
            dim, number = plane.shape[4], min(heads.stop, plane.shape[3]) - min(heads.start, plane.shape[3])
            size = count * number * dim * plane.element_size()
            if size:
                yield plane, layer, packed[at : at + size].view(plane.dtype).view(count, number, dim)
            at += size


def _no_checksum(packed: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=packed.device)


def _slots(plane: torch.Tensor, table: torch.Tensor, tokens: slice) -> torch.Tensor:
    size = plane.shape[2]
    positions = torch.arange(tokens.start, tokens.stop, device=plane.device)
    return table[positions // size] * size + positions % size
