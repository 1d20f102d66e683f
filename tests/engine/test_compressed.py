"""Attention over entries that sum up windows of tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.attention import triton_compressed
from tests.conftest import MakeModel
from tests.models import reference_greedy

from .fake_cuda import pretend
from .fake_entries import KERNELS
from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .pools import MakeEngine


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_give_the_tokens_of_the_reference(
    tiny_model: MakeModel, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs the kernels themselves, for chunks in several calls and in groups, and for decodes."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    folder = tiny_model("deepseek_v4", num_hidden_layers=2, layer_types=kinds, index_topk=3)
    pretend(monkeypatch)
    used: set[Any] = set()

    def scores(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        used.add(arguments[5])
        return KERNELS["index_scores"](q, *arguments)

    monkeypatch.setattr(triton_compressed, "_MOST_QUERIES", 20)
    # The interpreter is slow with programs that have no work, and with wide tiles.
    monkeypatch.setattr(triton_compressed, "_PROGRAMS", 4)
    for place in ("index_scores._BLOCK", "index_scores._LISTED_BLOCK", "entry_slots._ROWS"):
        monkeypatch.setattr(f"baton_kernels.{place}", 16)
    engine = make_engine(
        folder, block_size=8, max_num_batched_tokens=32, max_num_seqs=2, max_model_len=40, num_blocks=64,
        enforce_eager=True, chunk_ms=0.0, deterministic=deterministic,
    )  # fmt: skip
    # The interpreter would take minutes for the steps that an engine measures at start.
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(triton_compressed, name, scores if name == "index_scores" else kernel)
    prompts = [make_prompt(length, seed=3) for length in (5, 25)]
    transcript = generate(engine, [make_request(id, prompt, 2) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(folder, prompt, 2)
    assert used == ({1} if deterministic else {1, 8})


@pytest.mark.parametrize(("block_size", "budget"), [(16, 1), (24, 7), (64, 200)])
def test_tokens_do_not_depend_on_block_size_or_budget(compressed: Path, block_size: int, budget: int) -> None:
    """Two prompts begin alike, and the second one finds the blocks of the first."""
    common = make_prompt(50, seed=4)
    prompts = [common + make_prompt(13, seed=1), common + make_prompt(5, seed=2)]
    engine = make_engine(compressed, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=3)
    expected = [reference_greedy(compressed, prompt, 8) for prompt in prompts]
    assert generate(engine, [make_request(0, prompts[0], 8)]).tokens[0, 0] == expected[0]
    transcript = generate(engine, [make_request(id, prompt, 8) for id, prompt in enumerate(prompts)])
    assert [transcript.tokens[id, 0] for id in range(2)] == expected
    assert_idle(engine)


def test_preempted_sequences_and_choices(compressed: Path) -> None:
    engine = make_engine(
        compressed, block_size=16, num_blocks=44, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=120
    )
    prompts = [make_prompt(length, seed=5) for length in (60, 61, 47, 70, 64)]
    requests = [make_request(id, prompt, 40, n=2 if id == 1 else 1) for id, prompt in enumerate(prompts)]
    transcript = generate(engine, requests)
    assert engine.scheduler.num_preemptions
    for (id, _), tokens in transcript.tokens.items():
        assert tokens == reference_greedy(compressed, prompts[id], 40)
    assert_idle(engine)


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (24, 8)])
def test_entries_and_states_are_handed_over(compressed: Path, prefill_block: int, decode_block: int) -> None:
    prefill = make_engine(compressed, max_num_batched_tokens=24, block_size=prefill_block)
    pair = Pair(prefill, make_engine(compressed, block_size=decode_block), seed=decode_block)
    prompts = [make_prompt(length, seed=3) for length in (1, 16, 90)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 16, n=2 if id == 2 else 1))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        expected = reference_greedy(compressed, prompt, 16)
        assert all(tokens == expected for (at, _), tokens in transcript.tokens.items() if at == id)
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def test_entries_go_to_another_number_of_ranks(compressed: Path, divided: MakeEngine) -> None:
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, "num_blocks": 256, "block_size": 16}
    pair = Pair(divided(compressed, 2, **settings), make_engine(compressed, **settings), seed=1)
    prompts = [make_prompt(length, seed=3) for length in (17, 90)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 12))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(compressed, prompt, 12)
    assert pair.prefill.fingerprint_facts() == pair.decode.fingerprint_facts()


def test_only_entries_take_memory_of_long_sequences(compressed: Path) -> None:
    engine = make_engine(compressed, block_size=16, max_num_batched_tokens=64)
    # Keys of three layers, states of two, and a layer for the entries of each kind of windows.
    layout = engine.runner.cache.layout
    assert [layout.windows.count(window) for window in (8, 2, None)] == [3, 2, 2]
    assert [group.window for group in layout.groups] == [None, 8, 8, 2]
    engine.add(make_request(0, make_prompt(300, seed=6), 20))
    for _ in range(12):
        engine.step()
    [sequence] = engine.scheduler.running
    held = [len(table.held) for table in sequence.tables]
    assert held[0] >= 300 // 16
    assert max(held[1:]) <= 3


def test_which_entries_are_selected_changes_tokens(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise equality with transformers would say nothing about the indexer."""
    prompt = make_prompt(70, seed=4)
    expected = reference_greedy(compressed, prompt, 12)
    plain = "baton_engine.attention.torch_compressed.index_scores_reference"

    def tokens(change: Any) -> list[int]:
        from baton_kernels.reference.indexed import index_scores_reference

        monkeypatch.setattr(plain, lambda *given: change(index_scores_reference(*given)))
        return generate(make_engine(compressed), [make_request(0, prompt, 12)]).tokens[0, 0]

    assert tokens(lambda scores: scores) == expected
    assert tokens(lambda scores: scores.flip(-1)) != expected
