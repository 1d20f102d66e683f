"""Which of oneDNN's implementations a product of int8 takes on a CPU."""

import os
import subprocess
import sys

import pytest
import torch

from baton_engine.ops import TORCH
from baton_engine.quantization.int8_on_cpu import MOST_INPUTS, Int8OnCpu, has_int8_products
from baton_engine.quantization.scaled_part import Part
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight

_PRODUCT = """
import torch
from baton_engine.ops import TORCH
from baton_engine.quantization.int8_on_cpu import Int8OnCpu
from baton_engine.quantization.scaled_part import Part
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight

weight = ScaledWeight(torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 1), (1, 64))
product = Int8OnCpu(Part(weight), None, RowFormat(torch.int8), torch.float32, TORCH)
print(product(torch.ones(3, 64))[0, 0].item())
"""


exact = pytest.mark.skipif(not has_int8_products(), reason="this CPU has no exact products of int8")


@exact
@pytest.mark.parametrize("code", [127, -128])
def test_the_largest_sums_fit(code: int) -> None:
    codes = torch.full((32, MOST_INPUTS), code, dtype=torch.int8)
    product = Int8OnCpu(
        Part(ScaledWeight(codes, torch.ones(32, 1), (1, MOST_INPUTS))),
        None,
        RowFormat(torch.int8),
        torch.float32,
        TORCH,
    )
    for sign in (1, -1):
        x = torch.full((2, MOST_INPUTS), float(sign))
        torch.testing.assert_close(
            product(x), torch.full((2, 32), float(sign * code * MOST_INPUTS)), rtol=0.01, atol=0.0
        )


@pytest.mark.processes
@exact
def test_it_is_none_of_those_for_reference() -> None:
    """They take several hundred times as long. oneDNN has nothing else for rows with a sign on CPUs without AMX."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    command = [sys.executable, "-c", _PRODUCT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = done.stdout.splitlines()
    products = [line for line in lines if line.startswith("onednn_verbose") and ",exec,cpu,matmul," in line]
    assert len(products) == 1
    assert "ref" not in products[0]
    assert float(lines[-1]) == pytest.approx(64, rel=0.01)
