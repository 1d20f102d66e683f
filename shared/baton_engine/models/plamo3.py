"""PLaMo 3 (Preferred Networks, 2025): fused projections, norms around each block and of query and key heads, and
windows with a rotation of their own in most layers."""

from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import Rope
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, fused_qkv, read_llama_config
from .normed_around import NormedAround
from .phi3 import fused_gate_up
from .sliding_windows import WithWindowRope, ropes_by_window, windows_in_turn


class Plamo3Config(WithWindowRope, LlamaConfig, frozen=True, kw_only=True):
    window_rope: Rope


class Plamo3Layer(NormedAround):
    blocks = ("mixer", "mlp")
    norms = ("pre_mixer_norm", "pre_mlp_norm")
    post_norms = ("post_mixer_norm", "post_mlp_norm")

    def post_offsets(self, config: LlamaConfig) -> tuple[float, float]:
        return 1 / 5, 1 / 5**1.5

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_qkv(config, source, "qkv_proj")

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_gate_up(config, source)


class Plamo3(Llama):
    layer = Plamo3Layer
    layers_name = "layers.layers"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in (("attention_bias", False), ("hidden_activation", "swiglu"), ("scale_embedding", False)):
            file.require_absent(name, value)
        layers, context = file.count("num_hidden_layers"), file.count("max_position_embeddings", 2048)
        # The defaults of these differ between the authors' versions of the configuration class.
        window, theta = file.count("window_size"), file.number("rope_theta")
        given = ConfigFile(
            {**file.fields, "sliding_window": window, "layer_types": None, "rope_parameters": _rope(file)}
        )
        rope, window_rope = ropes_by_window(given, context, theta, file.number("rope_local_theta", 10000.0))
        return read_llama_config(
            Plamo3Config,
            given,
            Defaults(2048, num_kv_heads=4, head_dim=128, tie_word_embeddings=True),
            windows_in_turn(given, layers, 8),
            rope=rope,
            window_rope=window_rope,
            norm_offset=1.0,
            qk_norm=True,
        )


def _rope(file: ConfigFile) -> dict[str, Any]:
    """Return the rotation of layers without a window, as transformers has it by kind of layer."""
    factor = file.number("rope_scaling_factor", 1.0)
    if factor < 1:
        raise ConfigError(f"rope_scaling_factor in config.json is {factor}; it must be at least 1")
    if factor == 1:
        return {}
    original = file.count("initial_context_length")
    scaled = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return {"full_attention": scaled, "truncate": False}
