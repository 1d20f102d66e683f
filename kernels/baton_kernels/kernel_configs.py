"""The products that are tuned, and the configurations of their kernels."""

from typing import NamedTuple


class Product(NamedTuple):
    """x [rows, inner] times a weight [outputs, inner]; gated: half of the outputs are gates."""

    outputs: int
    inner: int
    gated: bool


class ExpertLayer(NamedTuple):
    """A layer of experts. used: experts per token. hidden: elements of a hidden state. size: hidden units of an
    expert."""

    used: int
    experts: int
    hidden: int
    size: int


class LinearConfig(NamedTuple):
    """A configuration of the kernels in linear.py, scaled_linear.py, grouped_linear.py and hopper_products.py.
    block_rows 1 selects the one-row kernel. splits: parts of the inner dimension. hopper: use the kernel in
    hopper_products.py, whose tiles of outputs contain both gates and ups, or for few rows that in hopper_few_rows.py
    or hopper_few_numbers.py, where num_stages is the number of programs that share the registers of a multiprocessor.
    """

    block_rows: int
    block_outputs: int
    block_inner: int
    splits: int
    num_warps: int
    num_stages: int
    hopper: bool = False


class ProductConfig(NamedTuple):
    """Tile sizes of a product of experts."""

    block_outputs: int
    block_inner: int
    num_warps: int
    num_stages: int


class ExpertsConfig(NamedTuple):
    """A configuration of the kernels in experts.py, quantized_experts.py and hopper_products.py. block_rows 1 selects
    the kernels for small batches. hopper: as in LinearConfig."""

    block_rows: int
    gate_up: ProductConfig
    down: ProductConfig
    hopper: bool = False
