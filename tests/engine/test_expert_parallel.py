"""Ranks that have some of a layer's experts as a whole give the tokens of one rank, and of transformers."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.config import ConfigError
from baton_engine.load_plan import Take, build_of, planned_takes
from baton_engine.loading import Weights
from baton_engine.models.registry import load_model_config
from baton_engine.ops import TORCH
from baton_engine.quantization.registry import read_quantization
from baton_engine.shard import OneRank, RankNumber, own_experts
from tests.conftest import MakeModel
from tests.models import is_greedy
from tests.packing import Tensors, fp8, packed_int4
from tests.quantized import rewrite

from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .pools import MakeEngine
from .test_equality import SHAPES
from .test_quantized_models import scheme, with_mxfp4_experts
from .test_ranks_as_on_gpus import two_threads

ALL_RANKS = bool(os.environ.get("ALL_RANKS"))  # each family with 2 and with 4 ranks, instead of one of these
FAMILIES = (
    "mixtral-window", "qwen2-moe-dense-layer-normalized", "qwen3-moe", "olmoe", "gpt-oss", "glm4-moe-groups",
    "deepseek-v2-groups", "deepseek-v3-groups", "ernie4-5-moe", "minimax-m2", "dots1", "exaone-moe",
    "flex-olmo", "kimi-k2-5", "granitemoe-shared", "qwen3-vl-moe", "hunyuan-moe", "phimoe-biases", "dbrx", "llama4",
    "afmoe", "hy3", "axk1", "axk2", "beam", "granite-swash-experts", "mistral4", "mistral-large-4", "command-a-plus",
    "gemma4-experts-untied", "aria", "ernie4-5-vl", "longcat-flash", "kolibri1", "flint", "laguna", "deepseek-v32",
    "step3p7", "muse-spark", "jetmoe", "mimo-v2-flash", "nemotron-h-experts-groups",
    "nemotron-h-latent-experts-first-biases", "minimax-m3", "hy4-low-limit", "dots3-note", "deepseek-v4",
)  # fmt: skip
PROMPTS = [make_prompt(length, seed=3) for length in (17, 50)]
SHORT_PROMPTS = [prompt[:20] for prompt in PROMPTS]  # for kernels in the interpreter


def tokens(engine: Any, prompts: list[list[int]] = PROMPTS, length: int = 8) -> list[list[int]]:
    transcript = generate(engine, [make_request(id, prompt, length) for id, prompt in enumerate(prompts)])
    assert_idle(engine)
    return [transcript.tokens[id, 0] for id in range(len(prompts))]


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_experts(tiny_model: MakeModel, divided: MakeEngine, name: str) -> None:
    family, overrides = SHAPES[name]
    folder = tiny_model(family, **overrides)
    for ranks in (2, 4) if ALL_RANKS else (4 if name == "qwen3-moe" else 2,):
        engine = divided(folder, ranks, expert_parallel=True, max_num_batched_tokens=40)
        for prompt, output in zip(PROMPTS, tokens(engine), strict=True):
            assert len(output) == 8
            assert is_greedy(folder, prompt, output)


def test_kv_goes_from_ranks_with_unequal_parts_to_one_rank(tiny_model: MakeModel, divided: MakeEngine) -> None:
    folder = tiny_model("qwen3_moe", num_experts=3)
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, "num_blocks": 256, "block_size": 8}
    pair = Pair(divided(folder, 2, expert_parallel=True, **settings), divided(folder, 1, **settings), seed=1)
    for id, prompt in enumerate(PROMPTS):
        pair.add(make_request(id, prompt, 12))
    transcript = pair.run()
    for id, prompt in enumerate(PROMPTS):
        assert is_greedy(folder, prompt, transcript.tokens[id, 0])
    assert pair.prefill.fingerprint_facts() == pair.decode.fingerprint_facts()


def packed(_: str, weight: torch.Tensor) -> Tensors:
    groups = torch.arange(weight.shape[1]) // 32
    return {name: tensor for name, tensor in packed_int4(weight, 32, groups).items() if name != "weight_g_idx"}


def quantized(format: str, tiny_model: MakeModel, tmp_path: Path) -> tuple[Path, Path | None]:
    """Return a model with quantized experts, and one with the numbers that the codes stand for; None where products
    round their inputs. Two ranks could not have a half of each expert, as groups and tiles do not end there."""
    if format == "mxfp4":
        return with_mxfp4_experts(tiny_model("gpt_oss", intermediate_size=96), tmp_path)
    base = tiny_model("qwen3_moe", hidden_size=64, head_dim=32, moe_intermediate_size=96)
    if format == "compressed-tensors":
        groups = {"group_0": {**scheme("int4 weights"), "format": "pack-quantized"}}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        config["ignore"] = ["lm_head", r"re:.*mlp\.gate$"]
        return rewrite(base, tmp_path / "model", config, packed)
    config = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]}
    return rewrite(base, tmp_path / "model", config, lambda _, w: fp8(w, (32, 32), "weight_scale_inv"))[0], None


@pytest.mark.parametrize("format", ["mxfp4", "compressed-tensors", "fp8 tiles"])
@pytest.mark.parametrize("device", ["cpu", "as on a GPU"])
def test_quantized_experts(
    tiny_model: MakeModel,
    divided: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    device: str,
) -> None:
    folder, plain = quantized(format, tiny_model, tmp_path)
    if device == "cpu":
        prompts = PROMPTS
        outputs = tokens(divided(folder, 2, expert_parallel=True))
    else:
        prompts = SHORT_PROMPTS
        two_threads(monkeypatch)
        outputs = tokens(make_engine(folder, tensor_parallel=2, expert_parallel=True), prompts, 5)
    if plain is not None:
        assert all(is_greedy(plain, prompt, output) for prompt, output in zip(prompts, outputs, strict=True))
    else:
        monkeypatch.undo()
        # Attention is divided, too. Where sums are added up in another order, a number may get another code.
        alone = tokens(make_engine(folder), prompts)
        assert [output[:4] for output in outputs] == [output[:4] for output in alone]


class _OneOfTwo(OneRank):
    count = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def takes(folder: Path, rank: int) -> list[Take]:
    """Return what one of two ranks reads of a model."""
    with Weights(folder, torch.float32, torch.device("cpu")) as weights:
        weights.whole = False
        policy = read_quantization(folder).policy
        build = build_of(load_model_config(folder), 64, policy, _OneOfTwo(rank), expert_parallel=True)
        return planned_takes(build, weights.dtype, weights)


def test_a_rank_reads_its_own_experts_alone(tiny_model: MakeModel, tmp_path: Path) -> None:
    for rank, own in enumerate([range(3), range(3, 6)]):
        names = [
            take.name.split(".experts.")[1] for take in takes(tiny_model("qwen3_moe"), rank) if ".experts." in take.name
        ]
        assert {int(name.partition(".")[0]) for name in names} == set(own)
        folder, _ = with_mxfp4_experts(tiny_model("gpt_oss", intermediate_size=96), tmp_path / str(rank))
        packed = [take for take in takes(folder, rank) if ".experts." in take.name]
        assert packed
        for take in packed:
            assert take.part is not None
            assert range(*take.part[0].indices(take.shape[0])) == own


def test_experts_of_other_ranks_are_no_unused_tensors(tiny_model: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model("qwen3_moe")
    build = build_of(load_model_config(folder), 64, ranks=_OneOfTwo(0), expert_parallel=True)
    last = []
    progress = lambda _, done, total: last.append(done / total)  # noqa: E731
    with caplog.at_level(logging.WARNING), Weights(folder, torch.float32, torch.device("cpu"), progress) as weights:
        build(weights, TORCH)
    assert not caplog.records
    assert last[-1] == 1


@pytest.mark.parametrize(("experts", "ranks"), [(128, 8), (3, 2), (60, 8), (7, 7)])
def test_ranks_have_as_many_experts_as_the_others(experts: int, ranks: int) -> None:
    parts = [own_experts(experts, RankNumber(rank, ranks)) for rank in range(ranks)]
    assert [number for part in parts for number in part] == list(range(experts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("family", "ranks", "message"),
    [
        ("llama", 2, "cannot divide the 0 experts of a layer among 2 ranks"),
        ("mixtral", 1, "--expert-parallel divides experts among the ranks of --tensor-parallel, which is 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tiny_model: MakeModel, divided: MakeEngine, family: str, ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        divided(tiny_model(family), ranks, expert_parallel=True)
