"""Matrix products with the weight of a linear layer, gated or not."""

import torch


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [T, inner]. weight: [outputs, inner]. bias: [outputs] or None. Returns x weightᵀ + bias, [T, outputs], in out
    when given.

    gated: the first half of the outputs are gates, the second ups. Returns silu(gate) * up, [T, outputs / 2].
    """
    result = torch.nn.functional.linear(x, weight, bias)
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = torch.nn.functional.silu(gate) * up
    return result if out is None else out.copy_(result)
