"""Fixtures of the engine's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import MakeModel
from tests.faster_interpreter import make_interpreter_faster

from .harness import make_engine
from .pools import MakeEngine, Pools

if not torch.cuda.is_available():
    make_interpreter_faster()


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
def two_head_sizes(tiny_model: MakeModel) -> Path:
    """A model whose layers with a window have more and smaller heads than the others."""
    return tiny_model("gemma4", initializer_range=0.05, global_head_dim=24)


@pytest.fixture(scope="session")
def shared_kv(tiny_model: MakeModel) -> Path:
    """A model whose last layers read the keys and values of earlier ones."""
    return tiny_model("gemma4_small", initializer_range=0.1, num_key_value_heads=4)


@pytest.fixture(scope="session")
def latent(tiny_model: MakeModel) -> Path:
    """A model with latent attention and experts in groups."""
    return tiny_model("deepseek_v3", rope="yarn of DeepSeek", n_group=2, topk_group=1)


@pytest.fixture(scope="session")
def indexed(tiny_model: MakeModel) -> Path:
    """A model whose latent attention goes over selected tokens, also over those that an earlier layer has selected."""
    return tiny_model("glm_moe_dsa", num_hidden_layers=4, index_topk_freq=2, index_skip_topk_offset=1)


@pytest.fixture(scope="session")
def selecting_with_sinks(tiny_model: MakeModel) -> Path:
    """As `indexed`, with sinks and several residual streams."""
    return tiny_model("hy_v4", num_hidden_layers=4, indexer_types=["full", "shared"] * 2)


@pytest.fixture(scope="session")
def selecting_groups(tiny_model: MakeModel) -> Path:
    """As `indexed`, for groups of 4 tokens, with recurrent states and several residual streams."""
    return tiny_model("glm5_next")


@pytest.fixture(scope="session")
def latents_by_layer(tiny_model: MakeModel) -> Path:
    """As `indexed`, with every second layer's latent attention of other sizes and over a window."""
    return tiny_model("dots3_note_text")


@pytest.fixture(scope="session")
def shared_latents(tiny_model: MakeModel) -> Path:
    """As `indexed`, with layers that read the latents of earlier ones, half of which do not rotate."""
    return tiny_model(
        "mistral_large4", kv_source_layers=[0, 1, 0, 1], indexer_types=["full", "shared", "full", "shared"]
    )


@pytest.fixture(scope="session")
def key_blocks(tiny_model: MakeModel) -> Path:
    """A model in most of whose layers each key-value head attends to 4 blocks of 8 keys, of which it selects 3 by their
    scores."""
    return tiny_model("minimax_m3_text")


@pytest.fixture(scope="session")
def compressed(tiny_model: MakeModel) -> Path:
    """A model that attends to the last 8 tokens and to entries, of which some layers select 5."""
    return tiny_model("deepseek_v4")


@pytest.fixture(scope="session")
def pools(processes: None) -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
    assert not pools.problems


@pytest.fixture
def divided(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Return `divided(folder, ranks, **settings)`, an engine on so many ranks, or on one."""
    monkeypatch.setattr("baton_engine.engine.make_runner", pools.make_runner)
    return lambda folder, ranks, **settings: make_engine(folder, tensor_parallel=ranks, **settings)
