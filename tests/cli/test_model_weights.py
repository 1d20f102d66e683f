"""What is known of weights that are not here: on a double of the hub, or with a config.json alone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from baton_cli.errors import UserError
from baton_cli.model import app
from baton_cli.model_facts import Served, model_facts
from tests.cli.test_model_facts import edit
from tests.conftest import MakeModel
from tests.hub.conftest import use
from tests.hub.double import COMMIT, REPO, HubDouble
from tests.packing import fp8
from tests.quantized import rewrite

INDEX, SHARDS = "model.safetensors.index.json", ("model-1.safetensors", "model-2.safetensors")
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}


@pytest.fixture
def folder(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A model in FP8, in two files."""
    base = tiny_model("llama", hidden_size=128, intermediate_size=256)
    folder, _ = rewrite(base, tmp_path / "model", FP8, lambda _, w: fp8(w, (32, 32), "weight_scale_inv"))
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    for number, shard in enumerate(SHARDS):
        save_file(dict(tensors[number::2]), folder / shard)
    places = {name: SHARDS[number % 2] for number, (name, _) in enumerate(tensors)}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture
def hub(processes: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("baton_hub.client._wait_s", lambda error, failures: 0.01)
    with HubDouble.of_folder(folder).running() as running:
        use(running.url, monkeypatch)
        yield running


def show(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["show", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def facts_of(*arguments: str | Path) -> dict[str, Any]:
    return json.loads(show(*arguments, "--json", "--gpu", "l4"))


def served(folder: Path, quantization: str = "auto") -> Served:
    found = model_facts(folder, "bfloat16", [], quantization=quantization).served
    assert found is not None
    return found


def rows(text: str) -> dict[str, str]:
    return {line[:13].strip(): line[15:] for line in text.splitlines()}


def test_headers_on_a_hub_tell_the_same_as_a_folder(hub: HubDouble, folder: Path) -> None:
    hub.revisions = {"main": "2" * 40, "v1.0": COMMIT}
    there, here = facts_of(f"{REPO}@v1.0"), facts_of(folder)
    assert there["files"].pop("on_hub") is not here["files"].pop("on_hub")
    assert there == here
    assert there["not_served"] is there["weights_unknown"] is None
    assert [request.range for shard in SHARDS for request in hub.downloads(shard)] == ["bytes=0-131071"] * 2
    shown = rows(show(f"{REPO}@v1.0"))
    assert "of F8_E4M3, F32, " in shown["weights"]
    assert shown["weights"].endswith(" tensors in 2 files, on the hub")
    assert shown["served as"].startswith("8-bit codes (fp8), ")
    assert "estimated" not in shown["served as"]
    CliRunner().invoke(app, ["pull", f"{REPO}@v1.0"])
    hub.requests.clear()
    assert facts_of(f"{REPO}@{COMMIT}")["files"]["on_hub"] is False
    assert not hub.requests


def header(**entry: object) -> bytes:
    text = json.dumps({"model.norm.weight": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(512)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (SHARDS[1], b"\xff" * 7 + b"\x7f" + bytes(99), "its header would have 9223372036854775807 bytes"),
        (SHARDS[1], b"", "is not a whole safetensors file"),
        (SHARDS[1], header(dtype="F32", shape=[-2, -64], data_offsets=[0, 512]), "impossible"),
        (SHARDS[1], header(dtype="F32", shape=[256], data_offsets=[0, 1024]), "ends at byte"),
        (INDEX, b'{"weight_map": {"a": "../a.safetensors"}}', "no safetensors file at the root"),
        (INDEX, None, "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_what_a_worker_would_refuse_is_not_served(hub: HubDouble, name: str, content: bytes | None, words: str) -> None:
    del hub.files[name]
    if content is not None:
        hub.files[name] = content
    facts = facts_of(REPO)
    assert words in facts["weights_unknown"]
    assert facts["not_served"] == facts["weights_unknown"]
    assert facts["files"] is None
    assert facts["served"]["estimated"] is True
    assert rows(show(REPO))["weights"].startswith("unknown: ")


def test_a_tensor_that_no_file_on_the_hub_has_is_named(hub: HubDouble, folder: Path) -> None:
    save_file({"other": torch.zeros(1)}, folder / SHARDS[1])
    hub.files[SHARDS[1]] = (folder / SHARDS[1]).read_bytes()
    assert f"{REPO}/{SHARDS[1]} has no tensor" in facts_of(REPO)["not_served"]


def test_a_hub_that_gives_no_headers_leaves_the_sizes_unknown(hub: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = facts_of(REPO)["served"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    facts = facts_of(REPO)
    assert facts["weights_unknown"].startswith("HF_HUB_OFFLINE is set")
    assert facts["files"] is facts["not_served"] is None
    assert facts["served"]["weights_bytes"] == pytest.approx(whole["weights_bytes"], rel=0.02)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use("http://127.0.0.1:9", monkeypatch)
    shown = rows(show(REPO))
    assert shown["weights"].startswith(f"unknown: cannot reach 127.0.0.1 to download {REPO}@{COMMIT}")
    assert shown["served as"].endswith("estimated from config.json, without the scales of the codes")
    assert "not served" not in shown


def alone(folder: Path, to: Path, **fields: Any) -> Path:
    """Copy a model without its weights, and change its config.json."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    edit(to, **fields)
    return to


def test_a_config_alone_tells_about_the_bytes_of_codes(folder: Path, tiny_model: MakeModel, tmp_path: Path) -> None:
    held, told = served(folder), served(alone(folder, tmp_path / "alone"))
    assert (held.estimated, told.estimated, told.held) == (False, True, "8-bit codes (fp8)")
    assert told.weights_bytes == pytest.approx(held.weights_bytes, rel=0.02)
    less = alone(folder, tmp_path / "less", quantization_config={**FP8, "modules_to_not_convert": ["down_proj"]})
    assert served(less).weights_bytes - told.weights_bytes == 2 * 128 * 256
    base = tiny_model("gpt_oss")
    left_out = ["model.layers.*.self_attn", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    tensors = load_file(base / "model.safetensors").items()
    experts = sum(each.numel() for name, each in tensors if name.endswith(("s.gate_up_proj", "s.down_proj")))
    told = served(alone(base, tmp_path / "experts", quantization_config=config))
    assert served(base).weights_bytes - told.weights_bytes == experts * 3 // 2 > 0


@pytest.mark.parametrize(("kind", "bits"), [("fp8", 8), ("int8", 8), ("int4", 4)])
def test_weights_may_be_quantized_on_load(tiny_model: MakeModel, tmp_path: Path, kind: str, bits: int) -> None:
    folder = tiny_model("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    facts = model_facts(folder, "bfloat16", [], quantization=kind)
    assert (facts.not_served, facts.quantization) == (None, f"on load: {kind}")
    quantized = served(folder, kind)
    assert quantized.held == f"{bits}-bit codes (on load: {kind})"
    assert quantized.weights_bytes == pytest.approx(served(folder).weights_bytes * bits / 16, rel=0.05)
    # The worker counts the embedding and the head as if they were codes, too.
    more = 2 * 512 * 128 * (16 - bits) // 8
    told = served(alone(folder, tmp_path / "alone"), kind)
    assert told.weights_bytes == pytest.approx(quantized.weights_bytes + more, rel=0.05)


def test_what_cannot_be_quantized_on_load_says_so(folder: Path, tiny_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--quantization fp8 is for .* quantized already \(fp8\)"):
        show(folder, "--quantization", "fp8")
    odd = tiny_model("qwen3_moe")
    with pytest.raises(UserError, match="--quantization 'int2' is unknown"):
        show(odd, "--quantization", "int2")
    for path in (odd, alone(odd, tmp_path / "alone")):
        assert "not groups of 32" in str(model_facts(path, "auto", [], quantization="int4").not_served)
        assert model_facts(path, "auto", []).not_served is None
