"""DeepSeek-MoE 16B (Dai et al., "DeepSeekMoE", 2024): Llama with many small experts, some of which all tokens use."""

from baton_engine.config_file import ConfigFile
from baton_kernels.reference.routing import Routing

from .deepseek_experts import UncorrectedExpertsLayer
from .llama import SILU, Defaults, Llama, LlamaConfig, read_llama_config
from .sparse_config import SparseConfig, read_experts_per_token, read_layers_between_experts

# Those of the authors' configuration class.
_DEFAULTS = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "moe_intermediate_size": 1407,
    "num_hidden_layers": 30, "num_attention_heads": 32,
}  # fmt: skip


class Deepseek(Llama):
    layer = UncorrectedExpertsLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        file.require_absent("mlp_bias", False)
        # Later models of DeepSeek have these, but the authors' code of this one does not read them.
        file.require_absent("routed_scaling_factor", 1.0)
        file.require_absent("topk_method", "greedy")
        file.choice("scoring_func", "softmax", ("softmax",))
        file.require_absent("head_dim", file.count("hidden_size") // file.count("num_attention_heads"))
        experts, size = file.count("n_routed_experts"), file.count("moe_intermediate_size")
        chosen = read_experts_per_token(file, experts, file.count("num_experts_per_tok"))
        bias = file.flag("attention_bias")
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(2048),
            activations=SILU,
            qkv_bias=bias,
            output_bias=bias,
            num_experts=experts,
            expert_size=size,
            # The weight of a lone expert is never divided by itself.
            routing=Routing(chosen, normalize=file.flag("norm_topk_prob") and chosen > 1),
            shared_size=file.integer("n_shared_experts", 0) * size,
            dense_layers=read_layers_between_experts(file, file.count("num_hidden_layers")),
        )
