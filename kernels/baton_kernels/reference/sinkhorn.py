"""Matrices whose rows and columns have a sum of 1 (Sinkhorn and Knopp, "Concerning nonnegative matrices and doubly
stochastic matrices", 1967), as hyper-connections mix their streams with (Xie et al., "mHC", 2025)."""

import torch


def sinkhorn_reference(logits: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Return matrices [T, n, n] float32, whose columns have a sum of 1 and whose rows have nearly so.

    logits: [T, n, n] float32. The softmaxes of their rows, plus eps, are divided by the sums of columns. This is
    followed `rounds` - 1 times by divisions by the sums of rows and then of columns. eps is added to all sums.
    """
    matrices = logits.softmax(dim=2) + eps
    matrices = matrices / (matrices.sum(dim=1, keepdim=True) + eps)
    for _ in range(rounds - 1):
        matrices = matrices / (matrices.sum(dim=2, keepdim=True) + eps)
        matrices = matrices / (matrices.sum(dim=1, keepdim=True) + eps)
    return matrices
