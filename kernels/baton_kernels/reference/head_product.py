"""Products of each head's vectors with a matrix of that head."""

import torch


def head_product_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, inner]. weight: [heads, inner, outputs]. Returns [T, heads, outputs]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()
