"""The search of AWQ (Lin et al., 2023): scales of inputs that leave the least error of a projection's outputs."""

from collections.abc import Callable

import torch

from .codes import four_bit_codes, four_bit_numbers, four_bit_scales

_STEPS = 20  # exponents that are tried, between 0 and 1
_MOST_ROWS = 1024  # of a weight on which scales are compared; all rows have the same inputs
_LEAST = 1e-4


def search_scales(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    magnitudes: torch.Tensor,
    group: int,
    stored: torch.dtype,
    share: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> torch.Tensor:
    """Return scales [inputs] by which the columns of a weight are best multiplied before they are rounded.

    weight: [outputs, inputs] float32. hessian: the mean of x xᵀ. magnitudes: the mean of |x|. stored: the dtype of
    the scales of groups. share: makes scales equal that must be equal.

    Scales are magnitudes to a power from 0 to 1, also divided by the columns' mean magnitude to the complementary
    power. The first one tried is 1, so the result is never worse than plain rounding on these inputs.

    The squared error of the outputs, averaged over all tokens, is tr(E H Eᵀ) for an error E of the weight, so the
    inputs themselves are not needed.
    """
    rows = weight[:: -(-len(weight) // _MOST_ROWS)]
    relative = rows.reshape(len(rows), -1, group).abs()
    relative = relative / relative.amax(dim=2, keepdim=True).clamp_(min=_LEAST)
    columns = relative.flatten(1).mean(dim=0).clamp_(min=_LEAST)
    inputs = magnitudes.clamp(min=_LEAST)
    best = torch.ones_like(inputs)
    least = _error(rows, best, hessian, group, stored)
    for step in range(1, _STEPS + 1):
        power = step / _STEPS
        for tried in (inputs**power, inputs**power / columns ** (1 - power)):
            scales = share(tried).clamp(min=_LEAST)
            scales = scales / (scales.max() * scales.min()).sqrt()
            error = _error(rows, scales, hessian, group, stored)
            if error < least:
                best, least = scales, error
    return best


def _error(
    rows: torch.Tensor, scales: torch.Tensor, hessian: torch.Tensor, group: int, stored: torch.dtype
) -> torch.Tensor:
    scaled = rows * scales
    of_groups = four_bit_scales(scaled, group, stored)
    wrong = four_bit_numbers(four_bit_codes(scaled, of_groups), of_groups) / scales - rows
    return ((wrong @ hessian) * wrong).sum()
