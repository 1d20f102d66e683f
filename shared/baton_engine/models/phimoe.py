"""Phi-3.5-MoE (Abdin et al., 2024): LayerNorms, biases, and experts whose weights are a softmax of near logits."""

import msgspec

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Head, head
from baton_engine.layers.rope import Rope, read_rope, rope_fields
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .layer_norm_llama import LayerNormLayer, LayerNormLlama, SparseLayerNormConfig
from .llama import Defaults, LlamaConfig, read_llama_config
from .mixtral import MixtralLayer
from .sliding_windows import same_window

_CONTEXT = 131072


class PhiMoeConfig(SparseLayerNormConfig, frozen=True, kw_only=True):
    head_bias: bool


class PhiMoeLayer(LayerNormLayer, MixtralLayer):
    pass


class PhiMoe(LayerNormLlama):
    layer = PhiMoeLayer

    def make_head(self, config: LlamaConfig, source: Source) -> Head:
        assert isinstance(config, PhiMoeConfig)
        return head(source, self.embedding, config.tie_word_embeddings, bias=config.head_bias)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("num_experts_per_tok", 2)
        bias, experts = file.flag("attention_bias"), file.count("num_local_experts", 16)
        return read_llama_config(
            PhiMoeConfig,
            file,
            Defaults(_CONTEXT, num_kv_heads=8),
            same_window(file),
            eps=file.number("rms_norm_eps", 1e-5),
            rope=_rope(file),
            qkv_bias=bias,
            output_bias=bias,
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(2, near=2 * file.number("router_jitter_noise", 0.01)),
            head_bias=file.flag("lm_head_bias"),
        )


def _rope(file: ConfigFile) -> Rope:
    """Return the rope. A longrope has a factor of its own for contexts up to the original one and for longer ones."""
    rope = read_rope(file, file.count("max_position_embeddings", _CONTEXT), theta=1e6)
    if rope.type == "default":
        return rope
    given = ConfigFile(rope_fields(file))
    short, long = given.number("short_mscale"), given.number("long_mscale")
    if short != long:
        raise ConfigError(f"short_mscale {short} and long_mscale {long} in config.json differ, which is not served")
    return msgspec.structs.replace(rope, attention_factor=short)
