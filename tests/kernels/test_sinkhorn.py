"""Matrices whose rows and columns have a sum of 1."""

import pytest
import torch

from baton_kernels.reference.sinkhorn import sinkhorn_reference
from baton_kernels.sinkhorn import sinkhorn


@pytest.mark.parametrize(("count", "n", "rounds", "eps"), [(40, 4, 20, 1e-6), (3, 3, 5, 1e-2), (1, 1, 1, 1e-6)])
def test_matrices_are_those_of_the_reference(count: int, n: int, rounds: int, eps: float, device: torch.device) -> None:
    logits = 4 * torch.randn(count, n * n + 5, device=device)[:, 5:].unflatten(1, (n, n))
    result = sinkhorn(logits, rounds, eps)
    expected = sinkhorn_reference(logits.double(), rounds, eps)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sinkhorn_reference(logits, rounds, eps), result, rtol=1e-4, atol=1e-6)
    if rounds == 20:
        torch.testing.assert_close(result.sum(dim=1), torch.ones(count, n, device=device), rtol=1e-4, atol=1e-4)


def test_logits_that_are_not_finite_stay_in_their_token(device: torch.device) -> None:
    logits = torch.randn(5, 4, 4, device=device)
    spoilt = logits.clone()
    spoilt[2] = float("nan")
    others = [0, 1, 3, 4]
    assert torch.equal(sinkhorn(spoilt, 20, 1e-6)[others], sinkhorn(logits, 20, 1e-6)[others])
