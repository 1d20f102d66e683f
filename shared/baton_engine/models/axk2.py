"""A.X K2 (SK Telecom, 2026): DeepSeek-V3.2 with gates of what attention returns, and norms with gates."""

from typing import Any

import msgspec
import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.gated_latents import GatedLatentAttention
from baton_engine.layers.gated_norm import GatedNorm
from baton_engine.layers.norm import RmsNorm
from baton_engine.source import Source

from .deepseek_v32 import DeepseekV32, IndexedConfig, IndexedLayer, read_indexed_config
from .llama import LlamaConfig

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072, "n_routed_experts": 128, "n_shared_experts": 1, "q_lora_rank": 384,
    "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "moe_intermediate_size": 512, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip


class AxK2Config(IndexedConfig, frozen=True, kw_only=True):
    """norm_rank: as `rank` in GatedNorm."""

    norm_rank: int

    @property
    def projections(self) -> list[tuple[int, int]]:
        # The second projection makes gates, too, and has the compressed vector twice.
        down, (queries, low_rank), *rest = super().projections
        both = queries + self.num_heads * self.latent.value_dim, 2 * low_rank
        return [down, both, *rest, (2 * self.norm_rank, self.hidden_size), (self.hidden_size, 2 * self.norm_rank)]


class AxK2Layer(IndexedLayer):
    attention_class = GatedLatentAttention

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        assert isinstance(config, AxK2Config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        inputs, between = map(source.at, self.norms)
        self.attention = self.make_attention(config, self.block(source, 0), layer, rotary)
        self.input_norm: Any = GatedNorm(inputs, hidden, eps, config.norm_rank)
        self.mlp = self.make_mlp(config, source, layer)
        self.post_attention_norm: Any
        if layer in config.dense_layers:
            self.post_attention_norm = RmsNorm(between, hidden, eps).before(self.mlp)
        else:
            self.post_attention_norm = GatedNorm(between, hidden, eps, config.norm_rank)


class AxK2(DeepseekV32):
    layer = AxK2Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        config = read_indexed_config(file, _DEFAULTS, index_heads=16, index_interleaved=False)
        return AxK2Config(**msgspec.structs.asdict(config), norm_rank=file.count("gated_norm_rank", 16))
