"""Latent attention: one latent vector of each token in the cache, used absorbed or expanded, whichever is cheaper."""

import random
from pathlib import Path

import msgspec
import pytest
import torch

from baton_engine.attention.torch_latent import TorchLatent
from baton_engine.latent_spec import LatentSpec
from tests.models import reference_choices, reference_greedy

from .fake_cuda import pretend
from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request

LITE = LatentSpec(scale=1.0, rank=512, rope_dim=64, key_dim=128, value_dim=128)


@pytest.mark.parametrize("tokens", [2, 60, 170, 172, 2000])
@pytest.mark.parametrize("before", [0, 1, 5, 1000, 50_000])
def test_the_cheaper_way_is_chosen(tokens: int, before: int) -> None:
    heads, up = 16, LITE.rank * (LITE.key_dim + LITE.value_dim)
    pairs = sum(before + at + 1 for at in range(tokens))
    expanded = heads * ((before + tokens) * up + pairs * (LITE.query_dim + LITE.value_dim))
    absorbed = heads * (tokens * up + pairs * (LITE.latent_dim + LITE.rank))
    assert LITE.expands(tokens, before + tokens) == (expanded <= absorbed)


@pytest.mark.parametrize("window", [1, 100, 513])
@pytest.mark.parametrize("tokens", [2, 60, 170, 600])
@pytest.mark.parametrize("before", [0, 5, 98, 3000])
def test_the_cheaper_way_within_a_window_is_chosen(tokens: int, before: int, window: int) -> None:
    spec, up = msgspec.structs.replace(LITE, window=window), LITE.rank * (LITE.key_dim + LITE.value_dim)
    pairs = sum(min(before + at + 1, window) for at in range(tokens))
    expanded = (min(before, window - 1) + tokens) * up + pairs * (LITE.query_dim + LITE.value_dim)
    absorbed = tokens * up + pairs * (LITE.latent_dim + LITE.rank)
    assert spec.expands(tokens, before + tokens) == (expanded <= absorbed)


def test_chunks_go_either_way(latent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt in chunks of several lengths: whole, absorbed or expanded behind a prefix."""
    ways: list[tuple[str, int]] = []
    for name in ("_attend_expanded", "_attend_chunk"):
        plain = getattr(TorchLatent, name)

        def noted(self: TorchLatent, q: torch.Tensor, *rest: object, name: str = name, plain: object = plain) -> None:
            ways.append((name, len(q)))
            plain(self, q, *rest)  # type: ignore[operator]

        monkeypatch.setattr(TorchLatent, name, noted)
    prompt = make_prompt(90, seed=5)
    expected = reference_greedy(latent, prompt, 12)
    for budget in (8, 30, 90):
        engine = make_engine(latent, block_size=4, max_num_batched_tokens=budget)
        assert generate(engine, [make_request(0, prompt, 12)]).tokens[0, 0] == expected
    assert {way for way in ways if way[1] in (8, 30, 90)} == {
        ("_attend_expanded", 8), ("_attend_chunk", 8), ("_attend_expanded", 30), ("_attend_expanded", 90),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "on_gpu"),
    [*((name, on_gpu) for name in ("latent", "indexed", "key_blocks") for on_gpu in (False, True)),
     ("latents_by_layer", False)],
)  # fmt: skip
def test_tokens_are_those_of_the_reference_in_every_way(
    name: str, on_gpu: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together in chunks, from the prefix cache, as four choices, resumed, and after preemption."""
    folder: Path = request.getfixturevalue(name)
    if on_gpu:
        pretend(monkeypatch)
        # Rounds of few heads, and calls of few sequences.
        monkeypatch.setattr("baton_engine.attention.triton_latent._EXPANDED_BYTES", 1 << 13)
        for backend in ("triton_indexed", "triton_key_blocks"):
            monkeypatch.setattr(f"baton_engine.attention.{backend}._MOST_QUERIES", 12)
    # Layers with a window have blocks of their own.
    blocks = 72 if name == "latents_by_layer" else 56
    engine = make_engine(folder, block_size=4, num_blocks=blocks, max_num_batched_tokens=40, max_model_len=160)
    common, rng = make_prompt(44, seed=9), random.Random(2)
    for turn in range(2):
        # The last one is shorter than the 21 tokens to which a query of the indexed model attends, or the 32 tokens of
        # the model with blocks of keys.
        prompts = [common + make_prompt(length, seed=turn) for length in (1, 7, 30, 66)] + [make_prompt(9, seed=turn)]
        requests = [make_request(id, prompt, 16, n=4 if id == 1 else 1) for id, prompt in enumerate(prompts)]
        known = reference_greedy(folder, prompts[2], 6)
        requests[2] = msgspec.structs.replace(requests[2], output=known)
        rng.shuffle(requests)
        transcript = generate(engine, requests)
        for each in requests:
            for choice in range(each.sampling.n):
                tokens = transcript.tokens[each.id, choice]
                assert len(tokens) == 16
                assert tokens == reference_choices(folder, each.prompt, tokens)
        assert_idle(engine)
    assert transcript.first(0).cached_tokens == len(common)
    assert engine.load().preemptions


def test_deterministic_engines_absorb_every_token(latent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr("baton_engine.attention.triton_latent.gather_latents", None)
    engine = make_engine(latent, max_num_batched_tokens=40, deterministic=True)
    prompts = [make_prompt(length) for length in (1, 17, 90)]
    transcript = generate(engine, [make_request(id, prompt, 12) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(latent, prompt, 12)


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (24, 10)])
def test_latents_are_handed_over(latent: Path, prefill_block: int, decode_block: int) -> None:
    prefill = make_engine(latent, max_num_batched_tokens=24, block_size=prefill_block)
    pair = Pair(prefill, make_engine(latent, block_size=decode_block), seed=decode_block)
    assert pair.prefill.fingerprint_facts() == pair.decode.fingerprint_facts()
    layout = pair.decode.runner.cache.layout
    # The model's kv_lora_rank and qk_rope_head_dim, in float32.
    assert layout.token_bytes == layout.num_layers * (24 + 8) * 4
    # The decode engine knows a part already, which ends within a block of the prefill engine.
    common = make_prompt(44)
    generate(pair.decode, [make_request(9, common)])
    prompts = [*(make_prompt(length, seed=3) for length in (1, 16, 90)), common + make_prompt(30)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 16, n=2 if id == 2 else 1))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        expected = reference_greedy(latent, prompt, 16)
        assert all(tokens == expected for (request, _), tokens in transcript.tokens.items() if request == id)
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def test_other_latents_have_another_fingerprint(latent: Path, tmp_path: Path) -> None:
    model = make_engine(latent).model
    changed = msgspec.structs.replace(model, latent=msgspec.structs.replace(model.latent, rank=16, rope_dim=16))
    assert changed.fingerprint_facts() != model.fingerprint_facts()
