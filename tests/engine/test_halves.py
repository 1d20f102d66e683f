"""Large steps of several ranks are computed in two halves. Here one rank pretends that each sum takes a while."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton_engine import halves, runner
from baton_engine.attention.backend import AttentionBatch
from baton_engine.engine import Engine
from baton_engine.shard import OneRank
from baton_engine.turns import give_way, in_turn
from tests.conftest import MakeModel
from tests.models import is_greedy

from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .pools import MakeEngine
from .test_equality import SHAPES
from .test_ranks import FAMILIES

ALL_RANKS = bool(os.environ.get("ALL_RANKS"))  # each family, instead of one of each forward pass
REPRESENTATIVE = (
    "llama-plain", "bloom-tied", "gemma3-tied", "gpt-oss", "qwen3-moe", "deepseek-v2-lite", "gemma4-small", "gemma3n",
    "diffllama", "deepseek-v32", "glm-5-shared-selections", "jetmoe", "mllama", "olmo2", "mimo-v2-flash",
    "hy4-low-limit", "dots3-note", "deepseek-v4", "glm5-next",
)  # fmt: skip


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Return a function like make_engine, whose engine computes steps of 16 tokens in halves."""
    backends: list[Callable[[], Any]] = []
    backend_class = runner.backend_class

    def recorded(*facts: Any) -> Callable[..., Any]:
        def make(*arguments: Any) -> Any:
            backends.append(partial(backend_class(*facts), *arguments))
            return backends[-1]()

        return make

    def sum_slowly(self: OneRank, y: torch.Tensor) -> torch.Tensor:
        give_way()
        return y

    monkeypatch.setattr(runner, "backend_class", recorded)
    monkeypatch.setattr(halves, "_LEAST_TOKENS", 16)
    monkeypatch.setattr(halves, "_TILE", 4)
    monkeypatch.setattr(OneRank, "sum", sum_slowly)
    monkeypatch.setattr(OneRank, "in_turn", lambda self, passes: in_turn(passes))

    def make(folder: Path, **settings: Any) -> Engine:
        engine = make_engine(folder, **settings)
        own: Any = engine.runner
        own._halves = halves.Halves(own._model, own.cache, (own._backend, backends[-1]()), own._ranks)
        return engine

    return make


@pytest.mark.parametrize("name", FAMILIES if ALL_RANKS else REPRESENTATIVE)
def test_every_family_gives_the_tokens_of_transformers(
    tiny_model: MakeModel, halved: Callable[..., Engine], name: str
) -> None:
    family, overrides = SHAPES[name]
    folder = tiny_model(family, **overrides)
    engine = halved(folder, max_num_batched_tokens=40)
    prompts = [make_prompt(length, seed=3) for length in (17, 50, 3)]
    transcript = generate(engine, [make_request(id, prompt, 6) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        assert len(transcript.tokens[id, 0]) == 6
        assert is_greedy(folder, prompt, transcript.tokens[id, 0])
    assert_idle(engine)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_a_large_step_in_halves(tiny_model: MakeModel, divided: MakeEngine, ranks: int) -> None:
    folder = tiny_model("llama", max_position_embeddings=4096)
    prompts = [make_prompt(length, seed=3) for length in (1, 2700, 900)]
    engine = divided(folder, ranks, max_num_batched_tokens=4096, max_model_len=4096, block_size=64)
    transcript = generate(engine, [make_request(id, prompt, 4) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        assert is_greedy(folder, prompt, transcript.tokens[id, 0])
    assert_idle(engine)


def test_passes_give_way_to_each_other() -> None:
    said: list[str] = []

    def run(name: str, times: int) -> str:
        for each in range(times):
            said.append(f"{name}{each}")
            give_way()
        return name

    assert in_turn([lambda: run("a", 3), lambda: run("b", 1)]) == ["a", "b"]
    assert said == ["a0", "b0", "a1", "a2"]
    give_way()  # nobody waits


def test_an_error_of_a_pass_is_raised() -> None:
    def fail() -> None:
        give_way()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        in_turn([fail, give_way])


def test_a_batch_is_split_within_and_between_sequences() -> None:
    tables = np.arange(4)[:, None, None]
    batch = AttentionBatch([0, 1, 2, 12, 20], [7, 9, 30, 8], tables)
    first, second = batch.split(8)
    assert (first.starts, first.lengths, first.tables.ravel().tolist()) == ([0, 1, 2, 8], [7, 9, 26], [0, 1, 2])
    assert (second.starts, second.lengths, second.tables.ravel().tolist()) == ([0, 4, 12], [30, 8], [2, 3])
    first, second = batch.split(12)
    assert (first.starts, first.lengths, first.tables.ravel().tolist()) == ([0, 1, 2, 12], [7, 9, 30], [0, 1, 2])
    assert (second.starts, second.lengths, second.tables.ravel().tolist()) == ([0, 8], [8], [3])
