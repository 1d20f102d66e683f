"""Matrix products with the weight of a linear layer, gated or not."""

import torch

from .activation import gate_mul_reference


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [T, inner]. weight: [outputs, inner]. bias: [outputs] or None. Returns x weightᵀ + bias, [T, outputs], in out
    when given.

    gate: one of GATES; the first half of the outputs are gates, the second ups. Returns activation(gate) * up,
    [T, outputs / 2].
    """
    result = torch.nn.functional.linear(x, weight, bias)
    if gate is not None:
        result = gate_mul_reference(result, gate)
    return result if out is None else out.copy_(result)
