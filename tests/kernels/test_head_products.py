"""Products of each head's vectors with a matrix of that head, against float64."""

import pytest
import torch

from baton_kernels.head_products import head_product, head_product_fixed
from baton_kernels.reference.head_product import head_product_reference

OPS = {"reference": head_product_reference, "kernel": head_product, "fixed": head_product_fixed}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("tokens", "heads", "inner", "outputs"), [(1, 3, 5, 7), (70, 2, 24, 24), (130, 1, 100, 80), (3, 4, 64, 130)]
)
def test_each_head_has_a_matrix_of_its_own(
    op: str, tokens: int, heads: int, inner: int, outputs: int, device: torch.device
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(tokens, heads, inner, device=device).to(dtype)
    weight = torch.randn(heads, inner, outputs, device=device).to(dtype)
    out = OPS[op](x, weight)
    assert out.is_contiguous()
    expected = torch.einsum("thi,hio->tho", x.double(), weight.double())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("same_sum_anywhere")
def test_a_fixed_product_does_not_depend_on_the_tokens_around(device: torch.device) -> None:
    x, weight = torch.randn(70, 2, 96, device=device), torch.randn(2, 96, 40, device=device)
    together = head_product_fixed(x, weight)
    for tokens in (slice(0, 1), slice(66, 70), slice(3, 20)):
        assert torch.equal(head_product_fixed(x[tokens], weight), together[tokens])
