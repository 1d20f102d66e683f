"""KV in FP8: tokens are those of transformers with keys and values that are rounded in the same way."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_demo import MODEL_DIR
from baton_demo.corpus import Corpus
from baton_engine.attention import hopper_paged, select, wide_copies
from baton_engine.config import ConfigError
from baton_engine.engine import Engine
from baton_engine.fingerprint import layout_fingerprint
from baton_engine.kv_scales import scales_for
from baton_engine.stored_scales import save_scales
from baton_tokenizer.load import load_tokenizer
from tests.conftest import MakeModel
from tests.models import reference_model
from tests.rounded_kv import rounded_choices, rounded_logits

from . import fake_cuda
from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .test_equality import SHAPES

# A rope of another kind, windows with norms of heads, a softcap, sinks, ALiBi, one head of keys for all queries, keys
# that layers share, and values of another size than keys.
FAMILIES = (
    "llama-biases-llama3",
    "qwen3-windows-in-turn",
    "gemma2-tied",
    "gpt-oss",
    "bloom-twelve-heads-residual-after-norm-untied",
    "falcon-7b",
    "gemma3n",
    "mimo-v2-flash-biases-groups",
)


def fp8_engine(folder: Path, **settings: Any) -> Engine:
    return make_engine(folder, kv_cache_dtype="fp8", **settings)


def scales_of(engine: Engine) -> list[torch.Tensor]:
    scales = engine.runner.cache.scales
    assert scales is not None
    return [scales[layer].clone() for layer in range(len(scales))]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_with_rounded_kv(tiny_model: MakeModel, family: str) -> None:
    name, overrides = SHAPES[family]
    folder = tiny_model(name, **overrides)
    engine = fp8_engine(folder, max_num_batched_tokens=40)
    scales = scales_of(engine)
    prompts = [make_prompt(length, seed=3) for length in (1, 16, 90)]
    # The last prompt begins with 48 tokens that are cached by then.
    prompts.append(prompts[2][:50] + make_prompt(30, seed=9))
    transcript = generate(engine, [make_request(id, prompt, 32) for id, prompt in enumerate(prompts[:3])])
    for delta in generate(engine, [make_request(3, prompts[3], 32)]).deltas:
        transcript.take([delta])
    assert engine.allocator.prefix_hits >= 48
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert tokens == rounded_choices(folder, prompt, tokens, scales)
    assert len({token for tokens in transcript.tokens.values() for token in tokens}) > 8, "this model tests little"
    assert_idle(engine)
    # Rounding shows, so the comparison would fail without it.
    exact = reference_model(folder)(torch.tensor([prompts[2]])).logits[0]
    assert (rounded_logits(folder, prompts[2], scales) - exact).abs().max() > 1e-3


@pytest.mark.parametrize("graphs", [False, True])
def test_the_runner_of_gpus_gives_the_same_tokens(
    windowed: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [make_prompt(length, seed=4) for length in (1, 17, 40)]
    requests = [make_request(id, prompt, 12) for id, prompt in enumerate(prompts)]
    expected = generate(fp8_engine(windowed, block_size=64, max_num_batched_tokens=24), requests).tokens
    fake_cuda.pretend(monkeypatch)
    engine = fp8_engine(windowed, block_size=64, max_num_batched_tokens=24, enforce_eager=not graphs)
    assert generate(engine, requests).tokens == expected


@pytest.mark.parametrize("graphs", [False, True])
def test_attention_over_copies_in_more_bits_gives_the_same_tokens(
    windowed: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one begins with tokens that are cached.
    prompts = [make_prompt(length, seed=4) for length in (1, 17, 40, *[125] * 12)]
    requests = [make_request(id, prompt, 3) for id, prompt in enumerate(prompts)]
    later = [make_request(len(prompts), prompts[-1][:100] + make_prompt(20, seed=8), 3)]
    settings = {"block_size": 64, "max_num_batched_tokens": 1600, "max_model_len": 128}
    reference = fp8_engine(windowed, **settings)
    expected = generate(reference, requests).tokens | generate(reference, later).tokens
    fake_cuda.pretend(monkeypatch)
    monkeypatch.setattr(select, "_why_not_hopper", lambda *_: None)
    monkeypatch.setattr(hopper_paged, "_LEAST_TILES", 1)
    if not graphs:
        # All prompts together have more blocks than the memory for copies.
        monkeypatch.setattr(wide_copies, "GRAPH_KEYS", 64)
    seen = []

    def prefill(q: torch.Tensor, keys: torch.Tensor, *facts: Any) -> None:
        first_sequence = int(facts[4][0][0])
        seen.append((keys.dtype, first_sequence))
        fake_cuda.prefill_attention(q, keys, *facts, 128, False, None, None)

    # Its kernel runs on Hopper only.
    monkeypatch.setattr(hopper_paged, "hopper_prefill", prefill)
    engine = fp8_engine(windowed, **settings, enforce_eager=not graphs)
    seen.clear()
    assert generate(engine, requests).tokens | generate(engine, later).tokens == expected
    assert {dtype for dtype, _ in seen} == {torch.float32}
    assert graphs or max(first for _, first in seen) > 8, "the copies of all prompts were made at once"


class Counting(Pair):
    """Counts the bytes that it delivers."""

    bytes = 0

    def deliver_piece(self) -> bool | None:
        before = sum(piece.values.numel() for piece in self.pieces)
        complete = super().deliver_piece()
        self.bytes += before - sum(piece.values.numel() for piece in self.pieces)
        return complete


def test_a_hand_over_has_half_the_bytes_of_16_bits(windowed: Path) -> None:
    pairs: list[Counting] = []
    for kind in ("auto", "fp8"):
        settings: dict[str, Any] = {"kv_cache_dtype": kind, "dtype": "bfloat16", "max_num_batched_tokens": 24}
        pair = Counting(make_engine(windowed, **settings), make_engine(windowed, **settings), seed=1)
        for id, length in enumerate((15, 60, 130)):
            pair.add(make_request(id, make_prompt(length, seed=5), 8))
        pair.run()
        for engine in (pair.prefill, pair.decode):
            assert_idle(engine)
        pairs.append(pair)
    assert pairs[1].bytes * 2 == pairs[0].bytes > 0


def test_a_hand_over_of_codes_changes_no_token(llama: Path) -> None:
    prefill, decode = fp8_engine(llama, max_num_batched_tokens=24), fp8_engine(llama, block_size=24)
    pair = Pair(prefill, decode, seed=2)
    prompts = [make_prompt(length, seed=6) for length in (1, 16, 47, 130)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 20))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert tokens == rounded_choices(llama, prompt, tokens, scales_of(decode))


@pytest.mark.parametrize("block_size", [4, 16])
def test_nan_in_free_slots_changes_no_token(windowed: Path, block_size: int) -> None:
    from .test_not_finite import poison

    requests = [make_request(id, make_prompt(length, seed=3), 12) for id, length in enumerate((1, 17, 70))]
    settings = {"block_size": block_size, "max_num_batched_tokens": 24}
    expected = generate(fp8_engine(windowed, **settings), requests)
    engine = fp8_engine(windowed, **settings)
    transcript = generate(engine, [])
    for request in requests:
        engine.add(request)
    while engine.has_work:
        poison(engine)
        transcript.take(engine.step().deltas)
    assert transcript.tokens == expected.tokens


def perplexity(engine: Engine, texts: list[list[int]]) -> float:
    transcript = generate(engine, [make_request(id, text, 1, prompt_logprobs=0) for id, text in enumerate(texts)])
    entries = [entry for id in range(len(texts)) for entry in transcript.first(id).prompt_logprobs or []]
    assert len(entries) == sum(map(len, texts)) - len(texts)
    return math.exp(-sum(entry.logprob for entry in entries) / len(entries))


def test_perplexity_of_the_demo_model_on_its_corpus() -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    texts = [tokenizer.encode(text).ids for text in Corpus.load().documents]
    exact, rounded = (
        perplexity(make_engine(MODEL_DIR, kv_cache_dtype=kind, num_blocks=512), texts) for kind in ("auto", "fp8")
    )
    count, change = sum(map(len, texts)), rounded / exact - 1
    print(f"perplexity of {count} tokens: {exact:.4f} in float32, {rounded:.4f} in FP8, {change:+.3%}")
    assert abs(change) < 0.005
    assert rounded != exact


# Scales


def with_scales(folder: Path, to: Path, tensors: dict[str, torch.Tensor], scheme: dict[str, Any] | None = None) -> Path:
    """Copy a model, and add tensors to its weights and a kv_cache_scheme to its config."""
    shutil.copytree(folder, to)
    path = to / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    if scheme is not None:
        config = json.loads((to / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme,
        }  # fmt: skip
        (to / "config.json").write_text(json.dumps(config))
    return to


def named(keys: str, values: str, of_keys: torch.Tensor, of_values: torch.Tensor) -> dict[str, torch.Tensor]:
    places = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    return {f"{at}.{name}": x.clone() for at in places for name, x in ((keys, of_keys), (values, of_values))}


SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("tensors", "scales"),
    [
        (named("k_scale", "v_scale", torch.tensor(0.03), torch.tensor([0.01])), [[0.03, 0.03], [0.01, 0.01]]),
        (
            named("k_scale", "v_scale", torch.tensor([[[0.02]], [[0.05]]]).bfloat16(), torch.tensor([0.01, 0.03])),
            [[0.02, 0.05], [0.01, 0.03]],
        ),
        (
            named("k_proj.k_scale", "v_proj.v_scale", torch.tensor(0.03), torch.tensor(0.01)),
            [[0.03, 0.03], [0.01, 0.01]],
        ),
        (
            named("k_proj.output_scale", "v_proj.output_scale", torch.tensor(0.03), torch.tensor(0.01)),
            [[0.03, 0.03], [0.01, 0.01]],
        ),
        (named("kv_scale", "kv_scale", torch.tensor(0.03), torch.tensor(0.03)), [[0.03, 0.03], [0.03, 0.03]]),
    ],
    ids=["one", "by-head", "of-projections", "of-outputs", "both"],
)
def test_scales_of_a_checkpoint(
    llama: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], scales: list[list[float]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = with_scales(llama, tmp_path / "m", tensors, SCHEME)
    with caplog.at_level("INFO"):
        engine = fp8_engine(folder)
    assert "scales of heads: those of the checkpoint" in caplog.text
    assert "does not use" not in caplog.text
    stored = scales_of(engine)
    for layer in stored:
        assert torch.allclose(layer, torch.tensor(scales), rtol=4e-3)
    prompt = make_prompt(60)
    tokens = generate(engine, [make_request(0, prompt, 20)]).tokens[0, 0]
    assert tokens == rounded_choices(llama, prompt, tokens, stored)


@pytest.mark.parametrize("wrong", [[0.0], [-1.0], [float("nan")], [float("inf")], [0.1, 0.1, 0.1], [1e-40]])
def test_scales_that_are_none_are_an_error_that_names_them(llama: Path, tmp_path: Path, wrong: list[float]) -> None:
    tensors = named("k_scale", "v_scale", torch.tensor(0.1), torch.tensor(wrong))
    folder = with_scales(llama, tmp_path / "m", tensors)
    with pytest.raises(ConfigError, match=r"layer 0 is not a number above 0|v_scale, .* neither one scale nor one for"):
        fp8_engine(folder)
    make_engine(folder)


def test_scales_are_measured_where_the_checkpoint_has_none(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        measured = scales_of(fp8_engine(llama))
    assert "4 times as many tokens as in float32; scales of heads: measured on 1024 tokens" in caplog.text
    # Those of one layer alone, and those for integers, are not used.
    tensors = named("k_scale", "v_scale", torch.tensor(0.03), torch.tensor(0.03))
    some = {name: tensor for name, tensor in tensors.items() if ".0." in name}
    folders = [
        with_scales(llama, tmp_path / "some", some),
        with_scales(llama, tmp_path / "int8", tensors, {**SCHEME, "type": "int"}),
    ]
    for folder in folders:
        assert all(map(torch.equal, scales_of(fp8_engine(folder)), measured))
    # Whatever the settings are, pods measure the same.
    other = fp8_engine(llama, block_size=4, max_num_batched_tokens=7, enable_prefix_caching=False, num_blocks=200)
    assert all(map(torch.equal, scales_of(other), measured))
    # No value of the corpus of a real prompt comes near the largest code.
    cache = other.runner.cache
    generate(other, [make_request(0, make_prompt(120, seed=8), 4)])
    assert 0 < max(float(plane.float().abs().max()) for plane in cache.planes) < 448


def test_scales_of_a_file_come_first(llama: Path, tmp_path: Path) -> None:
    stored = named("k_scale", "v_scale", torch.tensor(0.03), torch.tensor(0.01))
    folder, file = with_scales(llama, tmp_path / "m", stored), tmp_path / "scales.safetensors"
    measured = fp8_engine(llama)
    assert measured.runner.cache.scales is not None
    save_scales(measured.runner.cache.scales, file)
    engine = fp8_engine(folder, kv_scales=str(file))
    assert engine.fingerprint_facts() == measured.fingerprint_facts() != fp8_engine(folder).fingerprint_facts()
    for content, wrong in ((b"no scales", "cannot be read"), (None, "cannot be read")):
        other = tmp_path / "other"
        if content is not None:
            other.write_bytes(content)
        with pytest.raises(ConfigError, match=f"--kv-scales {other} {wrong}"):
            fp8_engine(llama, kv_scales=str(other))
        other.unlink(missing_ok=True)
    save_file({name: tensor for name, tensor in load_file(file).items() if ".0." in name}, file)
    with pytest.raises(ConfigError, match="lacks the scales of some of the model's 2 layers"):
        fp8_engine(llama, kv_scales=str(file))
    with pytest.raises(ConfigError, match="--kv-scales is for --kv-cache-dtype fp8"):
        make_engine(llama, kv_scales=str(file))


def test_measured_scales_are_powers_of_two_with_room() -> None:
    largest = torch.tensor([[0.0, 1e-38, 1.0], [224.0, 223.9, 5e4]])
    scales = scales_for(largest)
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))
    assert scales[0, 0] == 1
    assert (largest / scales <= 224).all()
    assert (largest[1:] / scales[1:] >= 224 / 2).all()


def test_keys_that_are_not_finite_have_no_scales(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    broken = load_file(llama / "model.safetensors")[name].fill_(float("inf"))
    folder = with_scales(llama, tmp_path / "m", {name: broken})
    with pytest.raises(ConfigError, match=r"layer 1 are not finite, .* use --kv-cache-dtype auto"):
        fp8_engine(folder)


# Settings


def test_pods_with_other_codes_or_scales_do_not_share_kv(llama: Path, tmp_path: Path) -> None:
    tensors = named("k_scale", "v_scale", torch.tensor(0.03), torch.tensor(0.03))
    folder = with_scales(llama, tmp_path / "m", tensors)
    engines = [make_engine(llama), fp8_engine(llama), fp8_engine(llama, dtype="bfloat16"), fp8_engine(folder)]
    # The weights of one folder stand for all, so that only layouts differ.
    assert len({layout_fingerprint(engine.fingerprint_facts(), llama) for engine in engines}) == 4
    assert engines[1].fingerprint_facts() == fp8_engine(llama, block_size=32).fingerprint_facts()
    assert [engine.runner.cache.format.split()[0] for engine in engines] == ["float32", *["float8_e4m3fn"] * 3]
    assert "kv_scales" not in engines[0].fingerprint_facts(), "earlier versions have no such field"


def test_what_cannot_be_in_fp8_is_refused_with_what_works(latent: Path, llama: Path, tiny_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"of DeepseekV3ForCausalLM holds latent vectors: use --kv-cache-dtype auto"):
        fp8_engine(latent)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype 'fp4' is unknown; use auto or fp8"):
        make_engine(llama, kv_cache_dtype="fp4")
    with pytest.raises(ConfigError, match=r"head_dim that is a multiple of 4, this model has 18"):
        fp8_engine(tiny_model("llama", head_dim=18))


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton_engine.kv_dtype import check_fp8_kv

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"A100 has 8.0 and serves with --kv-cache-dtype auto"):
        check_fp8_kv(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    check_fp8_kv(torch.device("cuda"))
    check_fp8_kv(torch.device("cpu"))


def test_blocks_take_half_the_memory(llama: Path) -> None:
    caches = [make_engine(llama, dtype="bfloat16", kv_cache_dtype=kind).runner.cache for kind in ("auto", "fp8")]
    assert caches[0].block_bytes == 2 * caches[1].block_bytes
    assert caches[1].block_bytes == sum(plane.nbytes for plane in caches[1].planes) // caches[1].num_blocks


def test_choices_that_part_get_copies_of_blocks(llama: Path) -> None:
    sampling = {"temperature": 1.0, "seed": 1}
    together = generate(fp8_engine(llama), [make_request(0, make_prompt(20), 20, n=3, **sampling)]).tokens
    for choice in range(3):
        request = make_request(0, make_prompt(20), 20, choice=choice, **sampling)
        assert generate(fp8_engine(llama), [request]).tokens[0, choice] == together[0, choice]
