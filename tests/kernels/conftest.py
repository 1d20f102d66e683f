"""Kernels run for real where there is a GPU, and in Triton's interpreter elsewhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.faster_interpreter import make_interpreter_faster

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    make_interpreter_faster()


@pytest.fixture
def device() -> torch.device:
    # With the index that tensors name, as tables of measured products are kept by device.
    return torch.empty(0, device=DEVICE).device


@pytest.fixture(autouse=True)
def fresh_inputs() -> int:
    """Seed torch from the clock and print the seed, so that every run checks other inputs and a failure can be
    repeated."""
    seed = torch.seed() % (1 << 32)
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})")
    return seed


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Let memory that nobody has written hold NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(0).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def same_sum_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter sum a cell of tl.dot in the same order wherever in the tile it is, as tensor cores do.

    The interpreter's numpy calls a BLAS, which sums in another order at a tile's edge on some processors.
    """

    def create_dot(_: Any, a: Any, b: Any, acc: Any, *__: Any) -> TensorHandle:
        total = acc.data.copy()
        for column, row in zip(a.data.T.astype(total.dtype), b.data.astype(total.dtype), strict=True):
            total += column[:, None] * row
        return TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
