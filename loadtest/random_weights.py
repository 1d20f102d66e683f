"""Random weights for a model of which there is only the configuration."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton_engine.model_config import ModelConfig, load_model_config

SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"


def tensor_shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of a checkpoint."""
    hidden, dim = model.hidden_size, model.head_dim
    embedding = model.vocab_size, hidden
    yield "model.embed_tokens.weight", embedding
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        kv = model.num_kv_heads * dim
        for name, outputs in (("q", model.num_heads * dim), ("k", kv), ("v", kv)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (outputs, hidden)
            if model.qkv_bias:
                yield f"{prefix}.self_attn.{name}_proj.bias", (outputs,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, model.num_heads * dim)
        if model.output_bias:
            yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
        if model.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (dim,)
        size = model.intermediate_size
        for name, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
            yield f"{prefix}.mlp.{name}_proj.weight", shape
            if model.mlp_bias:
                yield f"{prefix}.mlp.{name}_proj.bias", shape[:1]
    yield "model.norm.weight", (hidden,)
    if not model.tie_word_embeddings:
        yield "lm_head.weight", embedding


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
    for name, shape in tensor_shapes(load_model_config(folder)):
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
    # transformers reads no index without metadata.
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
