"""MiniCPM3 (OpenBMB, 2024): latent attention without experts, with factors of embeddings, residuals and logits."""

from typing import Any

import msgspec

from baton_engine.config_file import ConfigFile

from .deepseek_v2 import DeepseekConfig, DeepseekLayer
from .granite import Granite, GraniteLayer, Multipliers
from .llama import LlamaConfig
from .youtu import read_dense_config

# Those of transformers' configuration class.
_DEFAULTS = {
    "max_position_embeddings": 32768, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


class MiniCpm3Config(DeepseekConfig, frozen=True, kw_only=True):
    multipliers: Multipliers

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "multipliers": [self.multipliers.embeddings, self.multipliers.residual]}


class MiniCpm3Layer(GraniteLayer, DeepseekLayer):
    pass


class MiniCpm3(Granite):
    layer = MiniCpm3Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        hidden, layers = file.count("hidden_size"), file.count("num_hidden_layers")
        value = file.count("v_head_dim", hidden // file.count("num_attention_heads"))
        config = read_dense_config(ConfigFile({**file.fields, "v_head_dim": value}), _DEFAULTS, interleaved=False)
        # An explicit null of either turns it off, unlike an absent field.
        depth = layers**0.5 if file.fields.get("scale_depth", 0) is None else file.number("scale_depth", 1.4)
        base = hidden if file.fields.get("dim_model_base", 0) is None else file.count("dim_model_base", 256)
        multipliers = Multipliers(file.number("scale_emb", 12.0), depth / layers**0.5, hidden / base)
        return MiniCpm3Config(**msgspec.structs.asdict(config), multipliers=multipliers)
