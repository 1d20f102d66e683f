"""SantaCoder and StarCoder (Li et al., 2023): GPT-2 whose heads share one key and one value."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.fused_qkv import order_by_kv_head
from baton_engine.layers.linear import Linear
from baton_engine.source import Source

from .layer_norm_llama import PlainMlpLayer
from .llama import Defaults, LlamaConfig, fused_qkv, llama_fields, read_llama_config
from .unrotated import NO_ROPE, UnrotatedConfig, WithLearnedPositions

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


class GptBigCodeLayer(PlainMlpLayer):
    blocks = ("attn", "mlp")
    norms = ("ln_1", "ln_2")
    output = "c_proj"
    projections = ("c_fc", "c_proj")

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        heads, kv_heads = config.num_heads, config.num_kv_heads
        return fused_qkv(config, source, "c_attn", order_by_kv_head(heads, kv_heads, config.head_dim))


class GptBigCode(WithLearnedPositions):
    layer = GptBigCodeLayer
    embedding_name, layers_name, final_norm = "wte", "h", "ln_f"

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("transformer"), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("add_cross_attention", False)
        file.require_absent("scale_attn_weights", True)
        file = llama_fields(
            file, "activation_function", hidden_size=("n_embd", 768), num_hidden_layers=("n_layer", 12),
            num_attention_heads=("n_head", 12), max_position_embeddings=("n_positions", 1024),
        )  # fmt: skip
        kv_heads = 1 if file.flag("multi_query", True) else file.count("num_attention_heads")
        inner = file.count("n_inner", 4 * file.count("hidden_size"))
        fields = {"vocab_size": 50257, **file.fields, "intermediate_size": inner, "num_key_value_heads": kv_heads}
        return read_llama_config(
            UnrotatedConfig,
            ConfigFile(fields),
            Defaults(1024, tie_word_embeddings=True),
            eps=file.number("layer_norm_epsilon", 1e-5),
            rope=NO_ROPE,
            activations=_ACTIVATIONS,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        )
