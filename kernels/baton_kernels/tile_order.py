"""The order in which programs compute the tiles of a product."""

import triton
import triton.language as tl

_NEIGHBOURS = tl.constexpr(16)


@triton.jit
def tile_of(program, row_tiles, output_tiles):
    """Return the tile of rows and the tile of outputs that a program computes.

    Programs that run at the same time have few tiles of rows and few tiles of outputs, so that the L2 cache holds the
    rows and the weights that they share.
    """
    first = program // (output_tiles * _NEIGHBOURS) * _NEIGHBOURS
    place = program - first * output_tiles
    together = tl.minimum(row_tiles - first, _NEIGHBOURS)
    return first + place % together, place // together
