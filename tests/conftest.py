"""Fixtures of all tests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .models import make_model

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter. Triton reads this when a module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return `tiny_model(family, **overrides) -> folder`: as make_model, written once a session for equal arguments."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make
