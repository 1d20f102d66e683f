"""ERNIE 4.5 with experts (Baidu, 2025): chosen by corrected softmax scores, beside experts that all tokens use."""

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertsMethod
from baton_engine.layers.embedding import Head, head
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .deepseek_experts import DeepseekExpertsLayer
from .ernie4_5 import CONTEXT, THETA
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sparse_config import SparseConfig


class Ernie45MoeLayer(DeepseekExpertsLayer):
    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        # With use_bias they would have biases in the authors' code, but have none in transformers.
        if "0.gate_proj.bias" in source:
            raise ConfigError(
                f"{source.full_name('0.gate_proj')} has a bias, which is not served for {config.architecture}"
            )
        return super().load_experts(config, source)

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("moe_statics.e_score_correction_bias", (1, config.num_experts), dtype=torch.float32)[0]


class Ernie45Moe(Llama):
    layer = Ernie45MoeLayer

    def make_head(self, config: LlamaConfig, source: Source) -> Head:
        return head(source, self.embedding, config.tie_word_embeddings, bias=config.mlp_bias)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("moe_norm_min", 1e-12)
        bias = file.flag("use_bias")
        context, layers = file.count("max_position_embeddings", CONTEXT), file.count("num_hidden_layers")
        experts, size = file.count("moe_num_experts", 64), file.count("moe_intermediate_size", 1536)
        first, interval = file.integer("moe_layer_start_index", 1), file.count("moe_layer_interval", 1)
        given = file.fields.get("moe_layer_end_index")
        last = layers - 1 if given in (None, -1) else file.integer("moe_layer_end_index")
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(CONTEXT, num_kv_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True),
            rope=read_rope(file, context, theta=THETA, interleaved=True),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            num_experts=experts,
            expert_size=size,
            routing=Routing(file.at_most("moe_k", experts, 6), normalize=True),
            shared_size=file.integer("moe_num_shared_experts", 2) * size,
            dense_layers=frozenset(
                layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % interval
            ),
        )
