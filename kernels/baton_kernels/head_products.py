"""Products of each head's vectors with a matrix of that head. They absorb the weights of latent attention into its
queries and turn its results into values. reference/latent.py and reference/head_product.py define them.
"""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs


@triton.jit(do_not_specialize=["tokens"])
def _head_product_kernel(
    x, weight, out, tokens, head_stride, inner_stride, output_stride,
    HEADS: tl.constexpr, INNER: tl.constexpr, X_WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, OUT_WIDTH: tl.constexpr,
    COPIED: tl.constexpr, BLOCK_COPIED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """COPIED: how many elements after the inner ones of each vector are copied after the outputs."""
    let_next_start(OVERLAP)
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    output = tl.program_id(2) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    here, real = (row < tokens)[:, None], (output < OUTPUTS)[None, :]
    w_at = weight + head.to(tl.int64) * head_stride
    w_at += inner[:, None] * inner_stride + output[None, :] * output_stride
    w = tl.load(w_at, mask=(inner < INNER)[:, None] & real, other=0.0)
    wait_for_inputs(OVERLAP)
    vector = row.to(tl.int64)[:, None] * HEADS + head
    x_at = x + vector * X_WIDTH
    values = tl.load(x_at + inner[None, :], mask=here & (inner < INNER)[None, :], other=0.0)
    acc = tl.dot(values, w, input_precision="ieee")
    for first in tl.static_range(BLOCK_INNER, INNER, BLOCK_INNER):
        known = first + inner < INNER
        w = tl.load(w_at + first * inner_stride, mask=known[:, None] & real, other=0.0)
        values = tl.load(x_at + first + inner[None, :], mask=here & known[None, :], other=0.0)
        acc = tl.dot(values, w, acc, input_precision="ieee")
    to = out + vector * OUT_WIDTH
    tl.store(to + output[None, :], acc.to(out.dtype.element_ty), mask=here & real)
    if COPIED > 0 and tl.program_id(2) == 0:
        rest = tl.arange(0, BLOCK_COPIED)[None, :]
        copied = here & (rest < COPIED)
        tl.store(to + OUTPUTS + rest, tl.load(x_at + INNER + rest, mask=copied, other=0.0), mask=copied)


def _product(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, copied: int, block_outputs: int, fixed: bool
) -> torch.Tensor:
    """x: [T, heads, inner + copied]. weight: [heads, inner, outputs] of any strides. out: [T, heads, outputs +
    copied]."""
    tokens, heads, width = x.shape
    inner, outputs = weight.shape[1:]
    # In large batches a program uses the weights that it reads for many tokens.
    block_tokens = 16 if tokens <= 64 or fixed else 64
    block_inner = max(min(triton.next_power_of_2(inner), 256 // x.element_size()), 16)
    _head_product_kernel[(triton.cdiv(tokens, block_tokens), heads, triton.cdiv(outputs, block_outputs))](
        x, weight, out, tokens, *weight.stride(), HEADS=heads, INNER=inner, X_WIDTH=width, OUTPUTS=outputs,
        OUT_WIDTH=out.shape[2], COPIED=copied, BLOCK_COPIED=triton.next_power_of_2(copied) if copied else 1,
        BLOCK_TOKENS=block_tokens, BLOCK_OUTPUTS=block_outputs, BLOCK_INNER=block_inner,
        num_warps=4, **overlap_options(x.device),
    )  # fmt: skip
    return out


def head_product(x: torch.Tensor, weight: torch.Tensor, fixed: bool = False) -> torch.Tensor:
    """Compute head_product_reference. x and weight are contiguous.

    fixed: the bits of a token's result do not depend on the other tokens.
    """
    return _product(x, weight, x.new_empty(*x.shape[:2], weight.shape[2]), 0, 64, fixed)


def head_product_fixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute head_product_reference such that the bits of a token's result do not depend on the other tokens."""
    return head_product(x, weight, fixed=True)


def absorb_queries(q: torch.Tensor, up: torch.Tensor, rope_dim: int, fixed: bool = False) -> torch.Tensor:
    """Compute absorb_queries_reference. q and up are contiguous.

    fixed: the bits of a token's result do not depend on the other tokens.
    """
    key_dim = q.shape[2] - rope_dim
    out = q.new_empty(*q.shape[:2], up.shape[2] + rope_dim)
    return _product(q, up[:, :key_dim], out, rope_dim, 64, fixed)


def values_of(attended: torch.Tensor, up: torch.Tensor, out: torch.Tensor, fixed: bool = False) -> torch.Tensor:
    """Compute values_of_reference. All tensors are contiguous. fixed: as for absorb_queries."""
    # There are fewer outputs and longer sums than for queries. Narrow tiles keep the number of programs as large.
    return _product(attended, up[:, -out.shape[2] :].transpose(1, 2), out, 0, 16, fixed)
