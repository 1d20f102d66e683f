"""Measures how close two tensors are."""

import torch


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference, in float64; NaN never passes a limit."""
    difference = ours.double() - reference.double()
    return float(difference.norm() / reference.double().norm())


def poisoned(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of NaN, in which elements that a kernel leaves unwritten show."""
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)
