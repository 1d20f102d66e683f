"""Small-batch matrix products against float64, for shapes that fill no tile."""

import pytest
import torch

from baton_kernels.kernel_configs import LinearConfig
from baton_kernels.linear import fixed_linear, linear
from baton_kernels.reference.activation import GATES
from baton_kernels.reference.linear import linear_reference

from .closeness import relative_error

ONE_ROW = LinearConfig(1, 4, 64, 1, 4, 1)
CONFIGS = {
    "one row": ONE_ROW,
    "one tile": LinearConfig(16, 16, 32, 1, 4, 2),
    "parts": LinearConfig(16, 16, 32, 3, 4, 3),
    "many rows": LinearConfig(32, 64, 64, 2, 4, 2),
}


@pytest.mark.parametrize("gate", [None, *GATES])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 48, 256), (5, 50, 100), (40, 16, 96)])
def test_linear(
    rows: int, outputs: int, inner: int, name: str, biased: bool, gate: str | None, device: torch.device
) -> None:
    total = outputs * (2 if gate else 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(rows, inner, dtype=dtype, device=device)
    weight = torch.randn(total, inner, dtype=dtype, device=device) * inner**-0.5
    bias = torch.randn(total, dtype=dtype, device=device) if biased else None
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double(), gate)
    for _ in range(2):  # the second time shows whether the first has left its counters at zero
        out = linear(x, weight, bias, gate, config=CONFIGS[name])
        assert out.shape == (rows, outputs)
        assert relative_error(out, expected) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.usefixtures("same_sum_anywhere")
def test_sum_does_not_depend_on_the_rows_around(device: torch.device) -> None:
    x = torch.randn(20, 96, device=device)
    weight = torch.randn(32, 96, device=device)
    config = CONFIGS["parts"]
    alone = linear(x[7:8].contiguous(), weight, config=config)
    assert torch.equal(linear(x, weight, config=config)[7:8], alone)


@pytest.mark.usefixtures("same_sum_anywhere")
def test_fixed_linear_does_not_depend_on_the_rows_around(device: torch.device) -> None:
    x = torch.randn(70, 96, device=device)
    weight = torch.randn(40, 96, device=device)
    together = fixed_linear(x, weight)
    assert relative_error(together, x.double() @ weight.double().T) < 1e-5
    for rows in (slice(0, 1), slice(66, 70), slice(3, 20)):
        assert torch.equal(fixed_linear(x[rows].contiguous(), weight), together[rows])
