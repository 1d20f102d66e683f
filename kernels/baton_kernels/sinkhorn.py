"""Matrices whose rows and columns have a sum of 1. reference/sinkhorn.py defines them."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs

_TOKENS = 32  # of one program


@triton.jit(do_not_specialize=["tokens", "rounds", "stride"])
def _sinkhorn_kernel(
    logits, out, tokens, rounds, stride, eps, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None, None]
    row, column = tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_N)[None, None, :]
    real = (row < N) & (column < N)
    inside = (token < tokens) & real
    wait_for_inputs(OVERLAP)
    # Rows and columns of padding stay 0, and sums of 0 are not divided by.
    values = tl.load(logits + token * stride + row * N + column, mask=inside, other=0.0)
    peak = tl.max(tl.where(real, values, float("-inf")), axis=2, keep_dims=True)
    weights = tl.where(real, tl.exp(values - tl.where(row < N, peak, 0.0)), 0.0)
    matrix = tl.where(real, weights / tl.where(row < N, tl.sum(weights, axis=2, keep_dims=True), 1.0) + eps, 0.0)
    matrix /= tl.where(column < N, tl.sum(matrix, axis=1, keep_dims=True) + eps, 1.0)
    for _ in range(1, rounds):
        matrix /= tl.where(row < N, tl.sum(matrix, axis=2, keep_dims=True) + eps, 1.0)
        matrix /= tl.where(column < N, tl.sum(matrix, axis=1, keep_dims=True) + eps, 1.0)
    tl.store(out + token * (N * N) + row * N + column, matrix, mask=inside)


def sinkhorn(logits: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Compute sinkhorn_reference. The numbers of a matrix are contiguous."""
    tokens, n = len(logits), logits.shape[1]
    out = torch.empty(tokens, n, n, dtype=torch.float32, device=logits.device)
    _sinkhorn_kernel[(triton.cdiv(tokens, _TOKENS),)](
        logits, out, tokens, rounds, logits.stride(0), eps, N=n, BLOCK_N=triton.next_power_of_2(n), BLOCK=_TOKENS,
        num_warps=4, **overlap_options(logits.device),
    )  # fmt: skip
    return out
