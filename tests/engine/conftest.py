"""Fixtures of the engine's tests."""

from pathlib import Path

import pytest

from tests.conftest import MakeModel


@pytest.fixture(scope="session")
def llama(tiny_model: MakeModel) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def windowed(tiny_model: MakeModel) -> Path:
    """A model with full and sliding-window layers in turn, and norms on queries and keys."""
    return tiny_model(
        "qwen3",
        head_dim=32,
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=13,
        layer_types=["full_attention", "sliding_attention"],
    )


@pytest.fixture(scope="session")
def latent(tiny_model: MakeModel) -> Path:
    """A model with latent attention and experts in groups."""
    return tiny_model("deepseek_v3", rope="yarn of DeepSeek", n_group=2, topk_group=1)
