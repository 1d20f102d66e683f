"""Latent attention over groups of tokens that an indexer selects."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton_engine.attention import triton_indexed
from baton_engine.config import ConfigError
from baton_engine.models.deepseek_v32 import has_indexer
from baton_engine.models.glm5_next_config import Glm5NextConfig
from baton_engine.models.registry import load_model_config
from baton_engine.source import Source
from baton_engine.stage import WHOLE, Stage
from tests.conftest import MakeModel
from tests.models import reference_choices, reference_greedy

from .fake_cuda import pretend
from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_give_the_tokens_of_the_reference(
    tiny_model: MakeModel, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs the kernels themselves, for chunks in several calls and in groups, and for decodes."""
    names = (
        "plan_parts", "latent_decode", "absorb_queries", "values_of", "index_scores", "select_numbers", "pool_slots",
    )  # fmt: skip
    kernels = {name: getattr(triton_indexed, name) for name in names}
    pretend(monkeypatch)
    used: set[Any] = set()

    def scores(*arguments: Any) -> torch.Tensor:
        used.add(arguments[6])
        return kernels["index_scores"](*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(triton_indexed, "_MOST_QUERIES", 20)
    # The interpreter is slow with programs that have no work, and with wide tiles.
    monkeypatch.setattr("baton_engine.attention.triton_latent._PROGRAMS", 4)
    for place in ("index_scores._BLOCK", "index_scores._LISTED_BLOCK", "index_pools._SLOTS"):
        monkeypatch.setattr(f"baton_kernels.{place}", 16)
    folder = tiny_model(
        "glm5_next", num_hidden_layers=2, layer_types=["indexed_attention"] * 2, indexer_types=["full", "shared"],
        mlp_layer_types=["dense"] * 2, index_topk=8, index_n_heads=4, seed=1,
    )  # fmt: skip
    engine = make_engine(
        folder, block_size=8, max_num_batched_tokens=32, max_num_seqs=2, max_model_len=40, num_blocks=64,
        enforce_eager=True, chunk_ms=0.0, deterministic=deterministic,
    )  # fmt: skip
    # The interpreter would take minutes for the steps that an engine measures at start.
    for name, kernel in kernels.items():
        monkeypatch.setattr(triton_indexed, name, scores if name == "index_scores" else kernel)
    prompts = [make_prompt(length, seed=3) for length in (5, 25)]
    transcript = generate(engine, [make_request(id, prompt, 2) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(folder, prompt, 2)
    assert used == ({1} if deterministic else {1, 8})


@pytest.mark.parametrize(("block_size", "budget"), [(10, 7), (64, 200)])
def test_tokens_do_not_depend_on_block_size_or_budget(selecting_groups: Path, block_size: int, budget: int) -> None:
    """Two prompts begin alike, and the second one finds the blocks of the first."""
    common = make_prompt(65, seed=4)
    prompts = [common + make_prompt(13, seed=1), common + make_prompt(5, seed=2)]
    engine = make_engine(selecting_groups, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=3)
    size = engine.runner.cache.planes[0].shape[2]
    assert size % 4 == 0
    assert size % block_size == 0
    expected = [reference_greedy(selecting_groups, prompt, 8) for prompt in prompts]
    assert generate(engine, [make_request(0, prompts[0], 8)]).tokens[0, 0] == expected[0]
    transcript = generate(engine, [make_request(id, prompt, 8) for id, prompt in enumerate(prompts)])
    assert [transcript.tokens[id, 0] for id in range(2)] == expected
    assert transcript.first(1).cached_tokens == 65 // size * size
    assert_idle(engine)


def test_preempted_sequences_and_choices(selecting_groups: Path) -> None:
    engine = make_engine(
        selecting_groups, block_size=16, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=120
    )
    prompts = [make_prompt(length, seed=5) for length in (60, 61, 47, 70, 64)]
    requests = [make_request(id, prompt, 20, n=2 if id == 1 else 1) for id, prompt in enumerate(prompts)]
    transcript = generate(engine, requests)
    assert engine.scheduler.num_preemptions
    for (id, _), tokens in transcript.tokens.items():
        assert tokens == reference_choices(selecting_groups, prompts[id], tokens)
    assert_idle(engine)


def test_index_keys_and_gates_are_handed_over(selecting_groups: Path) -> None:
    """Also those of a group that ends after the hand-over."""
    prefill = make_engine(selecting_groups, max_num_batched_tokens=24, block_size=24)
    pair = Pair(prefill, make_engine(selecting_groups, block_size=10), seed=10)
    # The model's kv_lora_rank, and twice its index_head_dim, in float32, of three layers.
    assert pair.decode.runner.cache.layout.token_bytes == 3 * (24 + 2 * 12) * 4
    prompts = [make_prompt(length, seed=3) for length in (1, 31, 90)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 16, n=2 if id == 2 else 1))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        expected = reference_greedy(selecting_groups, prompt, 16)
        assert all(tokens == expected for (at, _), tokens in transcript.tokens.items() if at == id)
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def test_which_groups_are_selected_changes_tokens(selecting_groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise equality with transformers would say nothing about the indexer."""
    prompt = make_prompt(70, seed=4)
    expected = reference_greedy(selecting_groups, prompt, 12)
    monkeypatch.setattr(
        "baton_engine.attention.torch_indexed.index_scores_reference",
        lambda q, weights, keys: torch.arange(keys.shape[1]).expand(*q.shape[:2], -1).float(),
    )
    assert generate(make_engine(selecting_groups), [make_request(0, prompt, 12)]).tokens[0, 0] != expected


def test_no_stage_needs_the_selection_of_an_earlier_one(tiny_model: MakeModel) -> None:
    kinds = ["indexed_attention", "linear_attention", "linear_attention", "indexed_attention"]
    folder = tiny_model(
        "glm5_next", num_hidden_layers=4, layer_types=kinds, mlp_layer_types=["dense"] * 4,
        indexer_types=["full", "full", "full", "shared"],
    )  # fmt: skip
    config = load_model_config(folder)
    assert isinstance(config, Glm5NextConfig)
    assert not has_indexer(config, cast(Source, SimpleNamespace(stage=WHOLE)), 3)
    second = cast(Source, SimpleNamespace(stage=Stage(1, 2)))
    with pytest.raises(ConfigError, match="before layer 3, which attends to the tokens that an earlier layer selects"):
        has_indexer(config, second, 3)
    prompt = make_prompt(40, seed=3)
    tokens = generate(make_engine(folder), [make_request(0, prompt, 8)]).tokens[0, 0]
    assert len(tokens) == 8
