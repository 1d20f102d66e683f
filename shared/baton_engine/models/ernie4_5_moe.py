"""ERNIE 4.5 with experts (Baidu, 2025): chosen by corrected softmax scores, beside experts that all tokens use."""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .deepseek_experts import DeepseekExpertsLayer
from .ernie4_5 import CONTEXT, THETA
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sparse_config import SparseConfig


class Ernie45MoeLayer(DeepseekExpertsLayer):
    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("moe_statics.e_score_correction_bias", (1, config.num_experts), dtype=torch.float32)[0]


class Ernie45Moe(Llama):
    layer = Ernie45MoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # Experts and the head would have biases, too.
        file.require_absent("use_bias", False)
        file.require_absent("moe_norm_min", 1e-12)
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
            num_experts=experts,
            expert_size=size,
            routing=Routing(file.at_most("moe_k", experts, 6), normalize=True),
            shared_size=file.integer("moe_num_shared_experts", 2) * size,
            dense_layers=frozenset(
                layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % interval
            ),
        )
