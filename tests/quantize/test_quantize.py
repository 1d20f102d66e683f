"""Models that `baton model quantize` writes, read by transformers with compressed-tensors, and by Baton's engine."""

import json
import math
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from typer.testing import CliRunner

from baton_cli.errors import UserError
from baton_cli.model import app
from baton_demo import MODEL_DIR
from baton_demo.batches import IGNORED, Row, encode
from baton_demo.corpus import Corpus
from baton_demo.samples import Sampler
from baton_engine.config import ConfigError
from baton_engine.loading import Weights
from baton_engine.models.registry import load_model_config
from baton_quantize import formats
from baton_quantize.codes import four_bit_codes, four_bit_scales
from baton_quantize.formats import FORMATS, LayerJob
from baton_quantize.job import REPORT
from baton_quantize.report import Report
from baton_quantize.settings import Settings
from baton_quantize.text import read_texts
from baton_tokenizer.load import load_tokenizer
from tests.conftest import MakeModel
from tests.engine.harness import generate, make_engine, make_request
from tests.models import reference_logits, reference_model

from .conftest import quantize

Made = dict[str, tuple[Path, Report]]


def round_to_nearest(job: LayerJob) -> None:
    """What compressed-tensors does without calibration."""
    for site in job.sites:
        weight = torch.cat([job.layer[f"{name}.weight"] for name in site.names])
        scales = four_bit_scales(weight, job.group, job.stored)
        formats._put_four_bit(job, site, four_bit_codes(weight, scales), scales)


