"""ChatGLM2, ChatGLM3, GLM-4 9B and the text part of GLM-4V 9B (GLM Team, 2024) as they were first published: GLM
with Megatron's names of tensors.

transformers has the later form of GLM-4 9B, which glm.py serves.
"""

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.fused_qkv import order_by_kv_head
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import Rope
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, fused_qkv, read_llama_config
from .phi3 import fused_gate_up

# For each of Llama's names, the family's own name and default.
_NAMES = {
    "vocab_size": ("padded_vocab_size", 65024), "hidden_size": ("hidden_size", 4096),
    "intermediate_size": ("ffn_hidden_size", 13696), "num_hidden_layers": ("num_layers", 28),
    "num_attention_heads": ("num_attention_heads", 32), "head_dim": ("kv_channels", 128),
    "max_position_embeddings": ("seq_length", 2048),
}  # fmt: skip
# Fields of the first ChatGLM-6B, a different model whose architecture has the same name.
_OF_THE_FIRST = ("position_encoding_2d", "inner_hidden_size")
# Fields that must be absent or have these values: the layers here compute nothing else.
_BUILT_IN = {
    "rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False, "original_rope": True, "tie_word_embeddings": False, "quantization_bit": 0,
    "fp32_residual_connection": False,
}  # fmt: skip
# The length of a trained prefix (P-tuning v2), which is not served.
_UNSERVED = ("pre_seq_len",)


class ChatGlmConfig(LlamaConfig, frozen=True, kw_only=True):
    fused_by_head: bool  # the query, key and value of each head follow one another in the checkpoint


class ChatGlmLayer(LlamaLayer):
    blocks = ("self_attention", "mlp")
    output, down = "dense", "dense_4h_to_h"

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        assert isinstance(config, ChatGlmConfig)
        order = None
        if config.fused_by_head:
            order = order_by_kv_head(config.num_heads, config.num_kv_heads, config.head_dim)
        return fused_qkv(config, source, "query_key_value", order)

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_gate_up(config, source, "dense_h_to_4h")


class ChatGlm(Llama):
    layer = ChatGlmLayer
    embedding_name, layers_name = "embedding.word_embeddings", "encoder.layers"
    final_norm, head_name = "encoder.final_layernorm", "output_layer"

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("transformer"), source.at("transformer")

    @classmethod
    def read_config(cls, file: ConfigFile) -> ChatGlmConfig:
        for name in (*_OF_THE_FIRST, *_UNSERVED):
            file.require_absent(name)
        for name, value in _BUILT_IN.items():
            file.require_absent(name, value)
        grouped, groups = file.flag("multi_query_attention"), file.count("multi_query_group_num", 1)
        fields = {ours: file.count(own, default) for ours, (own, default) in _NAMES.items()}
        fields["num_key_value_heads"] = groups if grouped else fields["num_attention_heads"]
        return read_llama_config(
            ChatGlmConfig,
            ConfigFile({**file.fields, **fields, "hidden_act": None}),
            Defaults(2048),
            rope=Rope("default", 10000 * _rope_ratio(file), partial=0.5, interleaved=True),
            eps=file.number("layernorm_epsilon", 1e-5),
            qkv_bias=file.flag("add_qkv_bias"),
            fused_by_head=not grouped,
        )


def _rope_ratio(file: ConfigFile) -> float:
    """Return the factor of the rotation's base. ChatGLM2-6B-32k alone divides positions by it, which only its name
    tells."""
    ratio = file.number("rope_ratio", 1.0)
    if ratio <= 0:
        raise ConfigError(f"rope_ratio in config.json is {ratio}; it must be above 0")
    if ratio != 1 and "chatglm2" in str(file.fields.get("_name_or_path")).lower():
        raise ConfigError("rope_ratio in config.json is not served for ChatGLM2, which divides positions by it")
    return ratio
