"""How blocks of the paged cache hold recurrent states: as float32 numbers in the bytes of keys and values.

A layer with states has two planes of numbers, and each of its groups has a part of both. A block has the state after
its last token that is computed, and the inputs of the last tokens of the layer's convolution.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


class Visit(NamedTuple):
    """How a token of a step gets its state and what becomes of it.

    slot: of the token; -1 = it has none. before: the slot of the token before it; -1 = there is none. begins: the state
    is that in the block of `before`, not that of the step's preceding token. keeps: the block of the token gets its
    state, as this is the last token of the block or of its sequence in this step.
    """

    slot: int
    before: int
    begins: bool
    keeps: bool


def visits(slots: torch.Tensor, block_size: int) -> Iterator[Visit]:
    """Yield a visit for each token of a step. slots: [2, T] int64, as recurrence_reference has them."""
    slot_of, before_of = slots.tolist()
    for token, (slot, before) in enumerate(zip(slot_of, before_of, strict=True)):
        begins = not token or before < 0 or slot_of[token - 1] != before
        goes_on = token + 1 < len(slot_of) and before_of[token + 1] == slot
        yield Visit(slot, before, begins, slot >= 0 and not (goes_on and (slot + 1) % block_size))


def recent_places(length: int) -> int:
    """Return how many inputs of a convolution have a place in a block: a power of two. That of a token is its position
    modulo this number. length: of the convolution's filter, in tokens."""
    return 1 << (length - 2).bit_length() if length > 1 else 0


def places_before(last: int, length: int) -> list[int]:
    """Return the places of the inputs that a token reads after the one with the place `last` in its block."""
    recent = recent_places(length)
    return [(last - lag) % recent for lag in reversed(range(length - 1))]


def rows_for(elements: Sequence[int], head_bytes: Sequence[int]) -> int:
    """Return how many rows of a block the numbers take.

    elements: the numbers of a group in the plane of keys and in that of values. head_bytes: of a group's part of a row
    in each plane of the cache, which may have one plane of latents instead.
    """
    sizes = [4 * count for count in elements]
    if len(head_bytes) == 1:
        return sum(-(-size // head_bytes[0]) for size in sizes)
    return max(-(-size // each) for size, each in zip(sizes, head_bytes, strict=True))


def planes_for(
    elements: Sequence[int], cache: Sequence[torch.Tensor], groups: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return a layer's planes of keys and of values, [blocks, block_size, groups, elements of a group] each.

    elements: as in rows_for. cache: the layer's planes, [blocks, block_size, key-value heads, head_dim] each. In one of
    latents, the numbers of the plane of values follow those of the plane of keys.
    """
    planes = [plane.view(*plane.shape[:2], groups, -1) for plane in cache]
    if len(planes) > 1:
        return planes[0], planes[1]
    [plane] = planes
    keys = -(-4 * elements[0] // (plane.shape[3] * plane.element_size()))
    return plane, plane[:, keys:]


def read_numbers(block: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first numbers of each group, [groups, count]. block: of a plane, [block_size, groups, head_dim]
    float32."""
    return block.transpose(0, 1).flatten(1)[:, :count]


def write_numbers(block: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write what read_numbers returns."""
    flat = block.transpose(0, 1).clone().flatten(1)
    flat[:, : numbers.shape[1]] = numbers
    block.copy_(flat.unflatten(1, (block.shape[0], -1)).transpose(0, 1))