@pytest.fixture(scope="module")
def made(conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The demo model and its report in each format, and in INT4 with nearest codes."""
    folder = tmp_path_factory.mktemp("made")
    nearest = msgspec.structs.replace(FORMATS["int4-gptq"], quantize=round_to_nearest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "nearest", nearest)
        return {name: (folder / name, quantize(MODEL_DIR, folder / name, name, conversations)) for name in FORMATS}


def evaluated(folder: Path, text: Path, **settings: Any) -> list[torch.Tensor]:
    """Return the sequences on which `quantize` evaluates a model."""
    fields: dict[str, Any] = {"calibrate": text, "samples": 24, "length": 128, "format": "int4-gptq", **settings}
    calibrated = FORMATS[fields["format"]].calibrated
    one = Settings(source=folder, destination=folder, **fields)
    return read_texts(one, calibrated, load_model_config(folder).vocab_size).evaluation


def reference_perplexity(folder: Path, windows: list[torch.Tensor]) -> float:
    """Return what transformers finds."""
    return perplexity_of(reference_model(folder), windows)


def perplexity_of(model: Any, windows: list[torch.Tensor]) -> float:
    losses = []
    with torch.inference_mode():
        for window in windows:
            scores = model(window[None]).logits[0, :-1].double()
            losses.append(functional.cross_entropy(scores, window[1:], reduction="none"))
    return math.exp(torch.cat(losses).mean())


def answers() -> list[Row]:
    """Return conversations in which the answers are labelled, other ones than in the calibration text."""
    sampler, tokenizer = Sampler(Corpus.load(), 2), load_tokenizer(MODEL_DIR)
    samples = [sampler.sample() for _ in range(60)]
    return [encode(sample, tokenizer, [0] * len(sample)) for sample in samples]


def answer_perplexity(folder: Path, rows: list[Row]) -> float:
    """Return the perplexity of the labelled tokens, as transformers finds it."""
    model, losses = reference_model(folder), []
    with torch.inference_mode():
        for row in rows:
            scores = model(torch.tensor([row.ids[:1024]])).logits[0, :-1].double()
            labels = torch.tensor(row.labels[1:1024])
            losses.append(
                functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="none")[labels != IGNORED]
            )
    return math.exp(torch.cat(losses).mean())


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_finds_the_reported_perplexity(name: str, made: Made, conversations: Path) -> None:
    folder, report = made[name]
    windows = evaluated(MODEL_DIR, conversations, format=name)
    assert report.evaluated_tokens == sum(len(window) - 1 for window in windows) > 500
    assert report.before.perplexity == pytest.approx(reference_perplexity(MODEL_DIR, windows), rel=1e-4)
    # Where activations are rounded, too, sums in another order may give one another code.
    rel = 1e-2 if FORMATS[name].activations else 1e-4
    assert report.after.perplexity == pytest.approx(reference_perplexity(folder, windows), rel=rel)


@pytest.mark.parametrize("name", FORMATS)
def test_the_engine_serves_what_transformers_reads(name: str, made: Made, conversations: Path) -> None:
    folder, _ = made[name]
    prompt = evaluated(MODEL_DIR, conversations)[0][:40].tolist()
    output = generate(make_engine(folder, max_model_len=512), [make_request(0, prompt, 12)]).tokens[0, 0]
    logits = reference_logits(folder, prompt, output)
    behind = logits.amax(dim=1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (behind / logits.std(dim=1)).max() < (0.05 if FORMATS[name].activations else 1e-4)


def test_calibration_is_no_worse_than_nearest_codes(made: Made) -> None:
    """The demo model has learned the answers of conversations, and can only guess the questions."""
    rows = answers()
    perplexity = {name: answer_perplexity(folder, rows) for name, (folder, _) in made.items()}
    divergence = {name: report.divergence or math.inf for name, (_, report) in made.items()}
    for name in ("int4-awq", "int4-gptq"):
        assert perplexity[name] <= perplexity["nearest"]
        assert divergence[name] < 0.9 * divergence["nearest"]
        assert (made[name][1].agreement or 0) > (made["nearest"][1].agreement or 1)
    before = answer_perplexity(MODEL_DIR, rows)
    for name in ("fp8", "int8"):
        assert perplexity[name] < 1.01 * before
        assert divergence[name] < 0.5 * divergence["int4-gptq"]
        assert (made[name][1].agreement or 0) > 0.96


def test_the_report_counts_bytes(made: Made) -> None:
    folder, report = made["int8"]
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    original = load_file(MODEL_DIR / "model.safetensors")
    sizes = [sum(tensor.nbytes for part in parts for tensor in part.values()) for parts in ([original], shards)]
    assert [report.before.bytes, report.after.bytes] == sizes
    # The demo model's embedding is also its head.
    assert report.fewer_bytes == pytest.approx(sizes[0] / sizes[1])
    assert json.loads((folder / REPORT).read_bytes())["after"]["bytes"] == sizes[1]
    table = report.table()
    assert f"{report.before.perplexity:.4f}" in table
    assert "was not measured" in table


def test_the_folder_is_a_model_with_its_tokenizer_and_template(made: Made) -> None:
    folder, _ = made["int4-gptq"]
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja", REPORT}
    assert not [name for name in names if name.startswith(".")]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert set(index["weight_map"]) == set(stored)
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert stored["model.layers.0.mlp.up_proj.weight_packed"].shape == (512, 192 // 8)
    assert stored["model.layers.0.mlp.up_proj.weight_scale"].shape == (512, 192 // 64)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"])
def test_families(family: str, tiny_model: MakeModel, conversations: Path, tmp_path: Path) -> None:
    """AWQ scales move through norms, values and ups, fused or not, with biases and with shared KV heads."""
    more: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    source = tiny_model(family, tie_word_embeddings=False, pad_token_id=None, **more)
    settings = {"samples": 4, "length": 64}
    report = quantize(source, tmp_path / "to", "int4-awq", conversations, **settings)
    windows = evaluated(source, conversations, **settings)
    assert report.group_size == 32
    assert report.before.perplexity == pytest.approx(reference_perplexity(source, windows), rel=1e-3)
    assert report.after.perplexity == pytest.approx(reference_perplexity(tmp_path / "to", windows), rel=1e-3)


@pytest.mark.parametrize(
    ("family", "format"), [("mixtral", "int4-gptq"), ("qwen2_moe", "int4-awq"), ("qwen3_moe", "int4-awq")]
)
def test_experts(family: str, format: str, tiny_model: MakeModel, conversations: Path, tmp_path: Path) -> None:
    sizes: dict[str, int] = {} if family == "mixtral" else {"moe_intermediate_size": 96}
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 64
    source = tiny_model(family, **sizes)
    settings = {"samples": 8, "length": 64}
    report = quantize(source, tmp_path / "to", format, conversations, **settings)
    windows = evaluated(source, conversations, **settings)
    assert report.before.perplexity == pytest.approx(reference_perplexity(source, windows), rel=1e-3)
    # transformers reads the codes of experts in this way only.
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "to", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert report.after.perplexity == pytest.approx(perplexity_of(model.eval(), windows), rel=1e-3)
    ignored = json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]["ignore"]
    router = "block_sparse_moe.gate" if family == "mixtral" else "mlp.gate"
    assert {"lm_head", f"model.layers.1.{router}"} <= set(ignored)
    assert not [name for name in ignored if "experts." in name]


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_folds_change_no_output(
    family: str, tiny_model: MakeModel, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales drawn at random and weights that stay numbers, transformers computes the same as before."""
    more: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    source = tiny_model(family, tie_word_embeddings=False, pad_token_id=None, **more)
    random = torch.Generator().manual_seed(0)

    def drawn(weight: torch.Tensor, hessian: Any, inputs: Any, group: Any, stored: Any, share: Any) -> torch.Tensor:
        scales: torch.Tensor = share(torch.rand(weight.shape[1], generator=random) + 0.5)
        return scales

    folded: dict[str, torch.Tensor] = {}

    def keep(job: LayerJob, site: Any, codes: Any, scales: Any) -> None:
        for name in site.names:
            folded[f"{name}.weight"] = job.layer[f"{name}.weight"].clone()
        kept(job, site, codes, scales)

    kept = formats._put_four_bit
    monkeypatch.setattr(formats, "search_scales", drawn)
    monkeypatch.setattr(formats, "_put_four_bit", keep)
    quantize(source, tmp_path / "to", "int4-awq", conversations, samples=2, length=32)
    written = {
        name: tensor for path in (tmp_path / "to").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    model = reference_model(source)
    expected = model(torch.arange(40)[None]).logits
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = {name: folded.get(name, written.get(name, tensor)) for name, tensor in before.items()}
    norms = [name for name in before if "layernorm" in name]
    assert not [name for name in [*folded, *norms] if torch.equal(changed[name], before[name])]
    try:
        model.load_state_dict(changed)
        torch.testing.assert_close(model(torch.arange(40)[None]).logits, expected, rtol=1e-3, atol=1e-3)
    finally:
        model.load_state_dict(before)


def test_the_command_prints_no_traceback(conversations: Path, tmp_path: Path) -> None:
    for arguments, problem in (
        ([str(MODEL_DIR), str(tmp_path / "to"), "--format", "int4-awq"], "needs --calibrate FILE"),
        ([str(MODEL_DIR), str(tmp_path), "--format", "int8", "--evaluate", str(conversations)], None),
        ([str(MODEL_DIR), str(MODEL_DIR), "--format", "int8"], "name a new folder"),
        ([str(tmp_path / "none"), str(tmp_path / "to"), "--format", "int8"], "there is no folder"),
    ):
        result = CliRunner().invoke(
            app, ["quantize", *arguments, "--length", "64", "--samples", "4", "--device", "cpu"]
        )
        if problem is None:
            assert result.exit_code == 0
            assert "perplexity" in result.stdout
        else:
            assert isinstance(result.exception, UserError)
            assert problem in str(result.exception)


def test_one_layer_is_in_memory_at_a_time(
    tiny_model: MakeModel, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: dict[int, weakref.WeakSet[torch.Tensor]] = {}
    take, most, taken = Weights.take, 0, 0

    def note(weights: Weights, name: str, *rest: Any) -> torch.Tensor:
        nonlocal most, taken
        tensor = take(weights, name, *rest)
        if name.startswith("model.layers."):
            alive.setdefault(int(name.split(".")[2]), weakref.WeakSet()).add(tensor)
            most, taken = max(most, sum(map(bool, alive.values()))), taken + 1
        return tensor

    monkeypatch.setattr(Weights, "take", note)
    # In float32 a CPU keeps weights in another layout, in tensors that are not seen here.
    settings = {"samples": 2, "length": 32, "dtype": "bfloat16"}
    quantize(tiny_model("llama", num_hidden_layers=4), tmp_path / "to", "int4-gptq", conversations, **settings)
    assert taken > 4 * 20
    assert most == 1
    assert not any(alive.values())


def test_what_cannot_be_quantized_is_named(
    tiny_model: MakeModel, conversations: Path, made: Made, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    with pytest.raises(
        ConfigError, match="GPT2LMHeadModel cannot be quantized offline; Baton quantizes LlamaForCausalLM, "
    ):
        quantize(tiny_model("gpt2"), to, "int8", conversations)
    with pytest.raises(ConfigError, match=r"quantized already \(compressed-tensors\)"):
        quantize(made["int8"][0], to, "int8", conversations)
    with pytest.raises(ConfigError, match="--format 'int3' is unknown; use fp8, int8, int4-awq, int4-gptq"):
        quantize(MODEL_DIR, to, "int3", conversations)
    with pytest.raises(ConfigError, match="has 192 inputs, which are not groups of 128"):
        quantize(MODEL_DIR, to, "int4-awq", conversations, group_size=128)
    with pytest.raises(ConfigError, match="--length 9000 is more than the 8192 positions"):
        quantize(MODEL_DIR, to, "int4-awq", conversations, length=9000)
    assert not to.exists()
