"""NaN in memory that a request does not see changes none of its tokens. NaN of its own ends it and no other request."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.engine import Engine
from baton_engine.sequence import Request
from tests.models import VOCAB_SIZE, reference_greedy

from . import fake_cuda
from .harness import Transcript, assert_idle, finish, make_engine, make_prompt, make_request

BROKEN_TOKEN = VOCAB_SIZE - 1


@pytest.fixture(params=["cpu", "gpu's runner"])
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "cpu":
            fake_cuda.pretend(patch)
        yield request.param


def poison(engine: Engine) -> None:
    """Write NaN into every slot that holds no token of a live request or of the prefix cache. A block of a layer with
    states holds that of its last token anywhere in the block."""
    planes, pool, size = engine.runner.cache.planes, engine.pool, engine.config.block_size
    layout = engine.runner.cache.layout
    free = torch.ones(pool.num_blocks, size, dtype=torch.bool)
    free[list(pool._hash_of)] = False
    for group in engine._sequences.values():
        for sequence in group:
            for table, layers in zip(sequence.tables, layout.groups, strict=False):
                for at in range(table.gone * size, sequence.computed):
                    places = slice(None) if layers.layers[0] in layout.state_layers else at % size
                    free[table.blocks[at // size], places] = False
    for plane in planes:
        # torch cannot assign to some of the codes of 8 bits.
        plane.copy_(plane.float().masked_fill(free[:, :, None, None], float("nan")))


def break_embedding(engine: Engine) -> None:
    """Make every prompt with BROKEN_TOKEN compute NaN."""
    engine.runner._model.embedding.weight[BROKEN_TOKEN] = float("nan")


def without_broken(length: int, seed: int) -> list[int]:
    return [token % BROKEN_TOKEN for token in make_prompt(length, seed)]


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        *itertools.product(["windowed", "latent", "indexed", "key_blocks"], [4, 16]),
        ("compressed", 16),
        ("selecting_groups", 16),
    ],
)
def test_nan_in_free_slots_changes_no_token(
    name: str, runner: str, block_size: int, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    engine = make_engine(folder, block_size=block_size, max_num_batched_tokens=24, num_blocks=1280 // block_size)
    prompts = [make_prompt(length, seed=3) for length in (1, 15, 16, 17, 33, 70)]
    requests = [make_request(id, prompt, 10) for id, prompt in enumerate(prompts)]
    transcript = Transcript()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        poison(engine)
        transcript.take(engine.step().deltas)
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(folder, prompt, 10)
    assert_idle(engine)


def test_nan_in_free_slots_reaches_no_kernel_of_latent_attention(latent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs the kernels themselves: parts of sequences, groups of queries, and expanded chunks."""
    from baton_engine.attention import triton_latent

    names = ("plan_parts", "latent_decode", "gather_latents", "latent_prefill", "absorb_queries", "values_of")
    kernels = {name: getattr(triton_latent, name) for name in names}
    used: set[str] = set()

    def noted(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            used.add("groups" if name == "latent_decode" and arguments[6] > 1 else name)
            return kernels[name](*arguments)

        return run

    fake_cuda.pretend(monkeypatch)
    for name in names:
        monkeypatch.setattr(triton_latent, name, noted(name))
    monkeypatch.setattr(triton_latent, "_PROGRAMS", 4)
    # In float32 a tile has no room for a group.
    monkeypatch.setattr("baton_kernels.latent_decode._WIDE_ROWS", 64)
    settings = {"block_size": 4, "max_num_batched_tokens": 40, "num_blocks": 64, "max_model_len": 80}
    # Chunks bounded by time would be others on a busy machine.
    engine = make_engine(latent, max_num_seqs=2, enforce_eager=True, chunk_ms=0.0, **settings)
    used.clear()
    transcript = Transcript()
    # The first step leaves one token of the first prompt, whose query is a group, and the second one some of the other.
    prompts = [make_prompt(length, seed=3) for length in (41, 50)]
    for id, prompt in enumerate(prompts):
        engine.add(make_request(id, prompt, 3))
    while engine.has_work:
        poison(engine)
        transcript.take(engine.step().deltas)
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(latent, prompt, 3)
    assert used == {*names, "groups"}
    assert_idle(engine)


def run_with_broken(engine: Engine, broken: list[Request], sound: list[Request]) -> tuple[Transcript, list[int]]:
    transcript, ended = Transcript(), []
    for request in [*broken, *sound]:
        engine.add(request)
    for _ in range(1000):
        if not engine.has_work:
            break
        result = engine.step()
        ended += result.broken
        transcript.take(result.deltas)
    return transcript, ended


def test_a_request_that_computes_nan_ends_alone_and_is_not_remembered(llama: Path, runner: str) -> None:
    engine = make_engine(llama, max_num_batched_tokens=24)
    break_embedding(engine)
    kinds: list[dict[str, Any]] = [
        {}, {"n": 3, "temperature": 1.0, "seed": 5}, {"logprobs": 2}, {"prompt_logprobs": 0}
    ]  # fmt: skip
    for case, (place, fields) in enumerate(itertools.product([0, 30, 69], kinds)):
        # Each case has prompts of its own, of which the prefix cache knows nothing.
        prompt = without_broken(70, seed=3 * case)
        prompt[place] = BROKEN_TOKEN
        neighbours = [without_broken(length, seed=3 * case + 1) for length in (20, 50)]
        sound = [make_request(id, neighbour, 12) for id, neighbour in enumerate(neighbours, 1)]
        transcript, ended = run_with_broken(engine, [make_request(0, prompt, 12, **fields)], sound)
        assert ended == [0], (place, fields)
        assert not [key for key in transcript.tokens if key[0] == 0]
        for id, neighbour in enumerate(neighbours, 1):
            assert transcript.tokens[id, 0] == reference_greedy(llama, neighbour, 12), (place, fields)
        assert_idle(engine)
        # Blocks before the broken token are valid and may be found, but no block with it or after it.
        again = Transcript()
        engine.add(make_request(9, [*prompt[:place], *without_broken(71 - place, seed=3 * case + 2)], 1))
        finish(engine, again)
        assert again.first(9).cached_tokens <= place // 16 * 16, (place, fields)
        known = engine.pool.match(make_sequence_hashes(engine, prompt))
        assert len(known) <= place // 16, (place, fields)


def make_sequence_hashes(engine: Engine, tokens: list[int]) -> list[bytes]:
    request = make_request(10, tokens, 1)
    engine.add(request)
    [sequence] = engine._sequences[10]
    hashes = sequence.hashes(0, len(tokens) // engine.config.block_size)
    engine.abort(10)
    return hashes


def test_nan_that_comes_while_decoding_ends_the_request(llama: Path, runner: str) -> None:
    engine, prompt = make_engine(llama), without_broken(20, seed=6)
    expected = reference_greedy(llama, prompt, 30)
    engine.runner._model.embedding.weight[expected[10]] = float("nan")
    first = expected.index(expected[10])
    if expected[10] in prompt:
        pytest.fail("choose another seed: the token is in the prompt")
    transcript, ended = run_with_broken(engine, [make_request(0, prompt, 30)], [])
    assert ended == [0]
    assert transcript.tokens[0, 0] == expected[: first + 1]
    assert_idle(engine)
    cached = engine.pool.match(make_sequence_hashes(engine, prompt + expected))
    assert len(cached) <= (20 + first) // 16


def test_a_request_that_computes_nan_ends_alone_among_latents(latent: Path, runner: str) -> None:
    engine = make_engine(latent, max_num_batched_tokens=24)
    break_embedding(engine)
    prompt, neighbour = without_broken(70, seed=1), without_broken(50, seed=2)
    prompt[40] = BROKEN_TOKEN
    transcript, ended = run_with_broken(engine, [make_request(0, prompt, 12)], [make_request(1, neighbour, 12)])
    assert ended == [0]
    assert transcript.tokens == {(1, 0): reference_greedy(latent, neighbour, 12)}
    assert_idle(engine)


def test_infinity_is_not_finite_either(llama: Path, runner: str) -> None:
    engine = make_engine(llama)
    break_embedding(engine)
    engine.runner._model.embedding.weight[BROKEN_TOKEN] = float("inf")
    _, ended = run_with_broken(engine, [make_request(0, [1, 2, BROKEN_TOKEN], 5)], [])
    assert ended == [0]
    assert_idle(engine)
