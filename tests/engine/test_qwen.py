"""Qwen of the first generation: up to seq_length it is Qwen2 under other names, beyond it its formulae are checked
against a reference in float64."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton_engine.config import ConfigError
from baton_engine.models.qwen import ntk_alpha
from baton_engine.models.registry import load_model_config, parse_model_config
from loadtest.common.qwen_model import write_qwen
from tests.conftest import MakeModel
from tests.models import reference_greedy

from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .test_cuda_runner import pretend

TRAINED = 32


@pytest.fixture(scope="module")
def qwen(tiny_model: MakeModel) -> Path:
    return tiny_model("qwen")


@pytest.fixture(scope="module")
def long(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained on 32 tokens and serves up to 256."""
    folder = tmp_path_factory.mktemp("long")
    write_qwen(folder, qwen / "reference", seq_length=TRAINED, max_position_embeddings=256)
    return folder


def test_choices_cached_prompts_and_continued_ones(qwen: Path) -> None:
    engine = make_engine(qwen, block_size=4)
    for length in (1, 16, 45):
        prompt = make_prompt(length, seed=2)
        expected = reference_greedy(qwen, prompt, 40)
        transcript = generate(engine, [make_request(length, prompt, 40, n=4)])
        assert all(transcript.tokens[length, choice] == expected for choice in range(4))
        continued = make_request(length, prompt, 40, output=tuple(expected[:13]))
        assert generate(engine, [continued]).tokens[length, 0] == expected
    assert engine.load().prefix_hits > 0
    assert_idle(engine)


def test_through_a_pair_of_pods(qwen: Path) -> None:
    pair = Pair(make_engine(qwen, max_num_batched_tokens=24), make_engine(qwen), seed=1)
    prompts = [make_prompt(length, seed=4) for length in (1, 17, 70)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 24))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(qwen, prompt, 24)


def test_an_engine_serves_the_trained_length_unless_it_is_told_otherwise(long: Path) -> None:
    engine = make_engine(long)
    assert engine.request_error(make_request(0, make_prompt(20), TRAINED - 20 + 1)) is not None
    assert engine.request_error(make_request(0, make_prompt(20), TRAINED - 20)) is None
    assert engine.fingerprint_facts() == make_engine(long, max_model_len=8).fingerprint_facts()
    longer = make_engine(long, max_model_len=TRAINED + 1).fingerprint_facts()
    assert longer != engine.fingerprint_facts(), "such pods would decode each other's keys into garbage"
    assert longer == make_engine(long, max_model_len=2 * TRAINED).fingerprint_facts()


@pytest.mark.parametrize("extensions", [(True, True), (True, False), (False, True)], ids=["both", "ntk", "logn"])
@pytest.mark.parametrize("longest", [64, 150])
def test_beyond_the_trained_length(qwen: Path, tmp_path: Path, extensions: tuple[bool, bool], longest: int) -> None:
    ntk, logn = extensions
    fields = {"seq_length": TRAINED, "max_position_embeddings": 256, "use_dynamic_ntk": ntk, "use_logn_attn": logn}
    write_qwen(tmp_path, qwen / "reference", **fields)
    shared = make_prompt(24, seed=6)
    prompts = [shared, make_prompt(TRAINED, seed=6), shared + make_prompt(16, seed=7)]
    engine = make_engine(tmp_path, block_size=8, max_num_batched_tokens=13, max_model_len=longest)
    for _ in ("computed", "cached"):
        transcript = generate(engine, [make_request(id, prompt, 24) for id, prompt in enumerate(prompts)])
        for id, prompt in enumerate(prompts):
            tokens = transcript.tokens[id, 0]
            assert tokens == reference_choices(tmp_path, prompt + tokens, longest)[len(prompt) - 1 : -1]
    assert_idle(engine)


def test_beyond_the_trained_length_in_graphs(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    prompts = [make_prompt(length, seed=8) for length in (3, 20, 60)]
    engine = make_engine(long, block_size=4, max_num_seqs=5, max_num_batched_tokens=32, max_model_len=100)
    transcript = generate(engine, [make_request(id, prompt, 40) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert tokens == reference_choices(long, prompt + tokens, 100)[len(prompt) - 1 : -1]


def test_the_factor_of_the_base() -> None:
    """As in the published table: 8,192 trained tokens, alpha 3 up to twice and 7 up to four times as many."""
    assert [ntk_alpha(n, 8192) for n in (1, 8192, 8193, 16384, 16385, 32768, 32769)] == [1, 1, 3, 3, 7, 7, 15]


def test_the_dtype_follows_the_flags(long: Path) -> None:
    fields = json.loads((long / "config.json").read_text())
    del fields["torch_dtype"]
    assert parse_model_config(fields).dtype == "bfloat16"
    assert parse_model_config({**fields, "fp16": True}).dtype == "float16"
    assert load_model_config(long).dtype == "float32"


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_channels", 8), ("rotary_pct", 0.0), ("rotary_pct", 0.2), ("seq_length", 1), ("intermediate_size", 191)],
)
def test_what_cannot_be_served_is_named(long: Path, field: str, value: float) -> None:
    fields = {**json.loads((long / "config.json").read_text()), field: value}
    with pytest.raises(ConfigError, match=field):
        parse_model_config(fields)


def reference_choices(folder: Path, ids: list[int], longest: int) -> list[int]:
    """Return the best token after each of the ids, by the formulae of Qwen's report, in float64."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, dim, eps = config["num_attention_heads"], config["kv_channels"], config["layer_norm_epsilon"]
    base, trained, length = config["rotary_emb_base"], config["seq_length"], len(ids)
    if config["use_dynamic_ntk"]:
        alpha = max(2 ** math.ceil(math.log(longest / trained, 2) + 1) - 1, 1)
        base *= alpha ** (dim / (dim - 2))
    angles = torch.arange(length).double()[:, None] / base ** (torch.arange(0, dim, 2).double() / dim)
    cos, sin = (torch.cat([part, part], dim=-1)[:, None] for part in (angles.cos(), angles.sin()))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weights[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1) * sin

    x = weights["transformer.wte.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer.h.{layer}"
        qkv = norm(x, f"{at}.ln_1.weight") @ weights[f"{at}.attn.c_attn.weight"].T + weights[f"{at}.attn.c_attn.bias"]
        q, k, v = (part.view(length, heads, dim) for part in qkv.chunk(3, dim=-1))
        q, k = rotate(q), rotate(k)
        if config["use_logn_attn"]:
            q = q * torch.tensor([max(math.log(i, trained), 1.0) for i in range(1, length + 1)]).double()[:, None, None]
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ weights[f"{at}.attn.c_proj.weight"].T
        inner = norm(x, f"{at}.ln_2.weight")
        gate, up = (inner @ weights[f"{at}.mlp.{name}.weight"].T for name in ("w2", "w1"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"{at}.mlp.c_proj.weight"].T
    logits = norm(x, "transformer.ln_f.weight") @ weights["lm_head.weight"].T
    choices: list[int] = logits.argmax(dim=-1).tolist()
    return choices
