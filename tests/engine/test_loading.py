"""Incomplete or damaged model folders, and the errors that the operator sees."""

import json
import logging
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.checkpoint import read_header
from baton_engine.config import ConfigError
from baton_engine.fingerprint import layout_fingerprint
from baton_engine.load_plan import build_of, planned_ranges
from baton_engine.loading import PLAIN, Weights, weights_bytes
from baton_engine.models.registry import load_model_config
from baton_engine.ops import TORCH, Ops
from baton_engine.quantization.registry import read_quantization
from baton_engine.read_ahead import Range
from baton_engine.sampling import Grammar, GrammarKind
from baton_engine.source import Tensors
from tests.conftest import MakeModel

from .harness import generate, make_engine, make_request
from .test_equality import SHAPES

CPU = torch.device("cpu")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A model of one file, to be damaged."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def sharded(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A model of several files, to be damaged."""
    copy = Path(shutil.copytree(tiny_model("llama", shard_size="100KB"), tmp_path / "sharded"))
    assert len(list(copy.glob("*.safetensors"))) > 2
    return copy


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make_engine(folder, **settings)
    return str(error.value)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors, or with None remove them."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_whole_folders_load(folder: Path, sharded: Path) -> None:
    make_engine(folder)
    make_engine(sharded)


def test_the_size_of_weights_is_known_beforehand(folder: Path, sharded: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    count = sum(tensor.numel() for tensor in tensors.values())
    single, half = (read_quantization(folder).sizes(dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    assert weights_bytes(folder, single) == weights_bytes(sharded, single) == 4 * count
    head = frozenset({"lm_head.weight"})
    assert weights_bytes(folder, half, head) == 2 * (count - tensors["lm_head.weight"].numel())


def test_loading_tells_of_its_progress(folder: Path) -> None:
    from baton_engine.config import EngineConfig
    from baton_engine.engine import Engine

    seen: list[tuple[str, int, int]] = []
    config = EngineConfig(model=str(folder), device="cpu", num_threads=1, num_blocks=64)
    Engine(config, lambda *told: seen.append(told))
    total = len(load_file(folder / "model.safetensors"))
    assert seen == [("weights", done, total) for done in range(1, total + 1)]


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    message = refusal(sharded)
    assert shard.name in message
    assert "lacks the shards" in message


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{shard} is not a whole safetensors file" in refusal(sharded)


class Spy:
    """Weights that note what is taken and compare it with what safetensors' own library reads."""

    def __init__(self, weights: Weights, tensors: dict[str, torch.Tensor]) -> None:
        self.dtype, self.device = weights.dtype, weights.device
        self.ranges: list[Range] = []
        self._weights, self._tensors = weights, tensors

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._weights.stored_dtype(name)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return self._weights.stored_shape(name)

    def leave(self, prefix: str, numbers: Collection[int]) -> None:
        self._weights.leave(prefix, numbers)

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        self.ranges.append(self._weights.range(name, shape, part, dtype))
        tensor = self._weights.take(name, shape, part, dtype)
        assert torch.equal(tensor, self._tensors[name][part or ()].to(dtype))
        return tensor


@pytest.mark.parametrize("shape", {family: name for name, (family, _) in SHAPES.items()}.values())
def test_the_order_in_which_a_model_takes_its_tensors_is_known_before(tiny_model: MakeModel, shape: str) -> None:
    family, overrides = SHAPES[shape]
    folder = tiny_model(family, **overrides)
    config = load_model_config(folder)
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}

    build = build_of(config, 64)
    with Weights(folder, torch.bfloat16, torch.device("cpu")) as weights:
        planned = planned_ranges(build, weights)
        weights.expect(planned)
        spy = Spy(weights, tensors)
        build(spy, TORCH)
    assert len(planned) > 10
    assert planned == spy.ranges


def test_parts_of_tensors_are_what_slices_of_them_are(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(12, 10),
        "experts": torch.randn(4, 6, 8).bfloat16(),
        "vector": torch.arange(9.0),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.randn(6, 4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    parts: list[tuple[str, tuple[slice, ...] | None]] = [
        ("matrix", (slice(3, 7), slice(0, 10))), ("matrix", (slice(0, 12), slice(5, 10))), ("matrix", (slice(4, 8),)),
        ("experts", (slice(1, 3), slice(2, 4), slice(0, 8))), ("vector", (slice(2, 5),)), ("matrix", None),
        ("experts", None), ("vector", None), ("scalar", None), ("flags", None), ("bytes", (slice(3, 6),)),
    ]  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        with Weights(tmp_path, dtype, torch.device("cpu")) as weights:
            taken = [
                (name, part, dtype if tensors[name].dtype in PLAIN else tensors[name].dtype) for name, part in parts
            ]
            weights.expect([weights.range(name, tuple(tensors[name].shape), *rest) for name, *rest in taken])
            for name, part, wanted in taken:
                tensor = weights.take(name, tuple(tensors[name].shape), part, wanted)
                assert torch.equal(tensor, tensors[name][part or ()].to(wanted)), (name, part)
                assert tensor.is_contiguous()


def test_a_model_that_looks_at_values_while_it_is_built_is_read_all_the_same(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.norm.weight"

    def build(tensors: Tensors, ops: Ops) -> Any:
        return tensors.take(name, (64,), None, torch.float32).sum().item()

    with Weights(folder, torch.float32, torch.device("cpu")) as weights, caplog.at_level(logging.WARNING):
        weights.expect(planned_ranges(build, weights))
        expected = load_file(folder / "model.safetensors")[name].sum().item()
        assert build(weights, TORCH) == expected
    assert "read one at a time" in caplog.text


def test_a_file_that_shrinks_while_it_is_read_is_named_with_the_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    last = max(read_header(path).items(), key=lambda entry: entry[1].begin)
    with Weights(folder, torch.float32, torch.device("cpu")) as weights:
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(ConfigError, match=f"{last[0]} cannot be read from {path}: the file ends at byte"):
            weights.take(last[0], last[1].shape, None, torch.float32)


def test_a_tensor_of_another_shape_is_found_before_any_is_read(folder: Path) -> None:
    from baton_engine.config import EngineConfig
    from baton_engine.engine import Engine

    rewrite(folder, **{"model.norm.weight": torch.zeros(65)})
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(ConfigError, match=r"model\.norm\.weight in model\.safetensors is \[65\]"):
        Engine(EngineConfig(model=str(folder), device="cpu", num_threads=1), lambda *told: seen.append(told))
    assert seen == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}, "impossible"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}, "impossible"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}, "ends at byte"),
        ({"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}, "has 16 bytes"),
        ({"dtype": "NEW", "shape": [10**30], "data_offsets": [0, 16]}, "has 16 bytes"),
        ({"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}, "impossible"),
        ({"dtype": "F32", "shape": [4]}, "data_offsets"),
        ({"dtype": 3, "shape": [4], "data_offsets": [0, 16]}, "dtype"),
        ([], "object"),
    ],
)
def test_impossible_headers_are_named(folder: Path, entry: object, words: str) -> None:
    path = folder / "model.safetensors"
    header = json.dumps({"__metadata__": {"dtype": "any text"}, "model.norm.weight": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    message = refusal(folder)
    assert f"{path} is not a whole safetensors file" in message
    assert words in message


def test_endless_brackets_are_no_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((100_000).to_bytes(8, "little") + b'{"a":' + b"[" * 99_995)
    assert f"{path} is not a whole safetensors file" in refusal(folder)


def test_a_dtype_that_is_not_served_is_named(folder: Path) -> None:
    rewrite(folder, **{"model.norm.weight": torch.zeros(64, dtype=torch.uint16)})
    assert "model.norm.weight in model.safetensors is U16, which is not served" in refusal(folder)


def test_an_index_cannot_name_files_elsewhere(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    path.write_text(json.dumps(index))
    assert "names a file outside of its folder: '../model.safetensors'" in refusal(sharded)


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"weight_map": 3}'])
def test_a_broken_index_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json is not" in refusal(sharded)


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_named(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = index["weight_map"]
    name = "model.norm.weight"
    files[name] = next(file for file in files.values() if file != files[name])
    path.write_text(json.dumps(index))
    assert name in refusal(sharded)


@pytest.mark.parametrize("keep", [-100, 1000, 4, 0])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path} is not a whole safetensors file" in refusal(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    assert "no tensor 'model.layers.1.mlp.up_proj.weight'" in refusal(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.k_proj.weight": torch.zeros(16, 64)})
    message = refusal(folder)
    for words in ("model.layers.0.self_attn.k_proj.weight", "is [16, 64]", "calls for [32, 64]"):
        assert words in message


def test_unused_tensors_are_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(folder, **{"model.layers.0.extra": torch.zeros(1)})
    with caplog.at_level(logging.WARNING):
        make_engine(folder)
    assert "does not use 1 tensors" in caplog.text
    assert "model.layers.0.extra" in caplog.text


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "neither model.safetensors nor model.safetensors.index.json" in message
    assert "pickle files are not read" in message


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert "neither model.safetensors" in message
    assert "pickle" not in message


def test_a_folder_that_does_not_exist_is_no_model(tmp_path: Path) -> None:
    assert "is not a model folder" in refusal(tmp_path / "nowhere")


def edit_tokenizer(folder: Path, edit: Any) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_tokenizer_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    edit_tokenizer(folder, lambda content: content["model"]["vocab"].update({"outside": 512}))
    message = refusal(folder)
    assert "token ids up to 512" in message
    assert "vocabulary of 512" in message


def test_an_added_token_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    def edit(content: Any) -> None:
        vocab = content["model"]["vocab"]
        vocab.update({f"more {id}": id for id in range(len(vocab), 512)})
        content["added_tokens"].append({**content["added_tokens"][0], "id": 512, "content": "outside"})

    edit_tokenizer(folder, edit)
    assert "token ids up to 512" in refusal(folder)


def test_tokens_of_images_may_be_beyond_the_vocabulary(tiny_model: MakeModel, tmp_path: Path) -> None:
    """As in Llama 3.2 Vision. A prompt with such a token is refused, as its image is not served."""
    shutil.copytree(tiny_model("mllama"), tmp_path / "model")

    def add(id: int) -> None:
        edit_tokenizer(tmp_path / "model", lambda content: content["model"]["vocab"].update({f"image {id}": id}))

    add(512)
    engine = make_engine(tmp_path / "model")
    assert engine.request_error(make_request(0, [3, 512], 4)) == (
        "prompt",
        "a token id is outside the vocabulary of 512",
    )
    grammar = Grammar(GrammarKind.REGEX, "[a-f]{4,9}")
    text = generate(engine, [make_request(1, [3], 12, grammar=grammar, eos_token_ids=[1])])
    assert len(text.tokens[1, 0]) > 3
    add(519)
    make_engine(tmp_path / "model")
    add(520)
    assert "vocabulary of 520" in refusal(tmp_path / "model")


def test_a_tokenizer_file_that_is_none_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: " in refusal(folder)


def test_a_folder_without_a_tokenizer_can_be_served(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    make_engine(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "int8"}, ["--dtype 'int8'", "bfloat16"]),
        ({"device": "abacus"}, ["--device 'abacus'", "cpu"]),
        ({"attention_backend": "magic"}, ["attention backend 'magic'", "torch_sdpa"]),
        ({"attention_backend": "triton"}, ["attention backend 'triton'", "needs a CUDA device", "use torch_sdpa"]),
        ({"deterministic": True}, ["--deterministic", "needs a CUDA device"]),
        ({"max_model_len": 513}, ["--max-model-len 513", "512"]),
        ({"num_blocks": 31}, ["31 blocks of 16 tokens", "--num-blocks to 32", "--max-model-len"]),
        ({"block_size": -1}, ["--block-size"]),
        ({"max_num_seqs": -1}, ["--max-num-seqs"]),
        ({"max_num_batched_tokens": -1}, ["--max-num-batched-tokens"]),
    ],
)
def test_settings_that_cannot_be_served_are_named(llama: Path, settings: dict[str, Any], words: list[str]) -> None:
    message = refusal(llama, **settings)
    for word in words:
        assert word in message


def test_a_gpu_that_is_not_there_is_said(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in refusal(llama, device="cuda")


def test_an_unknown_activation_is_named(tiny_model: MakeModel, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "swoosh"}))
    message = refusal(folder)
    assert "hidden_act in config.json is 'swoosh'; it must be one of silu" in message
    assert "silu" in message


def test_fingerprints_are_equal_for_equal_weights_alone(folder: Path, llama: Path) -> None:
    engine = make_engine(folder)
    digest = layout_fingerprint(engine.fingerprint_facts(), folder)
    assert digest == layout_fingerprint(make_engine(llama).fingerprint_facts(), llama)
    # KV is exchanged by tokens, so engines may differ in the size of blocks, but not in the layout of a token's KV.
    assert digest == layout_fingerprint(make_engine(folder, block_size=32).fingerprint_facts(), folder)
    assert digest != layout_fingerprint(make_engine(folder, dtype="bfloat16").fingerprint_facts(), folder)
    weights = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, **{"model.embed_tokens.weight": weights + 1})
    assert digest != layout_fingerprint(engine.fingerprint_facts(), folder)
