"""Short convolutions over the tokens of each sequence (LFM2; Liquid AI, 2025), with their inputs in the paged cache.

Each channel has a filter of a few elements. A token's result depends on its own input and on those of the tokens before
it, which are in the cache like the keys and values of attention. A cache row has two planes of heads: the first half
of a head's channels are in the plane of keys, and the second half in that of values.
"""

import torch


def short_conv_reference(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Return gate * conv(input gate * input), [T, channels], and write the convolution's inputs to the cache.

    projected: [T, 3 * channels], the input gates, the gates and the inputs. weight: [channels, filter], the last
    element for the token itself. bias: [channels]. slots: [filter, T] int64, those of the token, of the token before it
    and so on; -1 = there is no such token, or for the token itself, nothing is written. keys, values: [blocks,
    block_size, heads, channels / (2 * heads)], written in place.
    """
    input_gate, gate, inputs = projected.chunk(3, dim=1)
    new = input_gate * inputs
    size, heads, half = keys.shape[1:]
    rows = new.view(len(new), heads, 2, half)
    kept = slots[0] >= 0
    block, offset = slots[0, kept] // size, slots[0, kept] % size
    keys[block, offset], values[block, offset] = rows[kept, :, 0], rows[kept, :, 1]
    wide = new.float() * weight[:, -1].float()
    for lag, before in enumerate(slots[1:], 1):
        known = (before >= 0)[:, None]
        block, offset = before.clamp(min=0) // size, before.clamp(min=0) % size
        earlier = torch.stack([keys[block, offset], values[block, offset]], dim=2).flatten(1)
        wide += torch.where(known, earlier.float() * weight[:, -1 - lag].float(), 0)
    if bias is not None:
        wide += bias.float()
    return gate * wide.to(new.dtype)
