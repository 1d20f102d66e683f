"""Random weights for a model that has a configuration and no checkpoint, in the format that the configuration names."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from baton_engine.loading import PLAIN, TensorBytes
from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import load_model_config, model_class
from baton_engine.ops import TORCH
from baton_engine.quantization.dense import as_stored
from baton_engine.quantization.registry import Quantization, read_quantization
from baton_engine.source import Policy, Source

SHARD_BYTES = 2 << 30
SEED = "BATON_RANDOM_WEIGHTS_SEED"  # in the environment of ranks, see random_rank.py
_ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
# The standard deviation of all weights but those of norms.
_STD = 0.02
# Tools leave these modules as they are, and these tensors out where they have nothing to say.
_PLAIN_MODULES = ("lm_head.", "embed_out.", "shared_expert_gate.")
_NVFP4_FACTORS = ("weight_global_scale", "weight_scale_2")
_LEFT_OUT = ("g_idx", "weight_shape", "weight_format")


class _Tensors:
    """The part of Weights that says which tensors there are: all that a model can use, as tools write them."""

    def __contains__(self, name: str) -> bool:
        if any(module in name for module in _PLAIN_MODULES):
            return name.endswith((".weight", ".bias"))
        return not name.endswith(_LEFT_OUT)

    def stored_dtype(self, name: str) -> torch.dtype:
        if name.endswith(".scales"):
            return torch.float16
        return torch.float32 if "scale" in name.rpartition(".")[2] else torch.bfloat16

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return (1,)

    def leave(self, prefix: str, numbers: object) -> None:
        pass


class _Shapes(_Tensors):
    """Replaces Weights: records which tensors a model loads, and returns tensors without memory."""

    dtype, device = torch.bfloat16, torch.device("meta")

    def __init__(self) -> None:
        self.taken: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def take(self, name: str, shape: tuple[int, ...], part: object, dtype: torch.dtype) -> torch.Tensor:
        self.taken[name] = shape, self.stored_dtype(name) if dtype in PLAIN else dtype
        sizes = part if isinstance(part, tuple) else tuple(slice(0, size) for size in shape)
        return torch.empty(shape, dtype=dtype, device=self.device)[sizes]


def stored_tensors(model: ModelConfig, policy: Policy = as_stored) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes of a checkpoint's tensors by name."""
    shapes = _Shapes()
    model_class(model.architecture)(model, Source(shapes, TORCH, policy), 1)
    return shapes.taken


class _RandomTensors(_Tensors):
    """Replaces Weights: returns random tensors in a format, made on the device."""

    names: frozenset[str] = frozenset()  # no tensor is there unless it is needed

    def __init__(self, quantization: Quantization, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._quantization = quantization
        self._generator = torch.Generator(device).manual_seed(seed)

    def __enter__(self) -> "_RandomTensors":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def expect(self, ranges: object) -> None:
        pass

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        taken = (*(part or ()), *[slice(None)] * len(shape))
        sizes = tuple(len(range(size)[each]) for size, each in zip(shape, taken, strict=False))
        return random_tensor(name, sizes, dtype, self._quantization, self._generator)


@contextmanager
def random_weights_in_memory(seed: int) -> Iterator[None]:
    """Let engines that are created in this context load random weights instead of the tensors of their folder, all
    their ranks included.

    Models whose weights do not fit on the disk can be measured like this, in the format that their folder names, and
    quantized on load. What each rank has of a tensor is random by itself, and the same where ranks have the whole.
    """

    def weights_bytes(folder: Path, size: TensorBytes, without: frozenset[str] = frozenset()) -> int:
        tensors = stored_tensors(load_model_config(folder), read_quantization(folder).policy).items()
        return round(sum(size(dtype, shape) for name, (shape, dtype) in tensors if name not in without))

    def weights(folder: Path, dtype: torch.dtype, device: torch.device, progress: object = None) -> _RandomTensors:
        return _RandomTensors(read_quantization(folder), seed, dtype, device)

    replaced = {"Weights": weights, "weights_bytes": weights_bytes, "planned_ranges": lambda build, weights: []}
    with (
        patch.multiple("baton_engine.runner", **replaced),
        patch("baton_engine.ranks.processes.RANK_MODULE", "loadtest.common.random_rank"),
        patch.dict(os.environ, {SEED: str(seed), "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}),
    ):
        yield


def write_random_weights(folder: Path, seed: int, std: float = _STD) -> None:
    """Write weights for the folder's config.json, one shard in memory at a time.

    Weights that are not quantized are bfloat16; norms are ones.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    quantization = read_quantization(folder)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    size = 0
    for name, (shape, dtype) in stored_tensors(load_model_config(folder), quantization.policy).items():
        tensor = random_tensor(name, shape, dtype, quantization, generator, std).cpu()
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    flush()
    # transformers rejects an index without metadata.
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def random_tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantization: Quantization,
    generator: torch.Generator,
    std: float = _STD,
) -> torch.Tensor:
    """Return a tensor of a checkpoint whose weights have this standard deviation, roughly."""
    device = generator.device
    tensor = torch.empty(shape, dtype=dtype, device=device)
    field = name.rpartition(".")[2]
    if dtype == torch.float8_e4m3fn and "scale" in field:
        # Those of NVFP4, whose factor of all scales is chosen so that the largest ones come near 448.
        return torch.empty(shape, device=device).uniform_(100, 400, generator=generator).to(dtype)
    if field in _NVFP4_FACTORS:
        # Codes of 4 bits are numbers of about 3, and their scales about 250.
        factor = std / (3 * 250)
        return tensor.fill_(1 / factor if field == "weight_global_scale" else factor)
    if dtype == torch.float8_e4m3fn:
        codes = torch.empty(shape, dtype=torch.float32, device=device).normal_(0, 100, generator=generator)
        return codes.clamp_(-448, 448).to(dtype)
    if dtype == torch.uint8 and "scale" in field:
        # Exponents of two for codes whose numbers are about 3.
        return tensor.random_(118, 122, generator=generator)
    if dtype not in PLAIN:
        whole = torch.iinfo(dtype)
        return tensor.random_(whole.min, whole.max, generator=generator)
    if name.endswith("norm.weight"):
        return tensor.fill_(1)
    if field.startswith(("input_scale", "activation_scale")):
        return tensor.fill_(0.05)
    if "scale" in field:
        # Codes of 4 bits differ from zeros by about 6, and those of 8 bits are about 74, or 100 in FP8.
        codes = 6.0 if quantization.bits == 4 and "fp8" not in quantization.name else 90.0
        return tensor.uniform_(0.5, 1.5, generator=generator).mul_(std / codes)
    return tensor.normal_(0, std, generator=generator)
