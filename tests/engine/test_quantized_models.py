"""Whole models in quantized formats give the tokens that transformers gives."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config import ConfigError
from baton_engine.fingerprint import layout_fingerprint
from baton_engine.quantization.registry import read_quantization
from baton_engine.source import Source
from tests.conftest import MakeModel
from tests.models import reference_choices, reference_logits
from tests.packing import awq, fp8, gptq, mxfp4, nvfp4
from tests.quantized import compress, rewrite

from .fake_cuda import pretend
from .harness import generate, make_engine, make_prompt, make_request
from .pools import MakeEngine

EIGHT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {**EIGHT, "type": "float"}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {**TOKEN, "strategy": "tensor", "dynamic": False}
# Weights and activations of compressed-tensors' schemes.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "fp8": (FP8, {**TOKEN, "type": "float"}),
    "fp8, static": ({**FP8, "strategy": "tensor"}, {**STATIC, "type": "float"}),
    "fp8, tiles": (
        {**FP8, "strategy": "block", "block_structure": [128, 128]},
        {**TOKEN, "type": "float", "strategy": "group", "group_size": 128},
    ),
    "int8": (EIGHT, TOKEN),
    "int8, with zeros": (EIGHT, {**TOKEN, "symmetric": False}),
    "int8, static": ({**EIGHT, "strategy": "tensor"}, STATIC),
    "int8, static with zeros": (EIGHT, {**STATIC, "symmetric": False}),
    "fp8 weights": (FP8, None),
    "int4 weights": ({**EIGHT, "num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "int4 weights with zeros": (
        {**EIGHT, "num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 64},
        None,
    ),
    "int8 weights with zeros": ({**EIGHT, "symmetric": False}, None),
    "mxfp4 weights": (
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8",
         "zp_dtype": "torch.uint8"},
        None,
    ),
    "mxfp8 weights": (
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8",
         "zp_dtype": "torch.uint8"},
        None,
    ),
    "nvfp4 weights": (
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
         "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
        None,
    ),
}  # fmt: skip
# Those that are run as on a GPU, too.
ON_GPU = (
    "fp8, tiles", "int8, with zeros", "int8, static with zeros", "int4 weights with zeros", "mxfp8 weights",
    "nvfp4 weights",
)  # fmt: skip
PROMPTS = [make_prompt(length) for length in (20, 37)]


# The layer of transformers that computes with ternary weights, and whether it rounds the weights itself.
TERNARY = [("autobitlinear", "offline"), ("bitlinear", "offline"), ("autobitlinear", "online")]


@pytest.fixture(scope="session")
def base(tiny_model: MakeModel) -> Path:
    return tiny_model("llama", hidden_size=128, intermediate_size=256)


def scheme(name: str) -> dict[str, Any]:
    weights, activations = SCHEMES[name]
    return {"targets": ["Linear"], "weights": weights, **({"input_activations": activations} if activations else {})}


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    requests = [make_request(id, prompt, 12) for id, prompt in enumerate(PROMPTS)]
    transcript = generate(make_engine(folder, **settings), requests)
    return [transcript.tokens[id, 0] for id in range(len(PROMPTS))]


def assert_tokens_of(reference: Path, outputs: list[list[int]]) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == reference_choices(reference, prompt, output)


def behind(reference: Path, outputs: list[list[int]]) -> torch.Tensor:
    """Return how far each token is behind the one that transformers finds best, in standard deviations of logits."""
    logits = torch.cat([reference_logits(reference, *pair) for pair in zip(PROMPTS, outputs, strict=True)])
    chosen = torch.tensor([token for output in outputs for token in output])
    return (logits.amax(dim=1) - logits.gather(1, chosen[:, None])[:, 0]) / logits.std(dim=1)


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plain = compress(base, tmp_path / "model", {"group_0": scheme(name)}, ["lm_head"])
    outputs = tokens(folder)
    if SCHEMES[name][1]:
        # transformers rounds activations, too. Where sums are added up in another order, one may get another code.
        assert behind(folder, outputs).max() < 0.05
    else:
        # transformers cannot read packed zeros itself.
        assert_tokens_of(plain, outputs)
    if name in ON_GPU:
        pretend(monkeypatch)
        assert behind(folder if SCHEMES[name][1] else plain, tokens(folder)).max() < 0.05


def test_groups_of_modules_and_ignored_ones(base: Path, tmp_path: Path) -> None:
    names = r"re:.*self_attn\.(q|k|v)_proj$", "model.layers.0.mlp.down_proj"
    groups = {
        "group_0": scheme("int8"),
        "group_1": {**scheme("int4 weights"), "targets": list(names), "format": "pack-quantized"},
    }
    folder, _ = compress(base, tmp_path / "model", groups, ["lm_head", r"re:.*layers\.1\.mlp\..*"])
    stored = load_file(folder / "model.safetensors")
    for name, field, dtype in (
        ("layers.0.self_attn.q_proj", "weight_packed", torch.int32),
        ("layers.0.mlp.down_proj", "weight_packed", torch.int32),
        ("layers.1.self_attn.o_proj", "weight", torch.int8),
        ("layers.1.mlp.down_proj", "weight", torch.float32),
    ):
        assert stored[f"model.{name}.{field}"].dtype == dtype
    assert_tokens_of(folder, tokens(folder))


@pytest.mark.parametrize(
    ("architecture", "place"),
    [("Mistral3ForConditionalGeneration", "text_config"), ("InternVLChatModel", "llm_config")],
)
def test_the_text_part_of_a_larger_model(base: Path, tmp_path: Path, architecture: str, place: str) -> None:
    alone, _ = compress(base, tmp_path / "alone", {"group_0": scheme("int4 weights")}, ["lm_head"])
    larger = tmp_path / "larger"
    larger.mkdir()
    fields = json.loads((alone / "config.json").read_text())
    whole = {"architectures": [architecture], place: fields}
    (larger / "config.json").write_text(json.dumps(whole))
    tensors = load_file(alone / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, larger / "model.safetensors")
    assert read_quantization(larger).name == "compressed-tensors"
    assert tokens(larger) == tokens(alone)


@pytest.mark.parametrize("format", ["gptq", "awq"])
@pytest.mark.parametrize("older_file", [False, True], ids=["config.json", "older file"])
def test_gptq_and_awq(format: str, older_file: bool, base: Path, tmp_path: Path) -> None:
    if format == "gptq":
        order = torch.arange(256)[torch.randperm(256, generator=torch.Generator().manual_seed(0))] // 64
        config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
        folder, plain = rewrite(base, tmp_path / "model", config, lambda _, w: gptq(
            w, 4, 64, 1, order if w.shape[1] == 256 else None))  # fmt: skip
    else:
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
        folder, plain = rewrite(base, tmp_path / "model", config, lambda _, w: awq(w, 32))
    if older_file:
        fields = json.loads((folder / "config.json").read_text())
        del fields["quantization_config"]
        (folder / "config.json").write_text(json.dumps(fields))
        older = {"bits": 4, "group_size": 64} if format == "gptq" else {"w_bit": 4, "q_group_size": 32}
        name = "quantize_config.json" if format == "gptq" else "quant_config.json"
        (folder / name).write_text(json.dumps({**older, "version": "GEMM"}))
    assert_tokens_of(plain, tokens(folder))


def test_awq_is_read_as_compressed_tensors_converts_it(base: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    packed = awq(torch.randn(40, 64), 32)
    numbers = packed.pop("numbers")
    converter = AutoAWQConverter(group_size=32)
    weight, scales, zeros = converter._convert_gemm_module(packed["qweight"], packed["scales"], packed["qzeros"])
    expected = (weight.float() - zeros.float().repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(expected, numbers)


@pytest.mark.parametrize("own_file", [False, True], ids=["config.json", "own file"])
def test_model_optimizer(own_file: bool, base: Path, tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.self_attn*"]}
    folder, plain = rewrite(base, tmp_path / "model", config, lambda name, w: (
        {"weight": w, "numbers": w} if "layers.0.self_attn" in name else nvfp4(w)))  # fmt: skip
    if own_file:
        fields = json.loads((folder / "config.json").read_text())
        del fields["quantization_config"]
        (folder / "config.json").write_text(json.dumps(fields))
        of_tool = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": config["ignore"]}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": of_tool}))
    assert read_quantization(folder).name == "modelopt"
    assert_tokens_of(plain, tokens(folder))


@pytest.mark.parametrize(("layer", "mode"), TERNARY)
def test_bitnet(
    layer: str, mode: str, tiny_model: MakeModel, divided: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As microsoft/bitnet-b1.58-2B-4T, Llama3-8B-1.58, and BitNet's weights from training are published."""
    base = tiny_model("bitnet", tie_word_embeddings=True, intermediate_size=128)

    def pack(_: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().mean()
        codes = (weight / scale).round().clamp(-1, 1)
        quarters = (codes + 1).to(torch.uint8).view(4, -1, weight.shape[1])
        packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
        stored = 1 / scale if layer == "bitlinear" else scale
        return {"weight": packed, "weight_scale": stored.view(1), "numbers": codes * scale}

    def keep(_: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": weight, "numbers": weight}

    config = {"quant_method": "bitnet", "linear_class": layer, "quantization_mode": mode}
    folder, _ = rewrite(base, tmp_path / "model", config, pack if mode == "offline" else keep)
    # transformers wants a package that it does not use here, and compiles a function for each shape.
    monkeypatch.setattr("transformers.quantizers.quantizer_bitnet.is_accelerate_available", lambda: True)
    with torch.compiler.set_stance("force_eager"):
        assert behind(folder, tokens(folder)).max() < 0.05
        # Ranks round parts of a row.
        transcript = generate(divided(folder, 2), [make_request(id, prompt, 12) for id, prompt in enumerate(PROMPTS)])
        assert behind(folder, [transcript.tokens[id, 0] for id in range(len(PROMPTS))]).mean() < 0.5
        pretend(monkeypatch)
        assert behind(folder, tokens(folder)).max() < 0.05


def test_biases_of_packed_bitnet_are_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    base = tiny_model("bitnet", attention_bias=True)

    def pack(_: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        packed = torch.zeros(len(weight) // 4, weight.shape[1], dtype=torch.uint8)
        return {"weight": packed, "weight_scale": torch.ones(1), "numbers": weight}

    config = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    folder, _ = rewrite(base, tmp_path / "model", config, pack)
    with pytest.raises(ConfigError, match="o_proj has a bias, which is not served for packed weights"):
        make_engine(folder)


def test_activations_of_four_bits_keep_theirs(base: Path, tmp_path: Path) -> None:
    group = scheme("nvfp4 weights")
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    folder, plain = compress(base, tmp_path / "model", {"group_0": group}, ["lm_head"])
    assert_tokens_of(plain, tokens(folder))


SPARSE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_latent_size": 32,
        "moe_shared_expert_intermediate_size": 64,
    },
}


@pytest.fixture(scope="session", params=SPARSE)
def sparse(request: pytest.FixtureRequest, tiny_model: MakeModel) -> Path:
    return tiny_model(request.param, hidden_size=64, moe_intermediate_size=96, **SPARSE[request.param])


def with_static_scale(name: str, weight: torch.Tensor, apart: bool = False) -> dict[str, torch.Tensor]:
    """Return a weight in FP8. Each expert's activations have a scale of their own; apart: those of ups have another."""
    number = int("".join(filter(str.isdigit, name.rpartition("experts.")[2])) or 0)
    scale = (0.2 + 0.05 * number) * (2 if apart and name.endswith("up_proj") else 1)
    return {**fp8(weight, None, "weight_scale"), "input_scale": torch.tensor(scale)}


def test_scales_of_activations_in_an_expert(tiny_model: MakeModel, tmp_path: Path) -> None:
    base, config = tiny_model("qwen3_moe"), {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    folder, _ = rewrite(base, tmp_path / "model", config, with_static_scale)
    tensors = load_file(folder / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("experts.1.down_proj.input_scale")}
    assert scales
    save_file({**tensors, **{name: 40 * tensor for name, tensor in scales.items()}}, folder / "model.safetensors")
    coarse = tokens(folder)
    save_file(tensors, folder / "model.safetensors")
    assert coarse != tokens(folder)
    folder, _ = rewrite(base, tmp_path / "apart", config, lambda name, weight: with_static_scale(name, weight, True))
    with pytest.raises(ConfigError, match=r"gate_proj and the ups of its expert have different scales of activations"):
        make_engine(folder)


@pytest.mark.parametrize("format", ["gptq", "fp8", "fp8, static", "nvfp4"])
def test_experts(format: str, sparse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if format == "gptq":
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        folder, plain = rewrite(sparse, tmp_path / "model", config, lambda _, w: gptq(w, 4, 32, 1))
    elif format == "nvfp4":
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        folder, plain = rewrite(sparse, tmp_path / "model", config, lambda _, w: nvfp4(w))
    elif format == "fp8":
        config = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]}
        tiles = (32, 32)
        folder, plain = rewrite(sparse, tmp_path / "model", config, lambda _, w: fp8(w, tiles, "weight_scale_inv"))
    else:
        config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
        folder, plain = rewrite(sparse, tmp_path / "model", config, with_static_scale)
    outputs = tokens(folder)
    if not format.startswith("fp8"):
        assert_tokens_of(plain, outputs)
    else:
        # The reference does not round activations, which can change the choice of experts.
        assert behind(plain, outputs).mean() < 0.5
    pretend(monkeypatch)
    assert tokens(folder) == outputs


# Models whose weights are not multiplied as they are stored, with the fields of their tiny model.
REARRANGED: dict[str, dict[str, Any]] = {
    # Keys and values are products of latents with numbers, so their weight leaves its codes when it is loaded.
    "deepseek_v3": {
        "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "v_head_dim": 16, "kv_lora_rank": 32,
        "q_lora_rank": 64,
    },
    # One weight holds the queries of attention and its gates, and another one all that a layer with a state reads.
    "qwen3_next": {
        "mlp_only_layers": [0, 1, 2, 3], "head_dim": 32, "linear_num_key_heads": 4, "linear_value_head_dim": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("format", ["gptq", "fp8"])
@pytest.mark.parametrize("family", REARRANGED)
def test_rearranged_weights(
    family: str, format: str, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_model(family, **REARRANGED[family])
    if format == "gptq":
        config: dict[str, Any] = {"quant_method": "gptq", "bits": 8, "group_size": 32}
        folder, plain = rewrite(base, tmp_path / "model", config, lambda _, w: gptq(w, 8, 32, 1))
    else:
        config = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]}
        folder, plain = rewrite(base, tmp_path / "model", config, lambda _, w: fp8(w, (32, 32), "weight_scale_inv"))
    outputs = tokens(folder)
    if format == "gptq":
        assert_tokens_of(plain, outputs)
    else:
        assert behind(plain, outputs).mean() < 0.5
    pretend(monkeypatch)
    assert tokens(folder) == outputs


def with_mxfp4_experts(base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a gpt-oss with its experts in MXFP4, and one with the numbers that these codes stand for."""
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    plain = Path(shutil.copytree(base, tmp_path / "plain"))
    coded = load_file(base / "model.safetensors")
    numbers = dict(coded)
    for name, tensor in numbers.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed = mxfp4(tensor.transpose(1, 2))
            numbers[name] = packed.pop("numbers").transpose(1, 2).contiguous()
            del coded[name]
            coded |= {f"{name}_{field}": packed[field] for field in packed}
    save_file(coded, folder / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, plain


def test_experts_of_gpt_oss(tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plain = with_mxfp4_experts(tiny_model("gpt_oss", intermediate_size=96), tmp_path)
    outputs = tokens(folder)
    assert_tokens_of(plain, outputs)
    pretend(monkeypatch)
    assert tokens(folder) == outputs


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_experts_on_load(kind: str, sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = tokens(sparse, quantization=kind)
    assert behind(sparse, outputs).mean() < (1.0 if kind == "int4" else 0.5)
    pretend(monkeypatch)
    assert tokens(sparse, quantization=kind) == outputs


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_on_load(kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing moves logits only a little, and a GPU, which keeps the codes, computes the same as a CPU."""
    outputs = tokens(base, quantization=kind)
    assert behind(base, outputs).mean() < (0.5 if kind == "int4" else 0.1)
    pretend(monkeypatch)
    assert tokens(base, quantization=kind) == outputs


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_on_load_from_other_layouts(family: str, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 stores weights as [inputs, outputs], and BLOOM queries, keys and values in turn."""
    folder = tiny_model(family)
    outputs = tokens(folder, quantization="int8")
    assert behind(folder, outputs).mean() < 0.1
    pretend(monkeypatch)
    assert tokens(folder, quantization="int8") == outputs


def test_weights_are_quantized_one_after_another(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the weights that are quantized on load, one at a time is in memory in 32 bits."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    take = Source.take

    def note(source: Source, name: str, *rest: Any, **named: Any) -> torch.Tensor:
        nonlocal most
        tensor = take(source, name, *rest, **named)
        if name.endswith("_proj.weight"):
            alive.add(tensor)
            most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(Source, "take", note)
    pretend(monkeypatch)
    make_engine(base, quantization="int4")
    assert most == 1
    assert not alive


def test_weights_are_taken_in_one_order(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights can be read ahead, whether they stay in their codes or not."""
    taken: list[str] = []
    take = Source.take

    def note(source: Source, name: str, *rest: Any, **named: Any) -> torch.Tensor:
        taken.append(source.full_name(name))
        return take(source, name, *rest, **named)

    monkeypatch.setattr(Source, "take", note)
    make_engine(sparse, quantization="int8")
    expected, taken[:] = list(taken), []
    pretend(monkeypatch)
    make_engine(sparse, quantization="int8")
    assert len(taken) > 40
    assert taken == expected


def test_engines_with_other_weights_do_not_share_kv(base: Path) -> None:
    layouts = [make_engine(base, quantization=kind).fingerprint_facts() for kind in ("auto", "fp8", "int8")]
    assert len({layout_fingerprint(layout, base) for layout in layouts}) == 3


def test_a_quantization_of_quantized_weights_is_refused(base: Path, tmp_path: Path) -> None:
    folder, _ = rewrite(base, tmp_path / "m", {"quant_method": "awq", "group_size": 32}, lambda _, w: awq(w, 32))
    with pytest.raises(ConfigError, match=r"--quantization fp8 is for .* quantized already \(awq\)"):
        make_engine(folder, quantization="fp8")
    with pytest.raises(ConfigError, match=r"--quantization 'int2' is unknown; use auto, fp8, int8, int4"):
        make_engine(folder, quantization="int2")


def test_the_size_of_quantized_weights_is_known_beforehand(base: Path, tmp_path: Path) -> None:
    from baton_engine.loading import weights_bytes

    folder, _ = compress(base, tmp_path / "model", {"group_0": scheme("int4 weights")}, ["lm_head"])
    dense = sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())
    quantization = read_quantization(folder)
    on_cpu = weights_bytes(folder, quantization.sizes(torch.float32, torch.device("cpu")))
    assert on_cpu == pytest.approx(4 * dense, rel=0.05)
    held = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert weights_bytes(folder, quantization.sizes(torch.float32, torch.device("cuda"))) == pytest.approx(
        held, rel=0.02
    )
