"""LongCat-Flash (Meituan, 2025): layers of two latent attentions and two MLPs each, beside which experts compute."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.inputs import NUMBERS
from baton_engine.layers.experts import load_experts
from baton_engine.layers.identity_experts import IdentityExperts
from baton_engine.source import Source

from .deepseek_v2 import DeepseekConfig, DeepseekLayer, read_deepseek_config
from .llama import Layer, Llama, LlamaConfig, LlamaLayer, RotaryTables
from .qwen2_moe import NAMES

# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 131072, "hidden_size": 6144, "num_attention_heads": 64, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1e7, "q_lora_rank": 1536, "routed_scaling_factor": 6.0,
}  # fmt: skip
# DeepSeek's names of fields, with the family's own and their defaults.
_NAMES = {
    "intermediate_size": ("ffn_hidden_size", 12288), "n_routed_experts": ("n_routed_experts", 512),
    "moe_intermediate_size": ("expert_ffn_hidden_size", 2048), "num_experts_per_tok": ("moe_topk", 12),
}  # fmt: skip
_NO_GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 0}


class LongcatFlashConfig(DeepseekConfig, frozen=True, kw_only=True):
    """num_layers: twice that of the checkpoint, as each of its layers has two attentions. identities: the experts that
    compute nothing."""

    identities: int

    def _units(self, experts: float) -> float:
        # Every second attention has experts beside its MLP.
        return self.intermediate_size + experts * self.expert_size / 2


class _Second(DeepseekLayer):
    blocks = ("self_attn.1", "mlps.1")
    norms = ("input_layernorm.1", "post_attention_layernorm.1")
    make_mlp = LlamaLayer.make_mlp


class _Both:
    """An MLP and experts with the same inputs."""

    inputs = NUMBERS

    def __init__(self, mlp: Callable[[torch.Tensor], torch.Tensor], experts: IdentityExperts) -> None:
        self._mlp, self._experts = mlp, experts

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, hidden]. Returns the results of the MLP and of the experts, [T, hidden] each."""
        return self._mlp(x), self._experts(x)


class _First(DeepseekLayer):
    blocks = ("self_attn.0", "mlps.0")
    norms = ("input_layernorm.0", "post_attention_layernorm.0")

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], Any]:
        assert isinstance(config, LongcatFlashConfig)
        mlp, sparse = LlamaLayer.make_mlp(self, config, source, layer), source.at("mlp")
        total, hidden = config.num_experts + config.identities, config.hidden_size
        correction = sparse.take("router.e_score_correction_bias", (total,), dtype=torch.float32)
        names = NAMES.gated(config.activation)
        experts = load_experts(sparse.at("experts"), names, config.num_experts, hidden, config.expert_size)
        router, count = sparse.at("router.classifier"), config.num_experts
        return _Both(
            mlp, IdentityExperts(router, config.routing, experts, count, config.identities, hidden, correction)
        )


class LongcatFlashLayer:
    """Two layers of attention and an MLP. The experts have the inputs of the first MLP, and their result is added to
    that of the second. layer: the number of the first attention."""

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        self.first = _First(config, source, layer, rotary)
        self.second = _Second(config, source, layer + 1, rotary)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.first.input_norm.add(x, residual)
        x = self.first.attention(normed, ctx)
        normed, residual = self.first.post_attention_norm.add(x, residual)
        x, beside = self.first.mlp(normed)
        x, residual = self.second(x, residual, ctx)
        return x.add_(beside), residual


class LongcatFlash(Llama):
    def make_layers(self, config: LlamaConfig, source: Source, rotary: RotaryTables) -> list[Layer]:
        numbers, tables = source.stage.layers(config.num_layers), rotary[config.rope]
        if numbers.start % 2 or numbers.stop % 2:
            raise ConfigError(
                f"--pipeline-parallel {source.stage.count} divides the two attentions of a layer: it must divide the "
                f"{config.num_layers // 2} layers of this model evenly"
            )
        return [LongcatFlashLayer(config, source.at(f"layers.{layer // 2}"), layer, tables) for layer in numbers[::2]]

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.choice("zero_expert_type", "identity", ("identity",))
        file.require_absent("attention_method", "MLA")
        for name in ("norm_topk_prob", "router_bias"):
            file.require_absent(name, False)
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
            file.require_absent(name, True)
        layers = 2 * file.count("num_layers", 28)
        fields = {name: file.count(own, default) for name, (own, default) in _NAMES.items()}
        config = read_deepseek_config(
            ConfigFile({**file.fields, **fields, **_NO_GROUPS, "num_hidden_layers": layers}), _DEFAULTS,
            chosen=12, dense_layers=frozenset(range(1, layers, 2)), corrected=True,
        )  # fmt: skip
        file.require_absent("qk_head_dim", config.latent.query_dim)
        file.require_absent("head_dim", config.latent.rope_dim)
        assert config.low_rank is not None
        # The model multiplies queries by a constant. Scores are linear in queries, so their scale takes it.
        scale = config.latent.scale * (config.hidden_size / config.low_rank) ** 0.5
        spec = msgspec.structs.replace(config.latent, scale=scale)
        given = {
            **msgspec.structs.asdict(config), "latent": spec, "attention": (spec,) * layers,
            "latent_scale": (config.hidden_size / config.latent.rank) ** 0.5,
        }  # fmt: skip
        identities = 0 if file.fields.get("zero_expert_num", 0) is None else file.integer("zero_expert_num", 256)
        return LongcatFlashConfig(**given, identities=identities)
