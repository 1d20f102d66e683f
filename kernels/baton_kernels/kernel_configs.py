"""The products that are tuned, and the configurations of their kernels."""

from typing import NamedTuple


class Product(NamedTuple):
    """x [rows, inner] times a weight [outputs, inner]; gated: half of the outputs are gates."""

    outputs: int
    inner: int
    gated: bool


class ExpertLayer(NamedTuple):
    """A layer of experts. used: how many a token uses. hidden: elements of a token. size: hidden units of an expert."""

    used: int
    experts: int
    hidden: int
    size: int


class LinearConfig(NamedTuple):
    """A configuration of the kernels in linear.py, scaled_linear.py, grouped_linear.py and hopper_codes.py. block_rows
    1 selects the one-row kernel, which hopper_codes.py has not. splits: parts of the inner dimension."""

    block_rows: int
    block_outputs: int
    block_inner: int
    splits: int
    num_warps: int
    num_stages: int


class ProductConfig(NamedTuple):
    """Tile sizes of a product in experts.py. whole: the GPU's copy engine fetches the tiles of weights, whose rows must
    be multiples of 16 bytes; without effect in small batches."""

    block_outputs: int
    block_inner: int
    num_warps: int
    num_stages: int
    whole: bool = False


class ExpertsConfig(NamedTuple):
    """A configuration of the kernels in experts.py. block_rows 1 selects the kernels for small batches."""

    block_rows: int
    gate_up: ProductConfig
    down: ProductConfig
