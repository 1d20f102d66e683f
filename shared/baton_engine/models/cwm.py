"""Code World Model (Meta, 2025): Llama with windows in three of four layers."""

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config

_CONTEXT = 131072
# That of transformers' configuration class, for a config.json that describes none.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Cwm(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("attention_bias", False)
        layers, window = file.count("num_hidden_layers"), file.count("sliding_window", 8192)
        types = file.layer_types("layer_types", layers) or [
            "sliding_attention" if layer % 4 else "full_attention" for layer in range(layers)
        ]
        described = file.fields.get("rope_parameters") or file.fields.get("rope_scaling")
        return read_llama_config(
            LlamaConfig,
            ConfigFile({"rope_theta": 1e6, **({} if described else {"rope_parameters": _ROPE}), **file.fields}),
            Defaults(_CONTEXT, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5),
            tuple(window if kind == "sliding_attention" else None for kind in types),
            mlp_bias=file.flag("mlp_bias"),
        )
