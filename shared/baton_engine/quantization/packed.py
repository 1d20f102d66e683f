"""Codes of less than 32 bits in words of 32 bits."""

import torch

from baton_engine.config import ConfigError


def unpack(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the codes of words, uint8, along a dimension of a matrix; a word's lowest bits come first.

    order: for each code of a word the place in the word that it takes; None = the same order.
    """
    places = torch.tensor(order or range(32 // bits), device=words.device, dtype=torch.int32) * bits
    if dim == 0:
        codes = (words[:, None, :] >> places[None, :, None]) & ((1 << bits) - 1)
        return codes.flatten(0, 1).to(torch.uint8)
    codes = (words[:, :, None] >> places) & ((1 << bits) - 1)
    return codes.flatten(1).to(torch.uint8)


def divide(part: slice, by: int, name: str) -> slice:
    """Return a slice of codes as a slice of words, or of groups, of `by` codes each."""
    if part.start % by or part.stop % by:
        raise ConfigError(f"{name} is packed {by} by {by}: codes {part.start} to {part.stop} are not whole words")
    return slice(part.start // by, part.stop // by)


def group_order(name: str, g_idx: torch.Tensor, group: int) -> torch.Tensor | None:
    """Return the inputs of a projection in the order of their groups; None if that is their own order.

    g_idx: [inputs] int32, the group of each. Raises ConfigError if the groups have not `group` inputs each.
    """
    if g_idx.is_meta:
        return None
    groups = torch.arange(len(g_idx), device=g_idx.device) // group
    if torch.equal(g_idx, groups.int()):
        return None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order], groups.int()):
        raise ConfigError(f"{name} has not {group} inputs in each group")
    return order
