"""Random weights for a model that has a configuration and no checkpoint."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from baton_engine.load_plan import tensor_shapes
from baton_engine.models.registry import load_model_config

SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"
# The standard deviation of all weights but those of norms.
_STD = 0.02


class _RandomTensors:
    """Replaces Weights: returns random tensors, made on the device; norms are ones."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def __enter__(self) -> "_RandomTensors":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return True

    def expect(self, ranges: object) -> None:
        pass

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        sizes = [len(range(size)[taken]) for size, taken in zip(shape, part or [slice(None)] * len(shape), strict=True)]
        if name.endswith("norm.weight"):
            return torch.ones(sizes, dtype=dtype, device=self.device)
        return torch.empty(sizes, dtype=dtype, device=self.device).normal_(0, _STD, generator=self._generator)


@contextmanager
def random_weights_in_memory(seed: int) -> Iterator[None]:
    """Let engines that are created in this context load random weights instead of the tensors of their folder.

    Models whose weights do not fit on the disk can be measured like this.
    """

    def weights_bytes(folder: Path, dtype: torch.dtype, without: frozenset[str] = frozenset()) -> int:
        shapes = tensor_shapes(load_model_config(folder))
        return sum(math.prod(shape) for name, shape in shapes.items() if name not in without) * dtype.itemsize

    def weights(folder: Path, dtype: torch.dtype, device: torch.device, progress: object = None) -> _RandomTensors:
        return _RandomTensors(seed, dtype, device)

    replaced = {"Weights": weights, "weights_bytes": weights_bytes, "planned_ranges": lambda build, weights: []}
    with patch.multiple("baton_engine.runner", **replaced):
        yield


def write_random_weights(folder: Path, seed: int, std: float = _STD) -> None:
    """Write bfloat16 weights for the folder's config.json, one shard in memory at a time; norms are ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    size = 0
    for name, shape in tensor_shapes(load_model_config(folder)).items():
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=generator).cpu()
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    flush()
    # transformers rejects an index without metadata.
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
