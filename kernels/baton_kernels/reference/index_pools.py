"""Keys of groups of tokens, by which an indexer selects whole groups (GLM Team, GLM-5.3-Flash, 2026), in plain torch.

Consecutive tokens of a sequence form groups. In each channel the key of a group is a mean of its tokens' index keys,
weighted by a softmax of their gates over the group. The row of each token in the cache has its index key and then its
gates. When a group ends, its key takes the place of the index key of its last token, which nothing reads any more. So
a group can begin in one step and end in a later one, also in a process to which the rows were handed over.
"""

import torch
from torch.nn import functional


def pool_index_keys_reference(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    offsets: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    index_rows: torch.Tensor,
) -> None:
    """Write the rows of a step's tokens, and the keys of the groups that end.

    projected: [T, 2 * dim], the index keys of tokens before their norm, and then their gates. weight, bias, eps: of the
    LayerNorm of index keys, [dim] float32. offsets: [group, dim] float32, added to the gates by the token's place in
    its group. positions: [T] int64. slots: [T] int64, block * block_size + offset; nothing is written for a negative
    slot. index_rows: [blocks, block_size, 1, 2 * dim], written in place; block_size is a multiple of the group. The
    sums are in float32.
    """
    dim, size = len(weight), len(offsets)
    keys, gates = projected.split(dim, dim=1)
    normed = functional.layer_norm(keys.float(), (dim,), weight, bias, eps).to(projected.dtype)
    flat, kept = index_rows.flatten(0, 2), slots >= 0
    flat.index_copy_(0, slots[kept], torch.cat([normed, gates], dim=1)[kept])
    ends = slots[kept & (positions % size == size - 1)]
    members = flat[ends[:, None] + torch.arange(1 - size, 1, device=ends.device)].float()
    weights = (members[..., dim:] + offsets).softmax(dim=1)
    flat[ends, :dim] = (weights * members[..., :dim]).sum(dim=1).to(flat.dtype)
