"""GPTQ and the packing of codes, against float64 and against compressed-tensors."""

import pytest
import torch

from baton_quantize.codes import (
    eight_bit,
    four_bit_codes,
    four_bit_numbers,
    four_bit_scales,
    pack_four_bit,
    round_up,
)
from baton_quantize.gptq import gptq_codes

GROUP = 32


def problem(outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight, and the Hessian of inputs that depend on each other and differ in size."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=random) / inputs**0.5 + torch.eye(inputs)
    x = torch.randn(4 * inputs, inputs, generator=random) @ mixing
    x *= torch.exp(torch.randn(inputs, generator=random))
    return torch.randn(outputs, inputs, generator=random), x.t() @ x / len(x)


def reference_codes(weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The method of Optimal Brain Surgeon in float64: after each column, the inverse Hessian of the remaining columns
    is found by eliminating that column, without a Cholesky factor or blocks."""
    remaining, hessian = weight.double(), hessian.double()
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian)))
    codes = torch.empty_like(weight, dtype=torch.int8)
    for column in hessian.diagonal().argsort(descending=True, stable=True).tolist():
        scale = scales[:, column // GROUP].double()
        code = (remaining[:, column] / scale).round().clamp(-8, 7)
        codes[:, column] = code.to(torch.int8)
        error = (remaining[:, column] - code * scale) / inverse[column, column]
        remaining = remaining - torch.outer(error, inverse[column])
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        # What is left of an eliminated column is rounding.
        inverse[column] = inverse[:, column] = 0
        inverse[column, column] = 1
    return codes


def output_error(weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> float:
    wrong = four_bit_numbers(codes, scales).double() - weight.double()
    return float(((wrong @ hessian.double()) * wrong).sum())


@pytest.mark.parametrize("inputs", [64, 288])  # the latter in blocks of columns, the last of them short
def test_gptq_is_optimal_brain_surgeon_in_float64(inputs: int) -> None:
    weight, hessian = problem(24, inputs)
    scales = four_bit_scales(weight, GROUP, torch.float32)
    codes, expected = gptq_codes(weight, hessian, scales), reference_codes(weight, hessian, scales)
    # A number close to the middle of two codes may get the other one in float32.
    assert (codes == expected).float().mean() > 0.995
    assert output_error(weight, hessian, codes, scales) == pytest.approx(
        output_error(weight, hessian, expected, scales), rel=0.01
    )
    nearest = output_error(weight, hessian, four_bit_codes(weight, scales), scales)
    assert output_error(weight, hessian, codes, scales) < 0.7 * nearest


def test_inputs_that_never_occur_get_the_nearest_codes() -> None:
    weight, _ = problem(8, 64)
    scales = four_bit_scales(weight, GROUP, torch.float32)
    assert torch.equal(gptq_codes(weight, torch.zeros(64, 64), scales), four_bit_codes(weight, scales))


def test_dependent_inputs_are_no_obstacle() -> None:
    weight, _ = problem(8, 64)
    scales = four_bit_scales(weight, GROUP, torch.float32)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    codes = gptq_codes(weight, torch.outer(x, x), scales)
    assert output_error(weight, torch.outer(x, x), codes, scales) < 0.01 * output_error(
        weight, torch.outer(x, x), four_bit_codes(weight, scales), scales
    )


def test_packing_is_that_of_compressed_tensors() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(-8, 8, (5, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    packed = pack_four_bit(codes, torch.ones(5, 2))
    assert torch.equal(packed["weight_packed"], pack_to_int32(codes, 4))
    assert packed["weight_shape"].tolist() == [5, 64]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_ranges_weighted_by_importance_are_never_worse(stored: torch.dtype) -> None:
    weight, hessian = problem(16, 64)
    weight[0] = 0
    diagonal = hessian.diagonal()
    errors = []
    for importance in (None, diagonal):
        scales = four_bit_scales(weight, GROUP, stored, importance)
        assert scales.dtype == stored
        wrong = four_bit_numbers(four_bit_codes(weight, scales), scales) - weight
        errors.append((wrong.square() * diagonal).unflatten(1, (-1, GROUP)).sum(dim=2))
    assert (errors[1] <= errors[0]).all()
    assert errors[1].sum() < errors[0].sum()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_of_eight_bits_are_within_half_a_step(kind: torch.dtype, stored: torch.dtype) -> None:
    weight, _ = problem(16, 64)
    weight[3] = 0
    weight[4] *= 1e-6
    coded = eight_bit(weight, kind, stored)
    assert coded["weight"].dtype == kind
    assert coded["weight_scale"].dtype == stored
    scales = coded["weight_scale"].double()
    wrong = (coded["weight"].double() * scales - weight.double()).abs()
    # FP8 has three bits of mantissa, and numbers below 2**-6 have steps of 2**-9.
    step = torch.maximum(weight.double().abs() * 2**-4, scales * 2**-10) if kind != torch.int8 else scales / 2
    assert (wrong <= step * 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_rounded_up(dtype: torch.dtype) -> None:
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 10
    rounded = round_up(numbers, dtype).float()
    assert (rounded >= numbers).all()
    assert (rounded <= numbers * 1.008 + 1e-7).all()
