"""Fixtures of all tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .models import make_model

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
