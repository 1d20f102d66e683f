"""GPTQ (Frantar et al., 2023): codes chosen column by column; later columns make up for the errors of earlier ones."""

import torch

from baton_engine.config import ConfigError

from .codes import four_bit_codes, four_bit_numbers

_BLOCK = 128  # columns between two updates of all later columns
# Fractions of the mean of the Hessian's diagonal that are added to the diagonal. The larger ones are for Hessians that
# float32 cannot invert otherwise.
_DAMPINGS = (0.01, 0.1, 1.0)


def gptq_codes(weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return codes [outputs, inputs] int8 from -8 to 7.

    weight: [outputs, inputs] float32. hessian: [inputs, inputs], the mean of x xᵀ over the inputs x. scales: [outputs,
    groups], fixed beforehand, so the order of columns does not change which inputs share a scale. Columns are taken in
    descending order of the Hessian's diagonal (act-order): the columns with the largest inputs have the most later
    columns to make up for their errors. Raises ConfigError if the Hessian cannot be inverted.
    """
    group = weight.shape[1] // scales.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    upper = _inverse_factor(hessian[order][:, order])
    remaining = weight[:, order]
    groups = (order // group).tolist()
    codes = torch.empty_like(remaining, dtype=torch.int8)
    for first in range(0, len(order), _BLOCK):
        last = min(first + _BLOCK, len(order))
        errors = torch.empty_like(remaining[:, first:last])
        for column in range(first, last):
            numbers = remaining[:, column : column + 1]
            of_column = scales[:, groups[column], None]
            codes[:, column : column + 1] = code = four_bit_codes(numbers, of_column)
            error = (numbers - four_bit_numbers(code, of_column)) / upper[column, column]
            errors[:, column - first] = error[:, 0]
            remaining[:, column + 1 : last] -= error * upper[column, column + 1 : last]
        remaining[:, last:] -= errors @ upper[first:last, last:]
    in_place: torch.Tensor = torch.empty_like(codes).index_copy_(1, order, codes)
    return in_place


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return U, upper triangular with Uᵀ U = H⁻¹, of the damped Hessian."""
    mean = hessian.diagonal().mean()
    if not mean > 0:
        # No input was ever different from zero, so no code is better than the nearest one.
        return torch.eye(len(hessian), device=hessian.device)
    for damping in _DAMPINGS:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper: torch.Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
    raise ConfigError("the inputs of a projection have no invertible covariance; calibrate with more or other text")
