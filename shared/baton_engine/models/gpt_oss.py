"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, attention sinks, windows in every second layer."""

from collections.abc import Callable

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.experts import ExpertMlp, Router, load_joined_experts
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source
from baton_kernels.reference.activation import ClampedGate
from baton_kernels.reference.routing import Routing

from .llama import SILU, Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sparse_config import SparseConfig, read_experts_per_token

_CONTEXT = 131072
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(SparseConfig, frozen=True, kw_only=True):
    clamp: ClampedGate


class GptOssLayer(LlamaLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        assert isinstance(config, GptOssConfig)
        mlp, experts, hidden = source.at("mlp"), config.num_experts, config.hidden_size
        form = JoinedForm(interleaved=True, activation=config.clamp)
        return ExpertMlp(
            Router(mlp.at("router"), config.routing, experts, hidden, bias=True),
            load_joined_experts(mlp.at("experts"), experts, hidden, config.expert_size, form),
            source.ranks,
        )


class GptOss(Llama):
    layer = GptOssLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = ConfigFile({**file.fields, "rope_theta": file.number("rope_theta", 150000.0)})
        if not (file.fields.get("rope_parameters") or file.fields.get("rope_scaling")):
            file.fields["rope_scaling"] = _ROPE
        layers, experts = file.count("num_hidden_layers"), file.count("num_local_experts", 128)
        bias, limit = file.flag("attention_bias", True), file.number("swiglu_limit", 7.0)
        if not limit > 0:
            raise ConfigError(f"swiglu_limit in config.json is {limit}; it must be above 0")
        return read_llama_config(
            GptOssConfig,
            file,
            Defaults(_CONTEXT, num_kv_heads=8, head_dim=64, rms_norm_eps=1e-5),
            _windows(file, layers),
            activations=SILU,
            rope=read_rope(file, file.count("max_position_embeddings", _CONTEXT)),
            sinks=True,
            qkv_bias=bias,
            output_bias=bias,
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            # The softmax of the chosen logits.
            routing=Routing(read_experts_per_token(file, experts, 4), normalize=True),
            clamp=ClampedGate(file.number("swiglu_alpha", 1.702), limit),
        )


def _windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: where layer_types says so, or else in every second layer from the first on."""
    window = file.count("sliding_window", 128)
    types = file.layer_types("layer_types", layers)
    if types is None:
        types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)
