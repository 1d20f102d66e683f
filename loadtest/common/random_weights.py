"""Random weights for a model that has a configuration and no checkpoint."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton_engine.load_plan import tensor_shapes
from baton_engine.models.registry import load_model_config

SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"


def write_random_weights(folder: Path, seed: int, std: float = 0.02) -> None:
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
