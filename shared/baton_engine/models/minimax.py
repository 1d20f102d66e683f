"""MiniMax-Text-01 and MiniMax-M1 (MiniMax, 2025): Mixtral with lightning attention in seven of eight layers. The
residual of a block is the norm before it, and both have factors."""

from typing import Any, NamedTuple

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.lightning import Lightning
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import fraction_of, read_rope
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .mixtral import MixtralLayer
from .recurrent_states import StateOrAttention, WithStates, state_windows
from .sparse_config import SparseConfig, read_experts_per_token

# Fields of the authors' configuration class, and those that transformers has for them.
_NAMES = {
    "layernorm_full_attention_alpha": "full_attn_alpha_factor",
    "layernorm_full_attention_beta": "full_attn_beta_factor",
    "layernorm_linear_attention_alpha": "linear_attn_alpha_factor",
    "layernorm_linear_attention_beta": "linear_attn_beta_factor", "layernorm_mlp_alpha": "mlp_alpha_factor",
    "layernorm_mlp_beta": "mlp_beta_factor",
}  # fmt: skip
_KINDS = ("linear_attention", "full_attention")


class Factors(NamedTuple):
    """Of the residual, and of the output of a block."""

    residual: float
    output: float


class MiniMaxConfig(WithStates, SparseConfig, frozen=True, kw_only=True):
    """factors: of attention, lightning attention and experts."""

    state_layers: frozenset[int]
    states: StateShape | None
    factors: tuple[Factors, Factors, Factors]


class MiniMaxLayer(StateOrAttention, MixtralLayer):
    state = "self_attn"

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        assert isinstance(config, MiniMaxConfig)
        self.attention = self.make_attention(config, self.block(source, 0), layer, rotary)
        self.mlp = self.make_mlp(config, source, layer)
        # Their results are residuals, too, so they are numbers whatever the products after them take.
        self._norms = [RmsNorm(source.at(name), config.hidden_size, config.rms_norm_eps) for name in self.norms]
        full, linear, experts = config.factors
        self._factors = linear if layer in config.state_layers else full, experts

    def make_state(self, config: Any, source: Source, layer: int) -> Lightning:
        heads = config.states.value_heads
        slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32))
        # The later a layer is, the slower its states decay.
        slopes *= 1 - layer / (config.num_layers - 1 + 1e-5) + 1e-5
        return Lightning(source, layer, config.states, slopes, config.hidden_size)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._norms[0].add(x, residual)[0]
        x, residual = _scaled(self.attention(normed, ctx), normed, self._factors[0])
        normed = self._norms[1].add(x, residual)[0]
        return _scaled(self.mlp(normed), normed, self._factors[1])


class MiniMax(Llama):
    layer = MiniMaxLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, heads = file.count("num_hidden_layers"), file.count("num_attention_heads")
        context, experts = file.count("max_position_embeddings", 131_072), file.count("num_local_experts", 8)
        kinds = file.layer_types("layer_types", layers, _KINDS)
        state_layers = frozenset(
            layer for layer in range(layers) if (kinds[layer] == _KINDS[0] if kinds else layer % 2)
        )  # fmt: skip
        dim, kv_heads = file.count("head_dim", file.count("hidden_size") // heads), file.count("num_key_value_heads", 8)
        file.require_absent("sliding_window", context)
        rotated = fraction_of(file.at_most("rotary_dim", dim, dim), dim)
        factors = [
            Factors(*(file.number(f"{block}_{each}_factor", 1.0) for each in ("alpha", "beta")))
            for block in ("full_attn", "linear_attn", "mlp")
        ]  # fmt: skip
        return read_llama_config(
            MiniMaxConfig,
            file,
            Defaults(131_072, num_kv_heads=8, rms_norm_eps=1e-5),
            state_windows(state_layers, layers),
            rope=read_rope(file, context, partial=rotated, theta=1e6),
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(read_experts_per_token(file, experts, 2), normalize=True),
            state_layers=state_layers,
            states=StateShape(kv_heads, heads, heads, dim, dim, 1) if state_layers else None,
            factors=tuple(factors),
        )


class MiniMaxText01(MiniMax):
    """With the names that the authors' own configuration class has for fields."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # The authors' code takes a field that is absent as false.
        if file.fields.get("postnorm") is not True:
            raise ConfigError(f"postnorm in config.json must be true: {file.architecture} is served with it alone")
        file.require_absent("shared_intermediate_size", 0)
        kinds = file.integers("attn_type_list")
        if len(kinds) != file.count("num_hidden_layers") or not {0, 1}.issuperset(kinds):
            raise ConfigError("attn_type_list in config.json must have 0 or 1 for each layer")
        own = {ours: file.number(name, 1.0) for name, ours in _NAMES.items()}
        return super().read_config(
            ConfigFile({**file.fields, **own, "layer_types": [_KINDS[kind] for kind in kinds]})
        )  # fmt: skip


def _scaled(
    output: torch.Tensor, residual: torch.Tensor, factors: Factors
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output of a block and its residual with their factors."""
    output = output if factors.output == 1.0 else output * factors.output
    return output, residual if factors.residual == 1.0 else residual * factors.residual
