"""Kernels run for real where there is a GPU, and in Triton's interpreter elsewhere."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def fresh_inputs() -> int:
    """Seed torch from the clock and print the seed, so that every run checks other inputs and a failure can be had
    again."""
    seed = torch.seed() % (1 << 32)
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})")
    return seed
