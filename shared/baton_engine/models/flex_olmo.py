"""FlexOlmo (Ai2, 2025): OLMo 2 with experts in place of each MLP."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope
from baton_kernels.reference.routing import Routing

from .llama import Defaults, LlamaConfig, read_llama_config
from .olmo2 import Olmo2, Olmo2Layer
from .qwen2_moe import SparseQwenLayer
from .sparse_config import SparseConfig, read_experts_per_token


class FlexOlmoLayer(Olmo2Layer, SparseQwenLayer):
    """OLMo 2's attention and norms, and experts with the names that Qwen's have."""


class FlexOlmo(Olmo2):
    layer = FlexOlmoLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias, context = file.flag("attention_bias"), file.count("max_position_embeddings", 4096)
        experts = file.count("num_experts", 7)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(4096),
            rope=read_rope(file, context, theta=500000.0),
            qkv_bias=bias,
            output_bias=bias,
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(read_experts_per_token(file, experts, 5), normalize=file.flag("norm_topk_prob")),
        )
