"""GLM-5 (GLM Team, 2026): DeepSeek-V3.2's layers, some of which attend to the tokens that an earlier one selects."""

from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile

from .deepseek_v32 import DeepseekV32, read_indexed_config
from .llama import LlamaConfig

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 202752,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
}


class GlmMoeDsa(DeepseekV32):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_indexed_config(
            file, _DEFAULTS, index_heads=32, index_interleaved=True, selecting=selecting_layers(file)
        )


def selecting_layers(file: ConfigFile) -> frozenset[int]:
    """Return the layers with an indexer, of which the first layer must be one."""
    found = layers_with_indexers(file)
    if 0 not in found:
        raise ConfigError("the first layer in config.json has no indexer, and no earlier layer can select its tokens")
    return found


def layers_with_indexers(file: ConfigFile) -> frozenset[int]:
    """Return the layers with an indexer, from a list of them, a pattern, or the distance between them."""
    layers = file.count("num_hidden_layers")
    kinds = file.fields.get("indexer_types") or file.fields.get("index_topk_pattern")
    if kinds is None:
        every, offset = file.count("index_topk_freq", 1), file.integer("index_skip_topk_offset", 2)
        return frozenset(layer for layer in range(layers) if max(layer - offset + 1, 0) % every == 0)
    if isinstance(kinds, str):
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in kinds]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("full", "shared") for kind in kinds):
        raise ConfigError(
            f"indexer_types in config.json must be full or shared for each of the {layers} layers, or "
            "index_topk_pattern F or S"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "full")
